"""Gradient accumulation inside one training step: one all-reduce and one update per global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import (
    collectives,
    global_batch,
    keras3_repairs,
    keras3_trainer,
    micro_batch_checks,
    moving_statistics,
)
from tf_largebatch.distribution import keras_train_step as step_of
from tf_largebatch.validation import InputError, PositiveInt, checked


def train_in_micro_batches(
    model: keras.Model, micro_batches: int, jit_compile: bool = False, wire_dtype: str = "float32"
) -> keras.Model:
    """Makes `fit` take each replica's batch in slices; the update is that of the whole batch.

    In one step each replica sums the gradients of its `micro_batches` slices, then all replicas join one
    all-reduce and make one update. Memory is that of one slice. Schedules, warm-up, moving averages of
    the weights and `iterations` count steps. The loss scale of mixed precision is checked on the reduced
    gradient. Moving statistics of batch norm are updated once a step, with the mean over all slices of all
    replicas. Works for functional, sequential and subclassed models, before or after `compile`, under any
    strategy and without one. A loaded or copied model needs the call again. On Keras 3 it applies
    `keras3_repairs.py`, which must not be undone while the model trains.

    A loss of yours that gives one number, in `compile`, `compute_loss` or `add_loss`, is taken for a mean over the
    examples. State that layers of yours keep, other than batch norm's, changes with every slice.

    Args:
      model: without a `train_step` of its own; made in the strategy's scope.
      micro_batches: slices of each replica's batch; 1 is the stock step with moving statistics that are
        equal on all replicas.
      jit_compile: whether XLA compiles the loop over the slices; the all-reduce and the update stay outside
        of it. Give it here and leave `jit_compile=False` in `compile`.
      wire_dtype: dtype in which gradients travel and are summed; other than "float32" results change.

    Returns:
      The model, whose `fit` does so from now on.

    Raises:
      InputError: the model cannot be trained in slices; where only its data or `compile` tell, `fit`
        raises it before the first step.
    """
    micro_batches = checked("micro_batches", micro_batches, PositiveInt)
    jit_compile = checked("jit_compile", jit_compile, bool)
    wire_dtype = checked("wire_dtype", wire_dtype, Literal["float32", "bfloat16"])
    if not isinstance(model, keras.Model):
        raise InputError(f"train_in_micro_batches takes a Keras model, not {type(model).__name__}.")
    if step_of.has_own_train_step(model):
        raise InputError(f"{type(model).__name__} has a train_step of its own, which cannot be cut into micro-batches.")
    micro_batch_checks.check_layers(model, micro_batches)
    keras3_repairs.apply()

    @tf.autograph.experimental.do_not_convert
    def train_step(data: Any) -> dict[str, tf.Tensor]:
        micro_batch_checks.check_layers(model, micro_batches)
        micro_batch_checks.check_compiled(model, micro_batches)
        _build(model, data)
        variables, tensors = step_of.trained(model)
        gradients, statistics = _Slices(model, data, micro_batches, tensors, jit_compile).mean()
        for statistic, mean in zip(moving_statistics.variables(model), statistics):
            statistic.assign(mean)
        moving_statistics.average(moving_statistics.variables(model), keras3_trainer.share())
        if variables:
            step_of.apply_reduced(model.optimizer, collectives.all_reduce_sum(gradients, wire_dtype), variables)
        return model.get_metrics_result()

    train_step.averages_statistics = True
    model.train_step = train_step
    model.fit = _checked_fit(model.fit, micro_batches, model.distribute_strategy.num_replicas_in_sync)
    # Whatever a fit before this call has compiled is out of date.
    model.train_function = None
    return model


def _build(model: keras.Model, data: Any) -> None:
    """Makes the variables of a model that has not been called, which must be there before the loop."""
    if not model.built:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        # As a batch of any size, or the model would expect this one.
        x = tf.nest.map_structure(lambda t: tf.raw_ops.PlaceholderWithDefault(input=t, shape=[None, *t.shape[1:]]), x)
        step_of.forward(model, x, training=False)


def _checked_fit(fit: Callable[..., Any], micro_batches: int, replicas: int) -> Callable[..., Any]:
    # A second call for the same model must not check for the micro-batches of the first.
    original = getattr(fit, "of_keras", fit)

    @functools.wraps(original)
    def fit_in_slices(x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        # A part of the arrays may yet be put aside, or not be reached: then the step itself tells.
        if micro_batches > 1 and not (kwargs.get("validation_split") or kwargs.get("steps_per_epoch")):
            micro_batch_checks.check_data(x, batch_size, micro_batches, replicas)
        return original(x, y, batch_size, *args, **kwargs)

    fit_in_slices.of_keras = original
    return fit_in_slices


class _Slices:
    """One replica's batch in equal slices, and what they have in common: gradients and moving statistics."""

    def __init__(self, model: keras.Model, data: Any, count: int, variables: Sequence[tf.Variable], jit: bool):
        self.model, self.count, self.variables, self.jit = model, count, variables, jit
        self.statistics = moving_statistics.variables(model)
        self.size = micro_batch_checks.slice_size(data, count)
        micro_batch_checks.check_groups(model, self.size, count)
        self.data = data if count == 1 else tf.nest.map_structure(self._cut, data)
        context = tf.distribute.get_replica_context()
        replica, share = tf.cast(context.replica_id_in_sync_group, tf.int64), tf.cast(count * self.size, tf.int64)
        self.step = tf.cast(tf.convert_to_tensor(model.optimizer.iterations), tf.int64)
        self.first_example = replica * share
        self.without_gradient: set[int] = set()

    def _cut(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        if leaf.shape[1:].is_fully_defined():
            return tf.reshape(leaf, (self.count, self.size, *leaf.shape[1:]))
        # Of a generator Keras 2 knows no shape.
        return tf.reshape(leaf, tf.concat([[self.count, self.size], tf.shape(leaf)[1:]], axis=0))

    def mean(self) -> tuple[list[Any], list[tf.Tensor]]:
        """(gradients of `variables`, values of the moving statistics) of the whole batch."""
        before = [tf.identity(statistic) for statistic in self.statistics]
        if self.count == 1:
            return self._of_slice(tf.constant(0), before)
        sums = [tf.zeros_like(variable) for variable in self.variables], [tf.zeros_like(value) for value in before]
        start = 0
        if not step_of.metrics_are_built(self.model):
            # Keras 2 makes the metrics' variables at their first update, which cannot be inside a loop.
            sums, start = self._added(sums, self._of_slice(tf.constant(0), before)), 1

        def all_slices(sums: Any, before: Any) -> Any:
            def another(index: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
                return index + 1, self._added(sums, self._of_slice(index, before))

            # One slice at a time: a second one in flight would need its memory too.
            return tf.while_loop(
                lambda index, _: index < self.count, another, (tf.constant(start), sums), parallel_iterations=1
            )[1]

        compiled = tf.function(all_slices, jit_compile=True, autograph=False) if self.jit else all_slices
        gradients, statistics = compiled(sums, before)
        gradients = [None if index in self.without_gradient else total for index, total in enumerate(gradients)]
        return gradients, [statistic / self.count for statistic in statistics]

    def _of_slice(self, index: tf.Tensor, before: Sequence[tf.Tensor]) -> tuple[list[Any], list[tf.Tensor]]:
        # Each slice updates the moving statistics from where the step found them.
        for statistic, value in zip(self.statistics, before):
            statistic.assign(value)
        data = self.data
        if self.count > 1:
            data = tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[index], data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        first = self.first_example + tf.cast(index, tf.int64) * tf.cast(self.size, tf.int64)
        with global_batch.at(self.step, first), tf.GradientTape() as tape:
            y_pred = step_of.forward(self.model, x)
            if self.count > 1 and step_of.has_mask(y_pred):
                raise InputError(
                    "the model's output has a mask, by whose size Keras divides the loss of each micro-batch; "
                    "give sample weights instead, or train with micro_batches=1."
                )
            loss = step_of.loss(self.model, x, y, y_pred, sample_weight)
            # Before the backward pass: its 16-bit gradients are then those of the whole batch.
            loss = step_of.scaled_loss(self.model.optimizer, loss / self.count)
        gradients = tape.gradient(loss, self.variables)
        step_of.update_metrics(self.model, x, y, y_pred, sample_weight)
        return gradients, [tf.identity(statistic) for statistic in self.statistics]

    def _added(self, sums: Any, slice_: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        self.without_gradient = {index for index, gradient in enumerate(slice_[0]) if gradient is None}
        gradients = [total if g is None else total + tf.convert_to_tensor(g) for total, g in zip(sums[0], slice_[0])]
        return gradients, [total + value for total, value in zip(sums[1], slice_[1])]
