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
      InputError: it does not divide; the sentence names the nearest batches and worker counts that do.
    """
    replicas = num_workers * replicas_per_worker
    per_replica, rest = divmod(global_batch_size, replicas)
    if rest or not per_replica:
        below, above = per_replica * replicas, (per_replica + 1) * replicas
        sizes = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"global_batch_size is {global_batch_size}, which {replicas} replicas ({num_workers} workers x "
            f"{replicas_per_worker}) cannot share evenly; use {sizes}, or {_fewer(global_batch_size, replicas)} replicas."
        )
    return BatchSplit(global_batch_size, num_workers, replicas_per_worker, per_replica)


def _fewer(global_batch_size: int, replicas: int) -> int:
    """The largest number of replicas below `replicas` that divides the batch."""
    return max(count for count in range(1, replicas) if global_batch_size % count == 0)
