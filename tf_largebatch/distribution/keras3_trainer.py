"""Repairs of Keras 3's training loop under tf.distribute; applied by `keras3_repairs.py`.

What each replaces is in keras/src/backend/tensorflow/trainer.py and keras/src/losses/loss.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tf_largebatch._keras import tf
from tf_largebatch.distribution import collectives, moving_statistics

Original = Callable[..., Any]

# Each replica of tf.distribute.MirroredStrategy is traced in a thread of its own.
_here = threading.local()


def build_from_first_replica(original: Original) -> Original:
    """`_maybe_symbolic_build`: learns the shapes of a batch from one replica's part of it.

    Keras takes the mean over the replicas, which the collective strategy cannot do for a nested batch,
    nor any strategy for parts of different sizes. It takes a batch even where all is built, which
    ends a training whose validation data are just used up.
    """

    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if strategy is None or iterator is None:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        parts = (self._compile_metrics, self._compile_loss)
        if not all(part.built for part in [*self._flatten_layers(), *filter(None, parts)]):
            for _, _, batches in iterator:
                data_batch = tf.nest.map_structure(
                    lambda value: strategy.experimental_local_results(value)[0], next(batches)
                )
                break
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    return _maybe_symbolic_build


def step_over_replicas(original: Original) -> Original:
    """`_make_function`: a step whose results, moving statistics and loss are those of the global batch.

    Keras returns the mean of what the metrics are on each replica, which is not the metric of all
    examples unless all replicas have as many, and with several workers raises over it
    (`reduce_per_replica` reduces scalars over an axis). It keeps one replica's moving statistics, gives
    every replica the same weight whatever its number of examples, and its loop for
    `steps_per_execution` does not run on replicas.
    """

    def _make_function(self: Any, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        strategy = self._distribute_strategy
        if strategy is None:
            return original(self, step_function)
        training = step_function == self.train_step

        def replica_step(data: Any) -> Any:
            tensors = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]
            # Where the data have ended, what needs none of them must not run either: a count of examples.
            with tf.control_dependencies(tensors), _share_of_batch(data) as part:
                outputs = step_function(data)
            if training and not getattr(step_function, "averages_statistics", False):
                moving_statistics.average(moving_statistics.variables(self), part)
            return _results_of_all_replicas(self, outputs)

        @tf.autograph.experimental.do_not_convert
        def one_step(data: Any) -> Any:
            metrics, others = strategy.run(replica_step, args=(data,))
            metrics = {name: strategy.experimental_local_results(value)[0] for name, value in metrics.items()}
            others = tf.nest.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), others)
            return {**metrics, **others} if metrics else others

        called_alone = one_step
        if not self.run_eagerly:
            called_alone = tf.function(one_step, reduce_retracing=True, jit_compile=self.jit_compile)
        called_alone = self._autoconvert_optionals(called_alone)
        # A function within a condition within a loop is what TensorFlow cannot run on replicas.
        one_step = called_alone if self.jit_compile else self._autoconvert_optionals(one_step)

        @tf.autograph.experimental.do_not_convert
        def steps(iterator: Any) -> Any:
            outputs = one_step(iterator.get_next())
            if self.steps_per_execution == 1:
                return outputs

            def unfinished(step: tf.Tensor, more: tf.Tensor, _: Any) -> tf.Tensor:
                return tf.logical_and(step < self.steps_per_execution, more)

            def another(step: tf.Tensor, _: tf.Tensor, outputs: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
                data = iterator.get_next_as_optional()
                more = data.has_value()
                return step + 1, more, tf.cond(more, lambda: one_step(data.get_value()), lambda: outputs)

            return tf.while_loop(unfinished, another, [1, True, outputs])[2]

        if not self.run_eagerly:
            steps = tf.function(steps, reduce_retracing=True)

        def function(iterator: Any) -> Any:
            if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                return steps(iterator)
            for _, data in zip(range(self.steps_per_execution), iterator):
                outputs = called_alone(data)
            return outputs

        return function

    return _make_function


def scale_by_share(original: Original) -> Original:
    """`scale_loss_for_distribution`: a replica's mean loss times its share of the global batch."""

    def scale_loss_for_distribution(value: tf.Tensor) -> tf.Tensor:
        part = share()
        return original(value) if part is None else value * tf.cast(part, value.dtype)

    return scale_loss_for_distribution


