"""Learning-rate schedules of large-batch training: global step in, rate out.

Steps count optimizer updates from 0. All are `keras.optimizers.schedules.LearningRateSchedule`s, so
they go wherever Keras takes one and are saved with a model.
"""

from __future__ import annotations

from typing import Any

from tf_largebatch._keras import keras, register, tf
from tf_largebatch.validation import InputError

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule


@register
class PolynomialDecay(LearningRateSchedule):
    """From the initial to the end rate as a power of the fraction of steps left.

        rate(t) = end + (initial - end) (1 - min(t, T) / T)^power,   T = decay_steps

    rate(0) = initial; rate(t) = end from t = T on. The papers use power 2.

    Args:
      initial_learning_rate: rate at step 0.
      decay_steps: T, at least 1.
      end_learning_rate: rate from step T on.
      power: greater than 0.
    """

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0, power: float = 2.0
    ):
        super().__init__()
        if not decay_steps >= 1 or not power > 0:
            raise InputError(
                f"PolynomialDecay: decay_steps is {decay_steps} and power {power}, "
                "but must be at least 1 and greater than 0."
            )
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = decay_steps
        self.end_learning_rate = end_learning_rate
        self.power = power

    def __call__(self, step: Any) -> tf.Tensor:
        t, total = tf.cast(step, tf.float32), float(self.decay_steps)
        left = 1.0 - tf.minimum(t, total) / total
        return self.end_learning_rate + (self.initial_learning_rate - self.end_learning_rate) * left**self.power

    def get_config(self) -> dict[str, Any]:
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
        }


@register
class Warmup(LearningRateSchedule):
    """A linear ramp up to the first rate of another schedule, which then takes over.

        rate(t) = start + (after(0) - start) t / W     for t < W,   W = warmup_steps
        rate(t) = after(t - W)                         for t >= W, if after_from == "warmup_end"
        rate(t) = after(t)                             for t >= W, if after_from == "start"

    rate(0) = start: with the default 0.0 the first update changes nothing. "warmup_end" is how the
    papers' TPU code counts; "start" is how both Caffe releases count: there the rate drops at W
    from the peak to what the decay has reached by then.

    Args:
      after: the schedule, or a constant rate.
      warmup_steps: W, at least 0; 0 gives `after` alone.
      start: rate at step 0.
      after_from: the step that `after` counts from.
    """

    def __init__(self, after: Any, warmup_steps: int, start: float = 0.0, after_from: str = "warmup_end"):
        super().__init__()
        if not warmup_steps >= 0:
            raise InputError(f"Warmup: warmup_steps is {warmup_steps}, but must be at least 0.")
        if after_from not in ("warmup_end", "start"):
            raise InputError(f"Warmup: after_from is {after_from!r}, but must be 'warmup_end' or 'start'.")
        if isinstance(after, dict):
            after = keras.optimizers.schedules.deserialize(after)
        self.after = after
        self.warmup_steps = warmup_steps
        self.start = start
        self.after_from = after_from

    def __call__(self, step: Any) -> tf.Tensor:
        t, warmup_steps = tf.cast(step, tf.float32), float(self.warmup_steps)
        # max(): a schedule need not be defined before its own step 0.
        since = tf.maximum(t - warmup_steps, 0.0) if self.after_from == "warmup_end" else t
        peak = self._after(tf.zeros_like(t))
        ramp = self.start + (peak - self.start) * t / max(warmup_steps, 1.0)
        return tf.where(t < warmup_steps, ramp, self._after(since))

    def _after(self, step: tf.Tensor) -> tf.Tensor:
        rate = self.after(step) if callable(self.after) else self.after
        return tf.cast(rate, tf.float32)

    def get_config(self) -> dict[str, Any]:
        after = keras.optimizers.schedules.serialize(self.after) if callable(self.after) else self.after
        return {
            "after": after,
            "warmup_steps": self.warmup_steps,
            "start": self.start,
            "after_from": self.after_from,
        }
