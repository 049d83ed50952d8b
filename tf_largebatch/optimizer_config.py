"""The optimizer of a recipe: one class for each kind, each with its own keys and no others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from tf_largebatch.validation import STRICT, Fraction, NonNegativeFloat, PositiveFloat

# None for the rule by rank and name, or for the preset's.
Patterns = tuple[str, ...] | None


@dataclass(frozen=True, config=STRICT)
class Lars:
    """Arguments of `tf_largebatch.LARS`; its docstring says what each does.

    With a `preset` the optimizer is `LARS.preset(preset, ...)`. A value of None is the preset's, or the
    class's own default; any other replaces it.
    """

    name: Literal["lars"]
    preset: (
        Literal["intel_caffe", "nvcaffe", "contrib", "tpu", "mlperf", "model_garden", "timm", "larc", "nus"] | None
    ) = None
    trust_coefficient: PositiveFloat | None = None
    momentum: Fraction = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0
    epsilon: NonNegativeFloat | None = None
    exclude_from_weight_decay: Patterns = None
    exclude_from_layer_adaptation: Patterns = None
    excluded_lr_multiplier: NonNegativeFloat = 1.0
    momentum_order: Literal["classic", "torch", "post_trust", "unscaled"] | None = None
    norm_rule: Literal["sum", "vector", "gradient"] | None = None
    zero_norm: Literal["coefficient", "one", "zero", "plain"] | None = None
    clip: Literal["larc"] | None = None
    trust_min: NonNegativeFloat | None = None
    trust_max: PositiveFloat | None = None
    adapt_without_decay: bool | None = None
    decay_in_update: bool | None = None
    gradient_clip: PositiveFloat | None = None
    momentum_correction: bool | None = None
    sparse: Literal["densify", "sgd", "error"] = "densify"


@dataclass(frozen=True, config=STRICT)
class Lamb:
    """Arguments of `tf_largebatch.LAMB`; its docstring says what each does."""

    name: Literal["lamb"]
    beta_1: Fraction = 0.9
    beta_2: Fraction = 0.999
    epsilon: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.0
    exclude_from_weight_decay: Patterns = None
    exclude_from_layer_adaptation: Patterns = None
    excluded_lr_multiplier: NonNegativeFloat = 1.0
    trust_min: NonNegativeFloat | None = None
    trust_max: PositiveFloat | None = None
    bias_correction: bool = True


@dataclass(frozen=True, config=STRICT)
class Sgd:
    """Momentum SGD as the papers' baseline has it: weight decay is part of the gradient."""

    name: Literal["sgd"]
    momentum: Fraction = 0.9
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0
    exclude_from_weight_decay: Patterns = None


@dataclass(frozen=True, config=STRICT)
class Addons:
    """An optimizer of tensorflow-addons, such as "addons.LAMB", with its own arguments as `options`.

    Its learning rate is the recipe's schedule.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


OPTIMIZERS = {"lars": Lars, "lamb": Lamb, "sgd": Sgd, "addons.CLASS": Addons}


def _kind(optimizer: Any) -> str | None:
    name = optimizer.get("name") if isinstance(optimizer, dict) else getattr(optimizer, "name", None)
    if name is None:
        return None
    return "addons.CLASS" if str(name).startswith("addons.") else str(name)


# What a recipe's `optimizer` may be.
AnyOptimizer = Annotated[
    Annotated[Lars, Tag("lars")]
    | Annotated[Lamb, Tag("lamb")]
    | Annotated[Sgd, Tag("sgd")]
    | Annotated[Addons, Tag("addons.CLASS")],
    Discriminator(_kind),
]


def given(optimizer: Any) -> dict[str, Any]:
    """The arguments that a recipe sets: all that are not None, the name left out."""
    values = {key: getattr(optimizer, key) for key in optimizer.__dataclass_fields__}
    return {key: value for key, value in values.items() if key != "name" and value is not None}
