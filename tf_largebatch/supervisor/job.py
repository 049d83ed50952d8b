"""What a job is: which processes, with which commands and environments. Pure text, nothing is started.

A dry run prints a `Job`; a backend (`local_processes.py`) starts it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tf_largebatch import worker_events
from tf_largebatch.distribution import cluster
from tf_largebatch.validation import InputError


@dataclass(frozen=True)
class Worker:
    """One process of a job.

    Attributes:
      rank: its position in the cluster; rank 0 is the chief.
      argv: the command, program first.
      environment: (variable, value) added to what is inherited where it starts; the value None takes an
        inherited variable away.
      host: where it runs; None is this machine.
      folder: its current folder; None is that of the launcher.
    """

    rank: int
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str | None], ...] = ()
    host: str | None = None
    folder: str | None = None

    @property
    def name(self) -> str:
        return f"worker {self.rank}"

    def full_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of this process, given that of the process that starts it."""
        merged = {**inherited, **dict(self.environment)}
        return {name: value for name, value in merged.items() if value is not None}


@dataclass(frozen=True)
class Job:
    """Workers that train together.

    Attributes:
      workers: in rank order.
      addresses: the `host:port` on which each listens.
      tells_when_ready: whether the program is known to tell when all workers have met.
    """

    workers: tuple[Worker, ...]
    addresses: tuple[str, ...]
    tells_when_ready: bool = False

    def with_environment(self, environment: Mapping[str, str]) -> Job:
        """The same job with these variables beside its workers' own."""
        added = tuple(environment.items())
        workers = tuple(replace(worker, environment=(*worker.environment, *added)) for worker in self.workers)
        return replace(self, workers=workers)


def told_when_ready(job: Job) -> Job:
    """The same job, of a program that is known to tell when all workers have met."""
    return replace(job, tells_when_ready=True)


def supervised(job: Job, job_id: str, attempt: int) -> Job:
    """What every supervised worker finds in its environment: which job it is, and that its events are read."""
    told = {"PYTHONUNBUFFERED": "1", worker_events.VARIABLE: "1", "TFLB_JOB": job_id, "TFLB_ATTEMPT": str(attempt)}
    return job.with_environment(told)


def local_job(
    argv: Sequence[str],
    addresses: Sequence[str],
    gpus: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Job:
    """A job of as many workers on this machine as there are addresses.

    Args:
      argv: the command of every worker.
      addresses: `host:port` of each worker, in rank order.
      gpus: the GPUs that this job may use, as CUDA_VISIBLE_DEVICES names them.
      environment: variables to add for every worker.

    Raises:
      InputError: the GPUs cannot be shared evenly.
    """
    workers = []
    for rank, share in enumerate(gpu_shares(gpus, len(addresses))):
        # A process on its own has no cluster, so a TF_CONFIG of some other job must not reach it.
        tf_config = cluster.of_workers(addresses, rank).tf_config() if len(addresses) > 1 else None
        variables: dict[str, str | None] = {"TF_CONFIG": tf_config, **(environment or {})}
        if share:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        workers.append(Worker(rank, tuple(argv), tuple(variables.items())))
    return Job(tuple(workers), tuple(addresses))


def gpu_shares(gpus: Sequence[str], num_workers: int) -> list[tuple[str, ...]]:
    """Cuts the GPUs into one equal, contiguous share for each worker; empty shares without GPUs.

    Raises:
      InputError: the shares would be unequal, and so would the replicas of the workers.
    """
    share, rest = divmod(len(gpus), num_workers)
    if rest:
        fitting = [str(count) for count in range(1, len(gpus) + 1) if len(gpus) % count == 0]
        raise InputError(
            f"--local_workers is {num_workers}, but {len(gpus)} visible GPUs ({', '.join(gpus)}) cannot be shared "
            f"evenly; use {' or '.join(fitting)} workers, or set CUDA_VISIBLE_DEVICES."
        )
    return [tuple(gpus[rank * share : (rank + 1) * share]) for rank in range(num_workers)]


def worker_python_path(package_folder: str, inherited: str, current_folder: str) -> str:
    """The PYTHONPATH of workers that are started by file path.

    Args:
      package_folder: the folder that holds the `tf_largebatch` in use. It comes first, so that
        workers run the same code as their launcher, whatever lies in the current folder.
      inherited: the launcher's own PYTHONPATH.
      current_folder: where the user's own networks and data sets may lie; it comes last.
    """
    folders = [package_folder, *filter(None, inherited.split(os.pathsep)), current_folder]
    return os.pathsep.join(dict.fromkeys(folders))


def describe(job: Job) -> str:
    """Each worker's variables and command, to be read or to be pasted into a shell."""
    return "\n\n".join(
        f"# {worker.name} of {len(job.workers)}, at {address}\n{_pasteable(worker)}"
        for worker, address in zip(job.workers, job.addresses, strict=True)
    )


def _pasteable(worker: Worker) -> str:
    removed = [f"-u {name}" for name, value in worker.environment if value is None]
    added = [f"{name}={shlex.quote(value)}" for name, value in worker.environment if value is not None]
    return " \\\n    ".join([" ".join(["env", *removed]), *added, shlex.join(worker.argv)])
