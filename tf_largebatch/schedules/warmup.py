"""How the rate rises at the start, before any schedule of Keras's or ours."""

from __future__ import annotations

from typing import Any

from tf_largebatch import scaling
from tf_largebatch._keras import keras, register, tf
from tf_largebatch.validation import InputError, NonNegativeFloat, NonNegativeInt, checked, nearest

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule

SHAPES = ("linear", "quadratic", "exponential", "constant")
ORIGINS = ("warmup_end", "start")


@register
class Warmup(LearningRateSchedule):
    """A ramp up to the first rate of another schedule, which then takes over.

    With W = warmup_steps and peak = after(0), for t < W

        rate(t) = start + (peak - start) t / W        "linear":      Goyal, Intel Caffe, TPU code
        rate(t) = start + (peak - start) (t / W)^2    "quadratic":   NVCaffe
        rate(t) = start (peak / start)^(t / W)        "exponential": GNMT, start = peak / 100
        rate(t) = start                               "constant":    He et al., tried by Goyal

    and from t = W on

        rate(t) = after(t - W)                        after_from = "warmup_end": TPU code, MLPerf
        rate(t) = after(t)                            after_from = "start":      both Caffes, Goyal, GNMT

    rate(0) = start, unless W = 0: with the default 0.0 the first update changes nothing. rate(W) is the
    peak with "warmup_end"; with "start" it is what the decay has reached by then, so a polynomial
    decay drops at W. Past that all is as `after` has it.

    Args:
      after: a `LearningRateSchedule`, or a constant rate.
      warmup_steps: W, at least 0; 0 gives `after` alone. `from_epochs` and `from_examples` take other units.
      start: rate at step 0, at least 0; greater than 0 for "exponential" and "constant".
      after_from: the step that `after` counts from.
      shape: of the ramp.

    Raises:
      InputError: a value is out of its range.
    """

    def __init__(
        self,
        after: Any,
        warmup_steps: int,
        start: float = 0.0,
        after_from: str = "warmup_end",
        shape: str = "linear",
    ):
        super().__init__()
        for argument, value, allowed in (("shape", shape, SHAPES), ("after_from", after_from, ORIGINS)):
            if value not in allowed:
                raise InputError(
                    f"Warmup: {argument} is {value!r}{nearest(value, allowed)}, but must be one of {allowed}."
                )
        if isinstance(after, dict):
            after = keras.optimizers.schedules.deserialize(after)
        if not isinstance(after, LearningRateSchedule):
            after = checked("Warmup: after", after, NonNegativeFloat)
        self.after = after
        self.warmup_steps = checked("Warmup: warmup_steps", warmup_steps, NonNegativeInt)
        self.start = checked("Warmup: start", start, NonNegativeFloat)
        self.shape = shape
        self.after_from = after_from
        if shape in ("exponential", "constant") and not self.start > 0:
            raise InputError(f"Warmup: start is {start}, but must be greater than 0 with shape {shape!r}.")

    @classmethod
    def from_epochs(cls, after: Any, warmup_epochs: float, steps_per_epoch: int, **options: Any) -> Warmup:
        """W is the whole number of steps nearest to so many epochs; `options` as in the constructor."""
        return cls(after, scaling.epochs_to_steps(warmup_epochs, steps_per_epoch), **options)

    @classmethod
    def from_examples(cls, after: Any, warmup_examples: int, global_batch_size: int, **options: Any) -> Warmup:
        """W is the whole number of steps nearest to so many examples; `options` as in the constructor."""
        return cls(after, scaling.examples_to_steps(warmup_examples, global_batch_size), **options)

    def __call__(self, step: Any) -> tf.Tensor:
        t, warmup_steps = tf.cast(step, tf.float32), float(self.warmup_steps)
        # max(): a schedule need not be defined before its own step 0.
        since = tf.maximum(t - warmup_steps, 0.0) if self.after_from == "warmup_end" else t
        # min(): where() computes the ramp past its end too, where an exponential overflows.
        fraction = tf.minimum(t / max(warmup_steps, 1.0), 1.0)
        ramp = self._ramp(fraction, self._after(tf.zeros_like(t)))
        return tf.where(t < warmup_steps, ramp, self._after(since))

    def _ramp(self, fraction: tf.Tensor, peak: tf.Tensor) -> tf.Tensor:
        if self.shape == "constant":
            return self.start * tf.ones_like(fraction)
        if self.shape == "exponential":
            return self.start * (peak / self.start) ** fraction
        if self.shape == "quadratic":
            fraction = fraction**2
        return self.start + (peak - self.start) * fraction

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
            "shape": self.shape,
        }
