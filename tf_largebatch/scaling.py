"""From one batch to another: rates, warm-up, and epochs and examples to steps. Plain arithmetic, no TensorFlow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tf_largebatch.validation import InputError, NonNegativeFloat, PositiveFloat, PositiveInt, checked


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Whole global batches in an epoch; examples left over are skipped until the next shuffle.

    Raises:
      InputError: the batch is larger than the data set.
    """
    steps = num_examples // global_batch_size
    if not steps:
        raise InputError(
            f"global_batch_size is {global_batch_size}, but the data set has {num_examples} training examples; "
            "an epoch needs at least one full batch."
        )
    return steps


def epochs_to_steps(epochs: float, steps_per_epoch: int) -> int:
    """The nearest whole number of steps: 5 epochs of 39 steps are 195, 0.3125 epochs are 12."""
    return round(epochs * steps_per_epoch)


def examples_to_steps(examples: float, global_batch_size: int) -> int:
    """The nearest whole number of steps: 102,400 examples are 100 steps of 1,024."""
    return round(examples / global_batch_size)


def linear(base_learning_rate: float, base_global_batch_size: int, global_batch_size: int) -> float:
    """rate = base rate x B / B0: Goyal et al. (arXiv 1706.02677), for SGD."""
    _check(base_learning_rate, base_global_batch_size, global_batch_size)
    return base_learning_rate * (global_batch_size / base_global_batch_size)


def square_root(base_learning_rate: float, base_global_batch_size: int, global_batch_size: int) -> float:
    """rate = base rate x sqrt(B / B0): keeps the variance of SGD's steps; for Adam, LAMB and LARS."""
    _check(base_learning_rate, base_global_batch_size, global_batch_size)
    return base_learning_rate * math.sqrt(global_batch_size / base_global_batch_size)


class RateAndWarmup(NamedTuple):
    learning_rate: float
    warmup_epochs: float


def legw(
    base_learning_rate: float, base_warmup_epochs: float, base_global_batch_size: int, global_batch_size: int
) -> RateAndWarmup:
    """Linear-epoch gradual warm-up: rate x sqrt(B / B0), warm-up epochs x B / B0.

    The warm-up is then the same number of steps at any batch. You et al., arXiv 1901.08256.
    """
    checked("base_warmup_epochs", base_warmup_epochs, NonNegativeFloat)
    rate = square_root(base_learning_rate, base_global_batch_size, global_batch_size)
    return RateAndWarmup(rate, base_warmup_epochs * (global_batch_size / base_global_batch_size))


@dataclass(frozen=True)
class StartingPoint:
    """What to try first with one optimizer.

    Attributes:
      learning_rate: the peak, after the warm-up.
      warmup_epochs: length of the linear warm-up, in epochs of your data.
      warmup_start_rate: rate of the first step.
      trust_coefficient: LARS's eta, which the rate goes with; None for SGD.
      basis: what of this is a published rule, where it was shown to work, and where it was not.
    """

    learning_rate: float
    warmup_epochs: float
    warmup_start_rate: float
    trust_coefficient: float | None
    basis: str


@dataclass(frozen=True)
class ScaledUp:
    """Answer of `scale_up`: a starting point for SGD, one for LARS, and what to tune, in that order."""

    global_batch_size: int
    sgd: StartingPoint
    lars: StartingPoint
    tune: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"global batch {self.global_batch_size:,}"]
        for name, start in (("SGD", self.sgd), ("LARS", self.lars)):
            coefficient = f", trust coefficient {start.trust_coefficient}" if start.trust_coefficient else ""
            lines.append(
                f"{name}: rate {start.learning_rate:.4g} after {start.warmup_epochs:.4g} epochs of linear warm-up "
                f"from {start.warmup_start_rate:.4g}{coefficient}"
            )
            lines.append(f"  {start.basis}")
        return "\n".join([*lines, "tune:", *(f"  {number}. {what}" for number, what in enumerate(self.tune, start=1))])


