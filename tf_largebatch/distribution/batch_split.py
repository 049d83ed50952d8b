"""How a global batch is cut up: global = replicas x micro_batches x per_replica. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tf_largebatch.validation import InputError


@dataclass(frozen=True)
class BatchSplit:
    """One global batch over a cluster; each field counts what its name says.

    Replica r of worker w takes the examples from `(w * replicas_per_worker + r) * share` on, micro-batch
    by micro-batch, so the cut never changes a batch's content.
    """

    global_batch_size: int
    num_workers: int
    replicas_per_worker: int
    per_replica_batch_size: int
    micro_batches: int = 1

    @property
    def replicas(self) -> int:
        return self.num_workers * self.replicas_per_worker

    @property
    def share(self) -> int:
        """Examples of one global batch that one replica takes."""
        return self.micro_batches * self.per_replica_batch_size

    def __str__(self) -> str:
        return (
            f"{self.global_batch_size} = {self.replicas} replicas ({self.num_workers} workers x "
            f"{self.replicas_per_worker}) x {self.micro_batches} micro-batches x "
            f"{self.per_replica_batch_size} examples"
        )


def split(
    global_batch_size: int,
    num_workers: int = 1,
    replicas_per_worker: int = 1,
    max_per_replica_batch_size: int | None = None,
    batch_norm_group_size: int | None = None,
) -> BatchSplit:
    """Cuts a global batch evenly over the replicas, and each replica's share into equal micro-batches.

    A micro-batch is as large as it can be: it divides the share, is at most `max_per_replica_batch_size`
    (None: the share) and holds whole batch-norm groups. A group that is the whole global batch is formed
    over all replicas at once, so the share then is one micro-batch.

    Raises:
      InputError: a number is below 1; the batch does not divide, and the sentence names the nearest
        batches that do, and the next smaller numbers of workers and of replicas per worker that do; the
        limit is too small for a batch-norm group, and the sentence names the smallest that is not; or
        the share is no multiple of the group, and the sentence names the nearest group sizes, and numbers
        of workers and of replicas per worker, with which it is.
    """
    given = {
        "global_batch_size": global_batch_size,
        "the number of workers": num_workers,
        "the number of replicas per worker": replicas_per_worker,
        "max_per_replica_batch_size": max_per_replica_batch_size,
        "batch_norm_group_size": batch_norm_group_size,
    }
    for name, number in given.items():
        if number is not None and number < 1:
            raise InputError(f"{name} is {number}, but must be at least 1.")
    batch, limit, group = global_batch_size, max_per_replica_batch_size, batch_norm_group_size
    replicas = num_workers * replicas_per_worker
    per_replica = _largest_micro_batch(batch, replicas, limit, group)
    if per_replica:
        micro_batches = batch // replicas // per_replica
        return BatchSplit(batch, num_workers, replicas_per_worker, per_replica, micro_batches)

    workers = [n for n in _divisors(batch) if _largest_micro_batch(batch, n * replicas_per_worker, limit, group)]
    per_worker = [n for n in _divisors(batch) if _largest_micro_batch(batch, num_workers * n, limit, group)]
    cluster = f"{replicas} replicas ({num_workers} workers x {replicas_per_worker})"
    if batch % replicas:
        # As many groups for each replica; one over the whole batch grows and shrinks with it.
        unit = replicas if group in (None, batch) else replicas * group
        below = batch // unit * unit
        ways = f"use {below} or {below + unit}" if below else f"use {unit}"
        ways += " for it and for batch_norm_group_size" if group == batch else ""
        ways += _ways("worker", _below(num_workers, workers))
        ways += _ways("replica", _below(replicas_per_worker, per_worker), " per worker")
        raise InputError(f"global_batch_size is {batch}, which {cluster} cannot share evenly; {ways}.")
    share = batch // replicas
    if group == batch:
        raise InputError(
            f"max_per_replica_batch_size is {limit}, but batch norm over the whole global batch takes a replica's "
            f"{share} examples at once; use {share} or more."
        )
    if share % group == 0:
        raise InputError(
            f"max_per_replica_batch_size is {limit}, but a batch-norm group takes {group} examples at once; "
            f"use {group} or more."
        )
    groups = [n for n in [*_divisors(share), batch] if _largest_micro_batch(batch, replicas, limit, n)]
    ways = f"use {' or '.join(map(str, _nearest(group, groups)))}"
    ways += _ways("worker", _nearest(num_workers, workers))
    ways += _ways("replica", _nearest(replicas_per_worker, per_worker), " per worker")
    raise InputError(
        f"batch_norm_group_size is {group}, which does not divide the {share} examples that each of {cluster} takes "
        f"of a global batch; {ways}."
    )


def _largest_micro_batch(global_batch_size: int, replicas: int, limit: int | None, group: int | None) -> int:
    """The largest micro-batch that keeps the rules of `split`; 0 if none does."""
    share, rest = divmod(global_batch_size, replicas)
    if rest:
        return 0
    whole_groups = [share] if group == global_batch_size else [n for n in _divisors(share) if n % (group or 1) == 0]
    return max((n for n in whole_groups if n <= (limit or share)), default=0)


def _divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _below(number: int, candidates: list[int]) -> list[int]:
    """The nearest of the sorted candidates that is smaller, as a list of one; empty if there is none."""
    return [n for n in candidates if n < number][-1:]


def _nearest(number: int, candidates: list[int]) -> list[int]:
    """The nearest of the sorted candidates on either side."""
    return _below(number, candidates) + [n for n in candidates if n > number][:1]


def _ways(what: str, counts: list[int], where: str = "") -> str:
    return f", or {' or '.join(map(str, counts))} {what}{'s' * (counts != [1])}{where}" if counts else ""
