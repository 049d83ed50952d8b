"""Whole numbers summed over the workers of a strategy, so that all of them decide alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from tf_largebatch._keras import tf

# One traced function for each strategy.
_sums: weakref.WeakKeyDictionary[tf.distribute.Strategy, Callable] = weakref.WeakKeyDictionary()


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Processes that train together; 1 without a cluster."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    spec = strategy.cluster_resolver.cluster_spec()
    return max(sum(spec.num_tasks(job) for job in spec.jobs), 1)


def rank(strategy: tf.distribute.Strategy) -> int:
    """This process's position among them; the chief's is 0."""
    if num_workers(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec()
    before = spec.num_tasks("chief") if "chief" in spec.jobs and resolver.task_type != "chief" else 0
    return before + resolver.task_id


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process is the one that writes files."""
    return strategy.extended.should_checkpoint


def total(strategy: tf.distribute.Strategy, numbers: Sequence[int]) -> list[int]:
    """The sum of each number over all workers; every worker must call it, and waits for the others.

    Args:
      strategy: of all of them.
      numbers: this worker's, as many on each; sums over all replicas must fit int64.
    """
    workers = num_workers(strategy)
    if workers == 1:
        return list(numbers)
    if strategy not in _sums:
        # A weak reference, or the function would keep its strategy.
        _sums[strategy] = _traced(weakref.ref(strategy))
    sums = _sums[strategy](tf.constant(numbers, tf.int64))
    # Every replica of a worker adds the worker's numbers.
    return [int(value) // (strategy.num_replicas_in_sync // workers) for value in sums]


def of_chief(strategy: tf.distribute.Strategy, number: int) -> int:
    """The chief's number, on every worker."""
    return total(strategy, [number if is_chief(strategy) else 0])[0]


def _traced(strategy: Callable[[], tf.distribute.Strategy]) -> Callable[[tf.Tensor], tf.Tensor]:
    # Traced for each number of numbers: TensorFlow does not pack what has no fixed shape, and warns.
    @tf.function(autograph=False)
    def sums(numbers: tf.Tensor) -> tf.Tensor:
        return strategy().reduce("SUM", strategy().run(lambda: tf.identity(numbers)), axis=None)

    return sums
