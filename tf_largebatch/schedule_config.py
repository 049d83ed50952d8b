"""The schedule of a recipe: one class for each decay, each with its own keys and no others."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tf_largebatch.validation import (
    STRICT,
    Float,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Schedule:
    """The warm-up, the same for all. At most one of its three lengths may be above 0.

    `tf_largebatch.Warmup` has the equations of the shapes. Lengths in epochs and examples become the
    nearest whole number of steps.
    """

    peak_learning_rate: PositiveFloat
    warmup_epochs: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    warmup_examples: NonNegativeInt = 0
    warmup_start_rate: NonNegativeFloat = 0.0
    warmup_shape: Literal["linear", "quadratic", "exponential", "constant"] = "linear"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Polynomial(Schedule):
    """`tf_largebatch.PolynomialDecay` to the last step; the decay where none is named.

    `decay_from` is where the decay begins to count: "warmup_end" as the papers' TPU code has it,
    or "start" as both Caffe releases have it (the rate is then below the peak after the warm-up).
    `decay_plus_one` decays over one step more than the run has, as MLPerf does.
    """

    decay: Literal["polynomial"] = "polynomial"
    decay_power: PositiveFloat = 2.0
    decay_plus_one: bool = False
    decay_from: Literal["start", "warmup_end"] = "warmup_end"
    end_learning_rate: NonNegativeFloat = 0.0


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Step(Schedule):
    """`tf_largebatch.StepDecay`: times `decay_factor` after each of `decay_epochs`, warm-up included.

    Epochs beyond the end of the run are allowed, so that a run may be cut short.
    """

    decay: Literal["step"] = "step"
    decay_epochs: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    decay_factor: Annotated[Float, Field(gt=0, lt=1)] = 0.1


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Halvings(Schedule):
    """`tf_largebatch.Halvings`, in steps counted from the start of the run.

    With both steps null the run's last third is cut into `halvings` parts, as GNMT's luong234.
    """

    decay: Literal["halvings"] = "halvings"
    halvings: PositiveInt = 4
    first_halving_step: NonNegativeInt | None = None
    halving_interval_steps: PositiveInt | None = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Cosine(Schedule):
    """Keras's `CosineDecay` to the last step; `decay_from` as in `Polynomial`."""

    decay: Literal["cosine"] = "cosine"
    decay_from: Literal["start", "warmup_end"] = "warmup_end"
    end_learning_rate: NonNegativeFloat = 0.0


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Constant(Schedule):
    """The peak rate to the end."""

    decay: Literal["constant"] = "constant"


DECAYS = {"polynomial": Polynomial, "step": Step, "halvings": Halvings, "cosine": Cosine, "constant": Constant}


def _with_decay(tree: Any) -> Any:
    return {"decay": "polynomial", **tree} if isinstance(tree, dict) else tree


# What a recipe's `schedule` may be. A recipe that names no decay has the polynomial one.
AnySchedule = Annotated[
    Polynomial | Step | Halvings | Cosine | Constant, Field(discriminator="decay"), BeforeValidator(_with_decay)
]


def owners(key: Any) -> list[str]:
    """The decays that know a key."""
    return [decay for decay, kind in DECAYS.items() if key in {field.name for field in fields(kind)}]


def drop_keys_of_others(tree: dict[str, Any], decay: Any) -> None:
    """Takes out of a schedule the keys that some other decay has, but not this one."""
    if decay in list(DECAYS):
        for key in [key for key in tree if owners(key) and decay not in owners(key)]:
            del tree[key]


def fault(schedule: Schedule, epochs: int) -> str | None:
    """What is wrong between the keys of a schedule, as `schedule.KEY is VALUE, but ...`, or None."""

    def says(key: str, allowed: str) -> str:
        return f"schedule.{key} is {getattr(schedule, key)}, but {allowed}"

    lengths = [key for key in ("warmup_epochs", "warmup_steps", "warmup_examples") if getattr(schedule, key)]
    if len(lengths) > 1:
        return says(lengths[0], f"schedule.{lengths[1]} is {getattr(schedule, lengths[1])}; one of them must be 0")
    if schedule.warmup_epochs >= epochs:
        return says("warmup_epochs", f"must be less than epochs ({epochs})")
    if schedule.warmup_shape in ("exponential", "constant") and not schedule.warmup_start_rate:
        return says("warmup_start_rate", f"must be greater than 0 with warmup_shape {schedule.warmup_shape!r}")
    for key in ("warmup_start_rate", "end_learning_rate"):
        if getattr(schedule, key, 0.0) > schedule.peak_learning_rate:
            return says(key, f"must be at most schedule.peak_learning_rate ({schedule.peak_learning_rate})")
    if isinstance(schedule, Step):
        boundaries = schedule.decay_epochs
        if any(later <= earlier for earlier, later in zip(boundaries, boundaries[1:])):
            return f"schedule.decay_epochs is {list(boundaries)}, but must increase"
    if isinstance(schedule, Halvings):
        first, interval = schedule.first_halving_step, schedule.halving_interval_steps
        if (first is None) != (interval is None):
            return says("first_halving_step", f"halving_interval_steps is {interval}; give both, or neither")
    return None
