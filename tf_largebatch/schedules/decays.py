"""How the rate falls: by a power of the steps left, by factors at given steps, by halvings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from tf_largebatch import scaling
from tf_largebatch._keras import keras, register, tf
from tf_largebatch.validation import (
    InputError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    checked,
)

LearningRateSchedule = keras.optimizers.schedules.LearningRateSchedule


@register
class PolynomialDecay(LearningRateSchedule):
    """From the initial to the end rate as a power of the fraction of steps left.

        rate(t) = end + (initial - end) (max(T - t, 0) / T)^power,   T = decay_steps [+ 1]

    rate(0) = initial; rate(t) = end from t = T on. A run of `decay_steps` updates makes its last one
    at t = decay_steps - 1, where 1 / T of the way is left. MLPerf's reference code and the TPU code
    before it decay over one step more than they train; with `plus_one` so does this: 2 / T is left
    at the last update, and rate(decay_steps) = end + (initial - end) / T^power. Papers use power 2.

    Args:
      initial_learning_rate: rate at step 0.
      decay_steps: updates that the decay is for, at least 1.
      end_learning_rate: rate from step T on.
      power: greater than 0.
      plus_one: whether T is decay_steps + 1, as MLPerf's.

    Raises:
      InputError: a value is out of its range.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        end_learning_rate: float = 0.0,
        power: float = 2.0,
        plus_one: bool = False,
    ):
        super().__init__()
        self.initial_learning_rate = checked(
            "PolynomialDecay: initial_learning_rate", initial_learning_rate, NonNegativeFloat
        )
        self.decay_steps = checked("PolynomialDecay: decay_steps", decay_steps, PositiveInt)
        self.end_learning_rate = checked("PolynomialDecay: end_learning_rate", end_learning_rate, NonNegativeFloat)
        self.power = checked("PolynomialDecay: power", power, PositiveFloat)
        self.plus_one = checked("PolynomialDecay: plus_one", plus_one, bool)

    def __call__(self, step: Any) -> tf.Tensor:
        t, total = tf.cast(step, tf.float32), float(self.decay_steps + self.plus_one)
        # Of whole numbers, because 1 - t / T would lose digits towards the end.
        left = tf.maximum(total - t, 0.0) / total
        return self.end_learning_rate + (self.initial_learning_rate - self.end_learning_rate) * left**self.power

    def get_config(self) -> dict[str, Any]:
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "decay_steps": self.decay_steps,
            "end_learning_rate": self.end_learning_rate,
            "power": self.power,
            "plus_one": self.plus_one,
        }


@register
class StepDecay(LearningRateSchedule):
    """One factor more at each boundary.

        rate(t) = initial factor^k,   k = the number of boundaries b <= t

    rate(0) = initial; the update at t = b is the first at the lower rate, so exactly b updates come
    before it; after the last boundary the rate stays. Goyal et al. (arXiv 1706.02677) take factor
    0.1 after 30, 60 and 80 of 90 epochs. Keras's `PiecewiseConstantDecay` changes one update later:
    its boundaries b - 1 are these.

    Args:
      initial_learning_rate: rate at step 0.
      boundaries: steps, increasing, at least 1.
      factor: greater than 0, less than 1.

    Raises:
      InputError: a value is out of its range, or the boundaries do not increase.
    """

    def __init__(self, initial_learning_rate: float, boundaries: Sequence[int], factor: float = 0.1):
        super().__init__()
        self.initial_learning_rate = checked(
            "StepDecay: initial_learning_rate", initial_learning_rate, NonNegativeFloat
        )
        self.boundaries = checked(
            "StepDecay: boundaries", boundaries, Annotated[list[PositiveInt], Field(min_length=1)]
        )
        self.factor = checked("StepDecay: factor", factor, Annotated[PositiveFloat, Field(lt=1)])
        if any(later <= earlier for earlier, later in zip(self.boundaries, self.boundaries[1:])):
            raise InputError(f"StepDecay: boundaries is {self.boundaries}, but must increase.")

    @classmethod
    def from_epochs(
        cls, initial_learning_rate: float, epochs: Sequence[float], steps_per_epoch: int, factor: float = 0.1
    ) -> StepDecay:
        """The same with boundaries after so many epochs, such as Goyal's `(30, 60, 80)`."""
        return cls(initial_learning_rate, [scaling.epochs_to_steps(e, steps_per_epoch) for e in epochs], factor)

    def __call__(self, step: Any) -> tf.Tensor:
        passed = tf.cast(step, tf.float32)[..., tf.newaxis] >= tf.constant(self.boundaries, tf.float32)
        return _kth_rate(self.initial_learning_rate, self.factor, len(self.boundaries), passed)

    def get_config(self) -> dict[str, Any]:
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "boundaries": self.boundaries,
            "factor": self.factor,
        }


