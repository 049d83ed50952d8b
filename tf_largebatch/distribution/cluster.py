"""Which processes train together, and which of them this one is: environment -> `Cluster`.

Pure: nothing here starts a process, opens a socket or loads TensorFlow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from tf_largebatch.distribution import kubernetes, slurm
from tf_largebatch.validation import InputError, nearest

# Variables that a launcher sets for its workers.
START_TIMEOUT, HEARTBEAT_TIMEOUT = "TFLB_START_TIMEOUT", "TFLB_HEARTBEAT_TIMEOUT"

# Job names that tf.distribute.MultiWorkerMirroredStrategy trains with, in rank order.
_TRAINING_JOBS = ("chief", "worker")
# A name, an IPv4 address or an IPv6 address in brackets, then the port; no scheme ("http://").
_ADDRESS = re.compile(r"([^\s:/\[\]]+|\[[\w:.%]+\]):([0-9]{1,5})")


@dataclass(frozen=True)
class Cluster:
    """The workers of one synchronous job, seen from one of them.

    Attributes:
      jobs: (name, addresses) in rank order, such as `(("worker", ("a:2222", "b:2222")),)`; empty
        for a process on its own.
      task: this process's (job name, index).
      start_timeout_secs: how long this worker waits for the others; None: for ever.
      heartbeat_timeout_secs: after how long without a sign of life a worker counts as lost; None is
        TensorFlow's limit, 10 s. That the chief has crashed the others notice at once whatever it is;
        that another worker has, the chief only after it, if no launcher sees that worker end.
    """

    jobs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    task: tuple[str, int] = ("worker", 0)
    start_timeout_secs: float | None = None
    heartbeat_timeout_secs: float | None = None

    @property
    def num_workers(self) -> int:
        return sum(len(addresses) for _, addresses in self.jobs) or 1

    @property
    def rank(self) -> int:
        """This worker's position: its slice of every global batch is the rank-th."""
        before = 0
        for name, addresses in self.jobs:
            if name == self.task[0]:
                break
            before += len(addresses)
        return before + self.task[1]

    @property
    def is_chief(self) -> bool:
        """True on the one worker that reports and writes files."""
        return self.rank == 0

    @property
    def address(self) -> str | None:
        """This worker's own `host:port`; None without a cluster."""
        return dict(self.jobs)[self.task[0]][self.task[1]] if self.jobs else None

    def tf_config(self) -> str:
        """The TF_CONFIG that describes this cluster and task; '' without a cluster."""
        if not self.jobs:
            return ""
        cluster = {name: list(addresses) for name, addresses in self.jobs}
        return json.dumps({"cluster": cluster, "task": {"type": self.task[0], "index": self.task[1]}})


def of_workers(addresses: list[str] | tuple[str, ...], rank: int) -> Cluster:
    """The cluster of one "worker" job at these `host:port` addresses, seen from worker `rank`."""
    return Cluster((("worker", tuple(addresses)),), ("worker", rank))


def from_environment(environment: Mapping[str, str]) -> Cluster:
    """The cluster of this process: TF_CONFIG, else a Kubernetes pod's or a Slurm task's; else a process on its own.

    TF_CONFIG that is empty or `{}` counts as unset. TFLB_START_TIMEOUT and TFLB_HEARTBEAT_TIMEOUT are seconds.

    Raises:
      InputError: TF_CONFIG is no JSON, misses a part, or names a task that is not in the cluster; or what
        the scheduler tells does not fit together.
    """
    found = _from_tf_config(environment.get("TF_CONFIG", "").strip())
    for scheduler in (kubernetes, slurm):
        if not found.jobs and (workers := scheduler.worker_addresses(environment)):
            found = of_workers(*workers)
    return replace(
        found,
        start_timeout_secs=_seconds(environment, START_TIMEOUT),
        heartbeat_timeout_secs=_seconds(environment, HEARTBEAT_TIMEOUT),
    )


def take_own_gpus(environment: MutableMapping[str, str]) -> None:
    """Leaves a Slurm task that sees the GPUs of all tasks of its node its own share; before TensorFlow looks.

    Raises:
      InputError: the GPUs cannot be shared evenly.
    """
    # Who says what the cluster is, says that too.
    gpus = None if environment.get("TF_CONFIG") else slurm.gpus_of_task(environment)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus


def _seconds(environment: Mapping[str, str], name: str) -> float | None:
    text = environment.get(name, "").strip()
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = -1.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError(f"{name} is {text!r}, but must be a number of seconds above 0.")
    return seconds


def _from_tf_config(text: str) -> Cluster:
    if not text:
        return Cluster()
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise InputError(f"TF_CONFIG is not JSON ({failure}): {text!r:.80}.") from None
    if config == {}:
        return Cluster()
    jobs = _jobs(config)
    return Cluster(jobs, _task(config, dict(jobs)))


def _jobs(config: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    cluster = config.get("cluster") if isinstance(config, dict) else None
    if not isinstance(cluster, dict) or not cluster:
        raise InputError('TF_CONFIG must hold {"cluster": {"worker": ["host:port", ...]}, "task": {...}}.')
    for name in cluster:
        if name not in _TRAINING_JOBS:
            raise InputError(
                f"TF_CONFIG: job {name!r}{nearest(name, _TRAINING_JOBS)} is not part of synchronous training; "
                f"allowed are {', '.join(_TRAINING_JOBS)}."
            )
    jobs = tuple((name, _addresses(name, cluster[name])) for name in _TRAINING_JOBS if name in cluster)
    everyone = [address for _, addresses in jobs for address in addresses]
    for address in everyone:
        if everyone.count(address) > 1:
            raise InputError(f"TF_CONFIG: two tasks share the address {address!r}; each needs a port of its own.")
    if len(dict(jobs).get("chief", ())) > 1:
        raise InputError("TF_CONFIG: there can be one chief; make the others workers.")
    return jobs


def _addresses(name: str, addresses: object) -> tuple[str, ...]:
    if not isinstance(addresses, list) or not addresses:
        raise InputError(f"TF_CONFIG: cluster.{name} is {addresses!r}, but must be a list of 'host:port'.")
    for address in addresses:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if not parts or not 0 < int(parts[2]) < 65536:
            raise InputError(f"TF_CONFIG: cluster.{name} holds {address!r}, but every entry must be 'host:port'.")
    return tuple(addresses)


def _task(config: dict, jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise InputError(
            f'TF_CONFIG: task is {task!r}, but must be {{"type": "worker", "index": N}} with this process\'s own N.'
        )
    name, index = task["type"], task["index"]
    if not isinstance(name, str) or name not in jobs:
        raise InputError(
            f"TF_CONFIG: task.type is {name!r}{nearest(name, jobs)}, but the cluster has {', '.join(jobs)}."
        )
    # TensorFlow accepts an index in quotes, so schedulers that template TF_CONFIG write one.
    if isinstance(index, bool) or not re.fullmatch("[0-9]{1,9}", str(index)):
        raise InputError(f"TF_CONFIG: task.index is {index!r}, but must be a whole number from 0.")
    if int(index) >= len(jobs[name]):
        raise InputError(
            f"TF_CONFIG: task {name} {index} is not in the cluster, which has {name} 0 to {len(jobs[name]) - 1}."
        )
    return name, int(index)
