"""Keras 3 under tf.distribute, made to work: `fit`, `evaluate` and loss scaling.

Public issue: keras-team/keras#20585 (open since 2024). Under MultiWorkerMirroredStrategy stock Keras 3
raises "Attempt to convert a value (PerReplica...)", for two reasons, both in
keras/src/backend/tensorflow/trainer.py:

1. `_maybe_symbolic_build` averages the first batch over the replicas to learn its shapes. The
   collective strategy cannot reduce a nested batch. Any replica's part has the right shapes.
2. `reduce_per_replica` takes the mean of scalar metrics over `axis=0`, an axis they do not have.

3. `LossScaleOptimizer` looks for inf and NaN in the gradient of the first replica alone, before the
   all-reduce: an inf elsewhere reaches the weights, and workers that disagree wait for each other for
   ever. Any replica's inf makes the reduced gradient infinite, so all replicas must know of it.

`tests/conformance/test_keras3_canary.py` tells when Keras no longer needs this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import logging

from tf_largebatch._keras import KERAS_3, keras, keras_version, tf

TESTED_VERSIONS = ("3.15.0", "3.15.1")

# What was replaced: (owner, attribute, original).
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def apply() -> None:
    """Repairs Keras 3 in this process; does nothing on Keras 2 or when already applied."""
    if not KERAS_3 or _originals:
        return
    if keras_version() not in TESTED_VERSIONS:
        logging.warning(
            "tf_largebatch repairs Keras %s as it does %s, but was not tested with it.",
            keras_version(),
            " and ".join(TESTED_VERSIONS),
        )
    from keras.src.backend.tensorflow import trainer

    _replace(trainer.TensorFlowTrainer, "_maybe_symbolic_build", _build_from_first_replica)
    _replace(trainer, "reduce_per_replica", _reduce_scalars)
    _replace(keras.optimizers.LossScaleOptimizer, "check_finite", _finite_on_all_replicas)


def undo() -> None:
    """Puts Keras's own functions back."""
    while _originals:
        setattr(*_originals.pop())


def _replace(owner: Any, attribute: str, repair: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, attribute)
    setattr(owner, attribute, repair(original))
    _originals.append((owner, attribute, original))


def _multi_worker(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended._in_multi_worker_mode()


def _build_from_first_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self.distribute_strategy
        if iterator is not None and _multi_worker(strategy):
            for _, _, batches in iterator:
                data_batch = tf.nest.map_structure(
                    lambda value: strategy.experimental_local_results(value)[0], next(batches)
                )
                break
            iterator = None
        original(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


def _reduce_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: tf.distribute.Strategy, reduction: str) -> Any:
        if _multi_worker(strategy) and reduction in ("auto", "mean"):
            return tf.nest.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _finite_on_all_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_finite(self: Any, grads: Any) -> tf.Tensor:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return finite
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(finite, tf.int32)) == context.num_replicas_in_sync

    return check_finite
