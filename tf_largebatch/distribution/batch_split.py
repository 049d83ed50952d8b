"""How a global batch is cut up: global = replicas x micro_batches x per_replica. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from tf_largebatch.validation import InputError


@dataclass(frozen=True)
class BatchSplit:
    """One global batch over a cluster; each field counts what its name says.

    Replica r of worker w takes the examples from `(w * replicas_per_worker + r) * share` on, where
    `share = micro_batches * per_replica_batch_size`, so the cut never changes a batch's content.
    """

    global_batch_size: int
    num_workers: int
    replicas_per_worker: int
    per_replica_batch_size: int
    micro_batches: int = 1

    @property
    def replicas(self) -> int:
        return self.num_workers * self.replicas_per_worker

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} = {self.replicas} replicas ({self.num_workers} workers x "
            f"{self.replicas_per_worker}) x {self.micro_batches} micro-batches x "
            f"{self.per_replica_batch_size} examples"
        )


def split(global_batch_size: int, num_workers: int = 1, replicas_per_worker: int = 1) -> BatchSplit:
    """Cuts a global batch evenly over the replicas.

    Raises:
      InputError: a number is below 1; or the batch does not divide, and the sentence names the nearest
        batches that do, and the next smaller numbers of workers and of replicas per worker that do.
    """
    given = {
        "global_batch_size": global_batch_size,
        "the number of workers": num_workers,
        "the number of replicas per worker": replicas_per_worker,
    }
    for name, number in given.items():
        if number < 1:
            raise InputError(f"{name} is {number}, but must be at least 1.")
    replicas = num_workers * replicas_per_worker
    per_replica, rest = divmod(global_batch_size, replicas)
    if rest:
        below, above = per_replica * replicas, (per_replica + 1) * replicas
        workers = _fewer(num_workers, replicas_per_worker, global_batch_size)
        per_worker = _fewer(replicas_per_worker, num_workers, global_batch_size)
        ways = [f"use {below} or {above}" if below else f"use {above}"]
        ways += [f"{workers} worker{'s' * (workers > 1)}"] if workers else []
        ways += [f"{per_worker} replica{'s' * (per_worker > 1)} per worker"] if per_worker else []
        raise InputError(
            f"global_batch_size is {global_batch_size}, which {replicas} replicas ({num_workers} workers x "
            f"{replicas_per_worker}) cannot share evenly; {', or '.join(ways)}."
        )
    return BatchSplit(global_batch_size, num_workers, replicas_per_worker, per_replica)


def _fewer(count: int, others: int, global_batch_size: int) -> int:
    """The largest number below `count` that times `others` divides the batch; 0 if none does."""
    return max((fewer for fewer in range(1, count) if global_batch_size % (fewer * others) == 0), default=0)
