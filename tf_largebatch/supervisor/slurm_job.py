"""A job of workers on the nodes of one Slurm allocation: pure text as `job.py`, and how its workers are started.

The launcher runs inside the allocation, once, and starts every worker by an srun of its own. So it keeps hold of
each, and can start all of them again without waiting in Slurm's queue.
"""

from __future__ import annotations

import os
import re
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tf_largebatch.distribution import cluster, slurm, slurm_commands
from tf_largebatch.supervisor.attempt import Start
from tf_largebatch.supervisor.job import Job, Worker
from tf_largebatch.supervisor.remote_processes import SILENCE_SECS, RemoteProcess
from tf_largebatch.validation import InputError

# What sbatch leaves for the sruns in its script, and would give a worker other resources than the node's, or
# change its output.
_NOT_FOR_SRUN = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND"),
    *("SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_HINT"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
    *("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_LABELIO", "SLURM_THREADS_PER_CORE"),
    *("SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
)
# On the node, since a job may have GPU 1 of one node and GPU 0 of another: only Slurm's step there knows.
# Nobody's GPUs would mean a training on the CPU that nobody asked for.
_SHARE_OF_GPUS = (
    ': "${CUDA_VISIBLE_DEVICES:?is not set by Slurm, although the job has GPUs}"; '
    'CUDA_VISIBLE_DEVICES=$(echo "$CUDA_VISIBLE_DEVICES" | cut -d, -f"$1"); export CUDA_VISIBLE_DEVICES; '
    'shift; exec "$@"'
)


@dataclass(frozen=True)
class Allocation:
    """What Slurm has given to this job.

    Attributes:
      job_id: its number.
      nodes: their names in Slurm's order.
      gpus_per_node: how many GPUs of each node; all have equally many.
    """

    job_id: str
    nodes: tuple[str, ...]
    gpus_per_node: int = 0


def allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation in which this process runs.

    Args:
      environment: such as `os.environ`.

    Raises:
      InputError: this is in no allocation, srun has started it several times, or the nodes have different
        numbers of GPUs.
    """
    job_id = environment.get("SLURM_JOB_ID", "")
    if not re.fullmatch("[0-9]+", job_id):
        raise InputError(f"SLURM_JOB_ID is {job_id!r}, so this is not part of a Slurm job; submit one with sbatch.")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise InputError(
            f"SLURM_STEP_NUM_TASKS is {tasks!r}: srun has started this launcher that many times, but it starts the "
            "workers itself; start it once, without srun."
        )
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise InputError(
            f"SLURM_HET_SIZE is {environment['SLURM_HET_SIZE']!r}, but workers must be alike; submit a job of one part."
        )
    nodes = slurm_commands.hostnames(environment.get("SLURM_JOB_NODELIST", ""), environment)
    told = slurm_commands.output_of("scontrol", "show", "job", "--details", job_id, environment=environment)
    return Allocation(job_id, tuple(nodes), _gpus_per_node(told))


def _gpus_per_node(told: str) -> int:
    # The variables tell of the first node only, and after `salloc --gres` of none.
    counts = {}
    for nodes, gres in re.findall(r"^ +Nodes=(\S+) .*?\bGRES=(\S*)", told, flags=re.MULTILINE):
        counts[nodes] = sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:([0-9]+)", gres))
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of {nodes}" for nodes, count in counts.items())
        raise InputError(
            f"the Slurm job has unequal numbers of GPUs ({listed}), but all workers need the same; ask for them by "
            "node, with --gpus-per-node."
        )
    return max(counts.values(), default=0)


def slurm_job(
    argv: Sequence[str],
    allocation: Allocation,
    workers_per_node: int = 1,
    port: int | None = None,
    environment: Mapping[str, str | None] | None = None,
    folder: str | None = None,
) -> Job:
    """A job with so many workers on every node, in Slurm's order of nodes.

    Args:
      argv: the command of every worker.
      allocation: where they run.
      workers_per_node: how many share a node, its CPUs, and its GPUs in equal parts.
      port: of the first worker on each node, the others following it; None or 0 takes one by the job's number.
      environment: variables for every worker.
      folder: where they start; None: in the launcher's current folder.

    Raises:
      InputError: the GPUs of a node cannot be shared evenly, or the ports go beyond the last.
    """
    gpus = allocation.gpus_per_node
    if gpus % workers_per_node:
        fitting = [str(count) for count in range(1, gpus + 1) if gpus % count == 0]
        raise InputError(
            f"workers_per_node is {workers_per_node}, but {gpus} GPUs per node cannot be shared evenly; use "
            f"{' or '.join(fitting)}, or ask for other GPUs."
        )
    port = port or slurm.first_port(int(allocation.job_id), 0, workers_per_node)
    if port + workers_per_node > 65536:
        raise InputError(f"port is {port}, but must be at most {65536 - workers_per_node}.")
    addresses = [f"{node}:{port + local}" for node in allocation.nodes for local in range(workers_per_node)]
    workers = []
    for rank, address in enumerate(addresses):
        # A process on its own has no cluster, so a TF_CONFIG that is set there must not reach it.
        tf_config = cluster.of_workers(addresses, rank).tf_config() if len(addresses) > 1 else None
        variables = {"TF_CONFIG": tf_config, **(environment or {})}
        node = address.rpartition(":")[0]
        workers.append(Worker(rank, tuple(argv), tuple(variables.items()), node, folder))
    return Job(tuple(workers), tuple(addresses))


def srun_command(worker: Worker, allocation: Allocation, workers_per_node: int = 1) -> list[str]:
    """The command that runs what is appended to it at the place of this worker of a `slurm_job`.

    Several of them run on a node at once. Each sees all CPUs and all memory that the job has there, and its
    share of the GPUs.
    """
    gpus = allocation.gpus_per_node
    command = ["env", *(f"--unset={name}" for name in _NOT_FOR_SRUN), "srun"]
    command += [f"--jobid={allocation.job_id}", "--nodes=1", "--ntasks=1", f"--nodelist={worker.host}"]
    # --overlap: without it a second step waits until the first has ended. --cpu-bind=none: else it might bind
    # both to the same cores.
    command += ["--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none"]
    command += [f"--gpus-per-node={gpus}"] if gpus else []
    # An sbatch with --export=NONE would keep even PATH from the worker.
    command += ["--export=ALL", "--unbuffered", "--kill-on-bad-exit=1", "--quiet"]
    if gpus and workers_per_node > 1:
        share = gpus // workers_per_node
        first = worker.rank % workers_per_node * share + 1
        command += ["sh", "-c", _SHARE_OF_GPUS, "share of GPUs", f"{first}-{first + share - 1}"]
    return command


def slurm_start(
    allocation: Allocation,
    workers_per_node: int = 1,
    python: str = "python3",
    silence_secs: float | None = SILENCE_SECS,
) -> Start:
    """How a worker of a `slurm_job` is started.

    Args:
      allocation: as for `slurm_job`.
      workers_per_node: as for `slurm_job`.
      python: the Python on the nodes for what runs beside the worker.
      silence_secs: see `RemoteProcess`.
    """

    def start(worker: Worker, output: int) -> RemoteProcess:
        # Only a worker that sees a terminal draws a progress bar; it gets one like the launcher's.
        terminal = termios.tcgetwinsize(output) if os.isatty(output) else None
        transport = srun_command(worker, allocation, workers_per_node)
        return RemoteProcess(worker, output, transport, terminal, python=python, silence_secs=silence_secs)

    return start