@register
class Halvings(LearningRateSchedule):
    """`count` halvings at equal distances, as GNMT's: constant, then a staircase.

        rate(t) = initial 2^-k,   k = the number of i < count with first_step + i interval_steps <= t

    rate(0) = initial (where first_step > 0); the update at t = first_step is the first at half the
    rate; from first_step + (count - 1) interval_steps on the rate stays at initial 2^-count. So count
    MLPerf's logs, "4 halvings from 6453, every 809". `luong234` gives the schedule of that name.

    Args:
      initial_learning_rate: rate before the first halving.
      first_step: step of the first halving, at least 0.
      interval_steps: steps from one halving to the next, at least 1.
      count: number of halvings, at least 1.

    Raises:
      InputError: a value is out of its range.
    """

    def __init__(self, initial_learning_rate: float, first_step: int, interval_steps: int, count: int = 4):
        super().__init__()
        self.initial_learning_rate = checked("Halvings: initial_learning_rate", initial_learning_rate, NonNegativeFloat)
        self.first_step = checked("Halvings: first_step", first_step, NonNegativeInt)
        self.interval_steps = checked("Halvings: interval_steps", interval_steps, PositiveInt)
        self.count = checked("Halvings: count", count, PositiveInt)

    @classmethod
    def luong234(cls, initial_learning_rate: float, total_steps: int, count: int = 4) -> Halvings:
        """GNMT's: the rate is kept for two thirds of the run, and the last third cut into `count` parts.

        As in Google's NMT code, whole steps are cut off, the first halving comes at the end of the
        first part, and the last with the end of the run: with T = total_steps, S = floor(2 T / 3) and
        D = floor((T - S) / count), the halvings are at S + D, S + 2 D ... S + count D <= T.
        """
        total_steps = checked("Halvings: total_steps", total_steps, PositiveInt)
        count = checked("Halvings: count", count, PositiveInt)
        kept = 2 * total_steps // 3
        interval = max((total_steps - kept) // count, 1)
        return cls(initial_learning_rate, kept + interval, interval, count)

    def __call__(self, step: Any) -> tf.Tensor:
        steps = [self.first_step + i * self.interval_steps for i in range(self.count)]
        passed = tf.cast(step, tf.float32)[..., tf.newaxis] >= tf.constant(steps, tf.float32)
        return _kth_rate(self.initial_learning_rate, 0.5, self.count, passed)

    def get_config(self) -> dict[str, Any]:
        return {
            "initial_learning_rate": self.initial_learning_rate,
            "first_step": self.first_step,
            "interval_steps": self.interval_steps,
            "count": self.count,
        }


def _kth_rate(initial: float, factor: float, count: int, passed: tf.Tensor) -> tf.Tensor:
    # From a list, because a power taken in float32 would differ from the rates that are written down.
    rates = tf.constant([initial * factor**k for k in range(count + 1)], tf.float32)
    return tf.gather(rates, tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1))
