"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_largebatch._keras import register, tf
from tf_largebatch.optimizers.lars_equation import lars_equation
from tf_largebatch.optimizers.lars_presets import PRESETS
from tf_largebatch.optimizers.layer_adaptation import LayerAdaptedOptimizer, Rule
from tf_largebatch.optimizers.momentum import decayed, fused_step, momentum_step, rescale, rows_sgd, scaled
from tf_largebatch.optimizers.trust_ratio import TrustRule
from tf_largebatch.validation import (
    Fraction,
    InputError,
    NonNegativeFloat,
    PositiveFloat,
    checked,
    nearest,
    unknown,
)

MOMENTUM_ORDERS = ("classic", "torch", "post_trust", "unscaled")
SPARSE_RULES = ("densify", "sgd", "error")


@register
class LARS(LayerAdaptedOptimizer):
    """Momentum SGD whose rate is scaled for each variable by the ratio of its norms.

    With weights w, gradient g (the mean over the global batch, after the all-reduce and clipping),
    velocity v, learning rate gamma, trust coefficient eta, momentum mu and weight decay beta, a step
    with the default options is

        d      = g + beta w
        lambda = eta |w| / (|g| + beta |w| + epsilon)
        v      = mu v + gamma lambda d
        w      = w - v                    (Nesterov: w - (mu v + gamma lambda d), with the new v)

    That is algorithm 1 of You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks"
    (arXiv 1708.03888). Norms are over a whole variable, in float32 (float64 for float64 variables).
    A variable excluded from adaptation takes lambda = `excluded_lr_multiplier`; one excluded from
    decay takes beta = 0. The paper is silent about exclusions and zero norms. Other options give what
    others have published: `LARS.preset` sets them, `explain` prints the equation in force.

    Args:
      learning_rate: gamma; a number or a `LearningRateSchedule`. With eta = 0.001 published values
        are 1 to 35, growing with the batch.
      trust_coefficient: eta.
      momentum: mu, in [0, 1).
      nesterov: whether to look ahead as in the equation.
      weight_decay: beta. It is part of the gradient, so do not add an L2 regulariser as well.
      epsilon: added to the denominator as it stands; 0.0 means 0.
      exclude_from_weight_decay: variables that are not decayed: a list of regular expressions
        searched for in variable paths, or of variables, or a function of a variable. None excludes
        those of rank 1 or less, biases and normalisation layers; `[]` excludes nothing.
      exclude_from_layer_adaptation: the same for adaptation. The two rules are independent.
      excluded_lr_multiplier: what gamma is multiplied by for variables excluded from adaptation. At
        1.0, as published, they take gamma as it is: 30 is much for a bias without batch norm behind it.
      momentum_order: "classic", as above; "torch", v = mu v + lambda d and w = w - gamma v;
        "post_trust", v = mu v + d and w = w - gamma lambda v with lambda = eta |w| / |v|; "unscaled",
        the same with lambda from g and w. Rates are not portable between them.
      norm_rule, zero_norm, clip, trust_min, trust_max: see `trust_ratio.TrustRule`.
      adapt_without_decay: False leaves variables without decay unadapted, all of them if beta is 0.
      decay_in_update: False keeps beta in lambda but out of d, for a loss with an L2 term of its own.
      gradient_clip: elements of d are cut to this absolute value; None for no cut.
      momentum_correction: whether v is rescaled by gamma_t / gamma_(t-1) while gamma grows.
      sparse: a gradient of `tf.IndexedSlices` is made dense ("densify"), applied to its rows as
        momentum SGD without lambda and beta ("sgd", not under XLA), or refused ("error"). Repeated rows
        are summed.
      jit_compile: say True where XLA compiles the training step, as Keras 3 does by default without a
        strategy: norms are then summed in an order that it makes fast code of. On Keras 2, and on a
        GPU, the update itself is compiled as well.
      **kwargs: `clipnorm`, `clipvalue`, `global_clipnorm` (all three on the reduced gradient),
        `use_ema`, `ema_momentum`, `ema_overwrite_frequency` and the like, as in Keras's optimizers.

    Raises:
      InputError: a value is out of its range; at the first update, where the variables are known,
        a pattern that matches none of them.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        trust_coefficient: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
        exclude_from_weight_decay: Rule = None,
        exclude_from_layer_adaptation: Rule = None,
        excluded_lr_multiplier: float = 1.0,
        momentum_order: str = "classic",
        norm_rule: str = "sum",
        zero_norm: str = "coefficient",
        clip: str | None = None,
        trust_min: float | None = None,
        trust_max: float | None = None,
        adapt_without_decay: bool = True,
        decay_in_update: bool = True,
        gradient_clip: float | None = None,
        momentum_correction: bool = False,
        sparse: str = "densify",
        jit_compile: bool = False,
        name: str = "LARS",
        **kwargs: Any,
    ):
        super().__init__(
            learning_rate,
            name,
            jit_compile,
            weight_decay,
            exclude_from_weight_decay,
            exclude_from_layer_adaptation,
            excluded_lr_multiplier,
            **kwargs,
        )
        for argument, value, allowed in (
            ("momentum_order", momentum_order, MOMENTUM_ORDERS),
            ("sparse", sparse, SPARSE_RULES),
        ):
            if value not in allowed:
                raise InputError(
                    f"LARS: {argument} is {value!r}{nearest(value, allowed)}, but must be one of {allowed}."
                )
        if momentum_order == "post_trust" and norm_rule != "vector":
            raise InputError("LARS: momentum_order 'post_trust' takes the norm of the velocity: norm_rule='vector'.")
        if momentum_correction and momentum_order != "classic":
            raise InputError("LARS: momentum_correction is for momentum_order 'classic', where v holds the rate.")
        self.trust_rule = TrustRule(
            checked("LARS: trust_coefficient", trust_coefficient, PositiveFloat),
            norm_rule,
            checked("LARS: epsilon", epsilon, NonNegativeFloat),
            zero_norm,
            clip,
            trust_min,
            trust_max,
        )
        self.momentum = checked("LARS: momentum", momentum, Fraction)
        self.nesterov = nesterov
        self.momentum_order = momentum_order
        self.adapt_without_decay = adapt_without_decay
        self.decay_in_update = decay_in_update
        self.gradient_clip = checked("LARS: gradient_clip", gradient_clip, PositiveFloat | None)
        self.momentum_correction = momentum_correction
        self.sparse = sparse

    @classmethod
    def preset(cls, name: str, learning_rate: Any, **overrides: Any) -> LARS:
        """LARS as a publication computes it: "intel_caffe", "mlperf" and others.

        Args:
          name: a key of `lars_presets.PRESETS`, which says what each is.
          learning_rate: as in the constructor.
          **overrides: any other argument; rates, momentum and decay are the recipe's to choose.

        Raises:
          InputError: there is no such preset.
        """
        if name not in PRESETS:
            raise InputError(f"LARS: {unknown('preset', name, PRESETS)}.")
        return cls(learning_rate, **{**PRESETS[name], **overrides})

    def create_state(self, variables: Sequence[Any]) -> None:
        super().create_state(variables)
        # Each slot holds -v, as in Keras's own SGD: TensorFlow's fused update needs that sign.
        self._velocities = self.slots(variables, "velocity")
        if not self.adapt_without_decay:
            self._adapted = tuple(adapted and decay > 0 for adapted, decay in zip(self._adapted, self._decays))
        if self.momentum_correction:
            self._last_rates = self.vector(len(variables), "last_rates")

    def update(self, index: int, gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        w, s, gamma = variable, self._velocities[index], learning_rate
        if isinstance(gradient, tf.IndexedSlices):
            if self.sparse == "error":
                raise InputError(f"LARS: {variable.name} has a sparse gradient, and sparse is 'error'.")
            if self.sparse == "sgd":
                rows_sgd(w, s, gradient, gamma, self.momentum, self.nesterov)
                return
        g, beta = tf.convert_to_tensor(gradient), self._decays[index]
        if self.momentum_correction:
            rescale(s, self._last_rates, index, gamma)
        if self.momentum_order == "post_trust":
            d = decayed(g, w, beta if self.decay_in_update else 0.0, self.gradient_clip)
            u = momentum_step(s, d, 1.0, self.momentum, self.nesterov)
            ratio, _ = self.ratio(index, w, u, u, beta, gamma)
            w.assign_add(scaled(gamma, ratio, w.dtype) * u)
            return
        d = g
        if self.trust_rule.norm_rule == "vector":
            d = decayed(g, w, beta, None)
        ratio, beta = self.ratio(index, w, g, d, beta, gamma)
        beta = beta if self.decay_in_update else 0.0
        rate = scaled(gamma, ratio, w.dtype)
        if self.momentum_order == "classic" and self.momentum and self.gradient_clip is None:
            fused_step(w, s, g, rate, beta, self.momentum, self.nesterov)
            return
        inside, outside = {
            "classic": (rate, tf.ones((), w.dtype)),
            "torch": (tf.cast(ratio, w.dtype), tf.cast(gamma, w.dtype)),
            "unscaled": (tf.ones((), w.dtype), rate),
        }[self.momentum_order]
        d = decayed(g, w, beta, self.gradient_clip)
        w.assign_add(outside * momentum_step(s, d, inside, self.momentum, self.nesterov))

    def equation(self) -> list[str]:
        return lars_equation(self)

    def get_config(self) -> dict[str, Any]:
        """Every argument, so that a saved model trains on as it did."""
        config = super().get_config()
        rule = self.trust_rule
        config.update(
            trust_coefficient=rule.coefficient,
            momentum=self.momentum,
            nesterov=self.nesterov,
            epsilon=rule.epsilon,
            momentum_order=self.momentum_order,
            norm_rule=rule.norm_rule,
            zero_norm=rule.zero_norm,
            clip=rule.clip,
            trust_min=rule.trust_min,
            trust_max=rule.trust_max,
            adapt_without_decay=self.adapt_without_decay,
            decay_in_update=self.decay_in_update,
            gradient_clip=self.gradient_clip,
            momentum_correction=self.momentum_correction,
            sparse=self.sparse,
        )
        return config