def scale_single_numbers(original: Original) -> Original:
    """`reduce_values`: a loss function that gives one number is a mean too, and is divided by the replicas.

    Keras leaves it as it is, and the sum over N replicas makes the gradient N times too large.
    """

    def reduce_values(values: tf.Tensor, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"):
        from keras.src.losses import loss

        reduced = original(values, sample_weight, reduction)
        is_mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
        return loss.scale_loss_for_distribution(reduced) if is_mean and not tuple(values.shape) else reduced

    return reduce_values


def unscale_by_share(original: Original) -> Original:
    """`unscale_loss_for_distribution`, the inverse of `scale_by_share`; 0 for a replica without examples."""

    def unscale_loss_for_distribution(value: tf.Tensor) -> tf.Tensor:
        part = share()
        return original(value) if part is None else tf.math.divide_no_nan(value, tf.cast(part, value.dtype))

    return unscale_loss_for_distribution


def another_seed_on_each_replica(original: Original) -> Original:
    """`SeedGenerator.next`: Keras draws the same numbers, such as a dropout mask, on every replica."""

    def next(self: Any, ordered: bool = True) -> tf.Tensor:
        seed = original(self, ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        words = tf.bitcast(seed, tf.int32) if seed.dtype == tf.uint32 else tf.cast(seed, tf.int32)
        folded = tf.random.experimental.stateless_fold_in(words, tf.cast(context.replica_id_in_sync_group, tf.int32))
        return tf.bitcast(folded, tf.uint32) if seed.dtype == tf.uint32 else tf.cast(folded, seed.dtype)

    return next


def share() -> tf.Tensor | None:
    """This replica's share of the examples of the step at hand, 0 to 1; None where all have as many."""
    return getattr(_here, "share", None)


@contextlib.contextmanager
def _share_of_batch(data: Any) -> Iterator[tf.Tensor | None]:
    """This replica's share of the examples, 0 to 1; None where all replicas surely have as many."""
    context = tf.distribute.get_replica_context()
    # Ragged and sparse tensors tell their number of examples in other ways; the dense ones beside them have as many.
    examples = next((leaf for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor)), None)
    if context.num_replicas_in_sync == 1 or examples is None or examples.shape[:1].is_fully_defined():
        yield None
        return
    count = tf.cast(tf.shape(examples)[0], tf.float32)
    _here.share = count / context.all_reduce(tf.distribute.ReduceOp.SUM, count)
    try:
        yield _here.share
    finally:
        _here.share = None


def _results_of_all_replicas(model: Any, outputs: Any) -> tuple[dict[str, tf.Tensor], Any]:
    """The metrics in a step's `outputs`, of the examples of all replicas, and the rest of them."""
    from keras.src.backend import StatelessScope

    context = tf.distribute.get_replica_context()
    # What metrics count is summed over replicas, unless the metric says otherwise.
    counts = [variable for variable in model.metrics_variables if variable.aggregation in ("sum", "mean")]
    if not isinstance(outputs, dict) or not counts:
        return {}, outputs
    totals = collectives.all_reduce_sum([tf.convert_to_tensor(count.value) for count in counts])
    replicas = context.num_replicas_in_sync
    totals = [
        total / tf.cast(replicas, total.dtype) if count.aggregation == "mean" else total
        for count, total in zip(counts, totals)
    ]
    with StatelessScope(state_mapping=list(zip(counts, totals))):
        results = {name: value for name, value in model.get_metrics_result().items() if name in outputs}
    return results, {name: value for name, value in outputs.items() if name not in results}
