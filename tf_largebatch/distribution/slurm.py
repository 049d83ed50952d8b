"""Which tasks of a Slurm step train together: the variables of srun -> addresses, rank and GPUs.

For programs that srun starts once a task, without a launcher of ours: `srun --ntasks-per-node=2 python train.py`.
Nothing is sorted: ranks follow Slurm's own order, in which node10 comes after node9. What is concluded is
compared with what Slurm told this task, because one task with a wrong view would leave all others waiting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tf_largebatch.distribution.slurm_commands import hostnames
from tf_largebatch.validation import InputError

# Registered ports, below those that Linux gives to outgoing connections (32768 and up).
_FIRST_PORT, _LAST_PORT = 20_000, 29_999
# So many ports for the tasks of a job on one node; more where there are more tasks.
_PORTS_PER_JOB = 16
# Jobs with consecutive numbers often share a node. No slot is theirs and also that of an early step of the other.
_SLOTS_BETWEEN_JOBS = 37
_NO_GPU = ("", "-1", "NoDevFiles")


def worker_addresses(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """The `host:port` of every task of this Slurm step in rank order, and this task's rank.

    Args:
      environment: such as `os.environ`; TFLB_PORT in it is the port of the first task on each node.

    Returns:
      None for what is no task of a step, or the only one.

    Raises:
      InputError: the variables contradict each other, or tasks are distributed in a way that they do not tell.
    """
    if not _is_one_of_several_tasks(environment):
        return None
    rank = _number(environment, "SLURM_PROCID")
    counts = _tasks_per_node(environment)
    nodes = hostnames(environment.get("SLURM_STEP_NODELIST", ""), environment)
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if len(counts) != len(nodes) or sum(counts) != tasks:
        raise InputError(
            f"SLURM_STEP_TASKS_PER_NODE is {environment['SLURM_STEP_TASKS_PER_NODE']!r}, which does not fit "
            f"{len(nodes)} nodes ({environment['SLURM_STEP_NODELIST']}) and SLURM_STEP_NUM_TASKS={tasks}; set "
            "TF_CONFIG instead."
        )
    places = _places(counts, _at_a_time(environment, counts))
    _compare(environment, rank, nodes, places)
    port = _port(environment, max(counts))
    return [f"{nodes[node]}:{port + local}" for node, local in places], rank


def gpus_of_task(environment: Mapping[str, str]) -> str | None:
    """What CUDA_VISIBLE_DEVICES must become for this task of a Slurm step; None: it is right as it is.

    Slurm shows all GPUs of a node to every task there, unless it was told otherwise (--gpus-per-task,
    --gpu-bind). Then tasks get equal, contiguous shares, in the order of SLURM_LOCALID and with Slurm's names.

    Args:
      environment: such as `os.environ`, before anything has changed CUDA_VISIBLE_DEVICES.

    Raises:
      InputError: the shares would be unequal, or tasks would share some of their GPUs.
    """
    # Absent where Slurm has given no GPUs, or where GPUs are meant to be shared (shards).
    if "SLURM_GPUS_ON_NODE" not in environment or not _is_one_of_several_tasks(environment):
        return None
    on_node = _number(environment, "SLURM_GPUS_ON_NODE")
    counts = _tasks_per_node(environment)
    node = _number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise InputError(f"SLURM_NODEID is {node}, but the step has {len(counts)} nodes; set TF_CONFIG instead.")
    tasks = counts[node]
    if tasks == 1 or not on_node:
        return None
    where = f"SLURM_GPUS_ON_NODE is {on_node} for {tasks} tasks on this node"
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        raise InputError(
            f"{where}, but CUDA_VISIBLE_DEVICES is not set, so each would take all GPUs; leave out --gpu-bind=none, "
            "or set CUDA_VISIBLE_DEVICES for each task."
        )
    gpus = [name.strip() for name in shown.split(",")]
    if gpus[0] in _NO_GPU or len(gpus) * tasks <= on_node:
        return None
    if len(gpus) != on_node:
        raise InputError(
            f"{where}, but each task is shown {len(gpus)} ({shown}), so that tasks would share GPUs; use "
            "--gpus-per-task, or leave out --gpu-bind."
        )
    share, rest = divmod(on_node, tasks)
    if rest:
        raise InputError(f"{where}, which cannot be shared evenly; use a number of tasks that divides {on_node}.")
    local = _number(environment, "SLURM_LOCALID")
    return ",".join(gpus[local * share : (local + 1) * share])


def first_port(job_id: int, step_id: int, tasks_per_node: int) -> int:
    """The port of the first task of a step on any node; others there follow.

    Different for jobs with near numbers, and for near steps of one job, since they may be on one node.
    """
    ports = max(tasks_per_node, _PORTS_PER_JOB)
    slots = (_LAST_PORT + 1 - _FIRST_PORT) // ports
    return _FIRST_PORT + (job_id * _SLOTS_BETWEEN_JOBS + step_id) % slots * ports


def _is_one_of_several_tasks(environment: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID too, but belongs to no step.
    if not {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID"} <= set(environment):
        return False
    return _number(environment, "SLURM_STEP_NUM_TASKS") > 1


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise InputError(f"{variable} is {text!r}, but srun sets it to a whole number; set TF_CONFIG instead.")
    return int(text)


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for entry in text.split(","):
        parts = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", entry)
        if not parts:
            raise InputError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, but srun sets it to counts such as '2(x3),1'; set TF_CONFIG "
                "instead."
            )
        counts += [int(parts[1])] * int(parts[2] or 1)
    return counts


def _at_a_time(environment: Mapping[str, str], counts: Sequence[int]) -> int:
    """How many tasks with consecutive ranks a node gets in its turn."""
    told = environment.get("SLURM_DISTRIBUTION") or "block"
    # After a colon comes how a node's tasks get its sockets and cores; after a comma, how full nodes are packed.
    kind, _, size = re.split("[:,]", told)[0].lower().partition("=")
    if kind in ("block", "*"):
        return max(counts)
    if kind == "cyclic":
        return 1
    if kind == "plane":
        return max(int(size) if size.isdecimal() else _number(environment, "SLURM_DIST_PLANESIZE"), 1)
    raise InputError(
        f"SLURM_DISTRIBUTION is {told!r}, from which it cannot be told where each task runs; use srun -m block, "
        "cyclic or plane=SIZE, or set TF_CONFIG."
    )


def _places(counts: Sequence[int], at_a_time: int) -> list[tuple[int, int]]:
    """(node, task on that node) of each rank, where nodes take turns until each has its count."""
    places: list[tuple[int, int]] = []
    for turn in range(0, max(counts), at_a_time):
        for node, count in enumerate(counts):
            places += [(node, local) for local in range(turn, min(turn + at_a_time, count))]
    return places


def _compare(
    environment: Mapping[str, str], rank: int, nodes: Sequence[str], places: Sequence[tuple[int, int]]
) -> None:
    """Compares the places with all that Slurm told this task of itself and of its node."""
    if rank >= len(places):
        raise InputError(f"SLURM_PROCID is {rank}, but the step has {len(places)} tasks; set TF_CONFIG instead.")
    node, local = places[rank]
    expected = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": nodes[node],
        # Even where this task is at its place, as rank 0 always is, its neighbours may not be.
        "SLURM_GTIDS": ",".join(str(other) for other, (place, _) in enumerate(places) if place == node),
    }
    for variable, value in expected.items():
        told = environment.get(variable, value)
        if told != value:
            kind = environment.get("SLURM_DISTRIBUTION") or "block"
            raise InputError(
                f"{variable} is {told!r}, but would be {value!r} for task {rank} of "
                f"{environment['SLURM_STEP_NODELIST']} with the distribution {kind!r}; give srun its -m block, "
                "cyclic or plane=SIZE, or set TF_CONFIG."
            )


def _port(environment: Mapping[str, str], tasks_per_node: int) -> int:
    given = environment.get("TFLB_PORT")
    if not given:
        step = _number(environment, "SLURM_STEP_ID")
        return first_port(_number(environment, "SLURM_JOB_ID"), step, tasks_per_node)
    highest = 65536 - tasks_per_node
    if not re.fullmatch("[0-9]{1,5}", given) or not 0 < int(given) <= highest:
        raise InputError(f"TFLB_PORT is {given!r}, but must be a port from 1 to {highest}.")
    return int(given)
