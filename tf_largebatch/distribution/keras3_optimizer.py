"""Repairs of Keras 3's optimizers under tf.distribute; applied by `keras3_repairs.py`.

What each replaces is in keras/src/optimizers/base_optimizer.py, loss_scale_optimizer.py and
keras/src/backend/tensorflow/optimizer.py. The order is that of Keras 2: reduce the gradients over
the replicas, see whether they are finite, clip, update.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tf_largebatch._keras import Optimizer, keras, rows_summed, tf
from tf_largebatch.distribution import collectives

Original = Callable[..., Any]

# Each replica of tf.distribute.MirroredStrategy is traced in a thread of its own.
_here = threading.local()


@contextlib.contextmanager
def reduced_gradients() -> Iterator[None]:
    """Within it, `apply` of a repaired optimizer takes gradients as summed over the replicas already."""
    before = _are_reduced()
    _here.reduced = True
    try:
        yield
    finally:
        _here.reduced = before


def _are_reduced() -> bool:
    return getattr(_here, "reduced", False)


def _on_several_replicas() -> bool:
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def clip_nothing_yet(original: Original) -> Original:
    """`_clip_gradients`: not before the all-reduce, where the threshold would grow with the replicas.

    And not a sparse gradient's repeated rows one by one, whose norm is not that of the gradient.
    """

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> Sequence[Any]:
        if isinstance(self, Optimizer):
            # This package's put it right by themselves.
            return original(self, grads)
        if _on_several_replicas() and not getattr(_here, "clipping", False):
            return grads
        clips = self.clipnorm or self.global_clipnorm or self.clipvalue
        return original(self, rows_summed(grads) if clips else grads)

    return _clip_gradients


def reduce_then_clip(original: Original) -> Original:
    """`_all_reduce_sum_gradients`: does not reduce twice, and clips what is reduced."""

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Sequence[Any]) -> list[Any]:
        pairs = list(grads_and_vars) if _are_reduced() else original(self, grads_and_vars)
        if not _on_several_replicas() or isinstance(self, Optimizer):
            return pairs
        _here.clipping = True
        try:
            gradients = self._clip_gradients([gradient for gradient, _ in pairs])
        finally:
            _here.clipping = False
        return list(zip(gradients, [variable for _, variable in pairs]))

    return _all_reduce_sum_gradients


def accumulate_outside_of_conditions(original: Original) -> Original:
    """`_backend_apply_gradients`: gradient accumulation and `ema_overwrite_frequency` on several replicas.

    Keras updates variables inside a condition, where replicas cannot meet (`merge_call`). With
    accumulation the moving average of the weights takes part in real updates alone.
    """

    def _backend_apply_gradients(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        every = self.gradient_accumulation_steps
        if not every and not (self.ema_overwrite_frequency and _on_several_replicas()):
            original(self, grads, trainable_variables)
            return
        if _on_several_replicas() and not _are_reduced():
            grads = collectives.all_reduce_sum(grads)

        def update(*grads: Any) -> None:
            with reduced_gradients():
                grads = self._clip_gradients(list(grads))
                self._apply_weight_decay(trainable_variables)
                self._backend_update_step(grads, trainable_variables, self.learning_rate)
            if self.use_ema:
                self._update_model_variables_moving_average(self._trainable_variables)

        if every:
            sums = [self._accumulated_gradients[self._get_variable_index(v)] for v in trainable_variables]
            # The accumulators are dense.
            grads = [tf.convert_to_tensor(gradient) for gradient in grads]

            def update_with_sums(*grads: Any) -> None:
                update(*[(gradient + total) / every for gradient, total in zip(grads, sums)])
                self._backend_reset_gradient_accumulators()

            def collect(*grads: Any) -> None:
                self._backend_increment_gradient_accumulators(grads, sums)

            is_update = tf.equal((self._iterations + 1) % every, 0)
            _condition(is_update, update_with_sums, collect, grads)
        else:
            is_update = tf.constant(True)
            update(*grads)
        if self.use_ema and self.ema_overwrite_frequency:
            overwrites = tf.logical_and(is_update, tf.equal((self.iterations + 1) % self.ema_overwrite_frequency, 0))
            _condition(overwrites, lambda: _overwrite_with_average(self), lambda: None, [])

    return _backend_apply_gradients


def _overwrite_with_average(optimizer: Any) -> None:
    for variable, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average):
        if average is not None:
            # Without an aggregation, as Keras 3 makes variables, each replica assigns its own copy.
            variable.assign(average)


def _condition(predicate: tf.Tensor, yes: Callable[..., None], no: Callable[..., None], values: Sequence[Any]) -> None:
    """Runs one of two functions of `values` in each replica; `predicate` is equal on all of them."""

    def branches(run: Callable[..., None], values: Sequence[Any]) -> tuple[Callable[[], tf.Tensor], ...]:
        def branch(function: Callable[..., None]) -> Callable[[], tf.Tensor]:
            def taken() -> tf.Tensor:
                run(function, values)
                return tf.constant(0)

            return taken

        return branch(yes), branch(no)

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        tf.cond(predicate, *branches(lambda function, values: function(*values), values))
        return

    def across(strategy: tf.distribute.Strategy, predicate: Any, *values: Any) -> None:
        def on_each(function: Callable[..., None], values: Sequence[Any]) -> None:
            strategy.extended.call_for_each_replica(function, args=tuple(values))

        tf.cond(strategy.experimental_local_results(predicate)[0], *branches(on_each, values))

    # A condition in a replica must not hold what all replicas do together; around all of them it may.
    context.merge_call(across, args=(predicate, *values))


def rate_of_real_updates(original: Original) -> Original:
    """`_get_current_learning_rate`: with accumulation a schedule counts updates, not micro-steps."""

    def _get_current_learning_rate(self: Any) -> Any:
        schedule = self._learning_rate
        if self.gradient_accumulation_steps and isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            return schedule(self.iterations)
        return original(self)

    return _get_current_learning_rate


def paths_on_replicas(original: Original) -> Original:
    """`build`: `update_step` gets a replica's TF variable, whose path optimizers such as Muon ask for."""

    def build(self: Any, variables: Sequence[Any]) -> None:
        original(self, variables)
        for variable in variables:
            for copy in tf.distribute.get_strategy().experimental_local_results(variable.value):
                copy.path = variable.path

    return build


def reduce_before_finite_check(original: Original) -> Original:
    """`LossScaleOptimizer._tf_apply`: an inf on one replica makes the reduced gradient infinite for all.

    Keras looks at the first replica's gradient, before the all-reduce: an inf elsewhere reaches the weights, and
    workers that disagree wait for each other for ever.
    """

    def _tf_apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if _on_several_replicas() and not _are_reduced():
            pairs = self._all_reduce_sum_gradients(zip(grads, trainable_variables or self._trainable_variables))
            grads = [gradient for gradient, _ in pairs]
        original(self, grads, trainable_variables)

    return _tf_apply


def take_as_reduced(original: Original) -> Original:
    """`LossScaleOptimizer._stateful_handle_finite_grads`: hands reduced gradients to the optimizer within."""

    def _stateful_handle_finite_grads(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        with reduced_gradients() if _on_several_replicas() else contextlib.nullcontext():
            original(self, grads, trainable_variables)

    return _stateful_handle_finite_grads