# Table 3 of arXiv 1901.08256, ResNet-50 on ImageNet with LARS: rate 2^5 and 10 epochs at 32,768; every
# other row follows by LEGW.
LARS_RATE, LARS_WARMUP_EPOCHS, LARS_GLOBAL_BATCH_SIZE = 32.0, 10.0, 32_768
LARS_TRUST_COEFFICIENT = 0.001
GOYAL_WARMUP_EPOCHS = 5.0


def scale_up(base_learning_rate: float, base_global_batch_size: int, global_batch_size: int) -> ScaledUp:
    """Where to start with a large batch, from a rate of plain SGD that works at a small one.

    SGD's numbers follow from yours by Goyal's rule: the rate linear in the batch, reached over 5
    epochs from your rate. LARS's do not, because its trust ratio takes the scale of the gradient out:
    they are the published ones of ResNet-50 on ImageNet, 32 sqrt(B / 32,768) after 10 B / 32,768
    epochs from 0, for a trust coefficient of 0.001. For another network or data set neither is more
    than a starting point; `basis` and `tune` of the answer say so, with the limits.

    Args:
      base_learning_rate: SGD's rate at the small batch, such as 0.1.
      base_global_batch_size: the small batch, such as 256.
      global_batch_size: the large one.

    Raises:
      InputError: a number is out of its range, or the large batch is smaller than the small one.
    """
    rate = linear(base_learning_rate, base_global_batch_size, global_batch_size)
    if global_batch_size < base_global_batch_size:
        raise InputError(
            f"global_batch_size is {global_batch_size}, but must be at least base_global_batch_size "
            f"({base_global_batch_size})."
        )
    sgd = StartingPoint(rate, GOYAL_WARMUP_EPOCHS, base_learning_rate, None, _sgd_basis(global_batch_size))
    lars_rate, epochs = legw(LARS_RATE, LARS_WARMUP_EPOCHS, LARS_GLOBAL_BATCH_SIZE, global_batch_size)
    lars = StartingPoint(lars_rate, epochs, 0.0, LARS_TRUST_COEFFICIENT, _lars_basis(global_batch_size))
    return ScaledUp(global_batch_size, sgd, lars, _TUNE)


def _sgd_basis(global_batch_size: int) -> str:
    rule = "Published rule (Goyal et al. 2017: linear scaling, 5 epochs of warm-up from the small batch's rate)"
    if global_batch_size <= 8192:
        return f"{rule}; with ResNet-50 on ImageNet, 0.1 at 256, it kept the accuracy up to 8,192."
    return (
        f"{rule}, beyond its range: with ResNet-50 on ImageNet the top-1 error was 23.7 % at 8,192, 24.8 % at "
        "16,384, 27.6 % at 32,768 and 34.0 % at 65,536. Prefer LARS."
    )


def _lars_basis(global_batch_size: int) -> str:
    table = "LEGW's table for ResNet-50 on ImageNet (You et al. 2019), which does not depend on your rate"
    if global_batch_size < 1024:
        return f"A starting point: {table}, continued below its first row, 1,024; SGD is as good here."
    if global_batch_size <= LARS_GLOBAL_BATCH_SIZE:
        return f"Published for that task, a starting point for any other: {table}."
    return (
        f"A starting point: {table}, continued past its last row, 32,768, where nothing confirms it. MLPerf's "
        "runs at 65,536 took 24.7 after 31 epochs, with momentum 0.952."
    )


_TUNE = (
    "The peak rate, by factors of about 1.5 both ways; published LARS rates for ResNet-50 at 8,192 are 12.8, 16 "
    "and 17.",
    "The warm-up: longer where the loss jumps while the rate rises. On a small data set count steps, not epochs: "
    "LEGW's epochs are 391 steps of ImageNet at any batch.",
    "The weight decay, by factors of 2; published LARS recipes of ResNet-50 have 2.5e-5 to 2e-4.",
    "Not LARS's trust coefficient: layers that are adapted see only its product with the rate. Biases and "
    "normalisation see the rate alone; if they diverge, lower excluded_lr_multiplier.",
)


def _check(base_learning_rate: float, base_global_batch_size: int, global_batch_size: int) -> None:
    checked("base_learning_rate", base_learning_rate, PositiveFloat)
    checked("base_global_batch_size", base_global_batch_size, PositiveInt)
    checked("global_batch_size", global_batch_size, PositiveInt)
