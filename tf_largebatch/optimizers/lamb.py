"""LAMB: layer-wise adaptive moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_largebatch._keras import register, tf
from tf_largebatch.optimizers.layer_adaptation import LayerAdaptedOptimizer, Rule
from tf_largebatch.optimizers.momentum import scaled
from tf_largebatch.optimizers.trust_ratio import TrustRule
from tf_largebatch.validation import Fraction, PositiveFloat, checked


@register
class LAMB(LayerAdaptedOptimizer):
    """Adam whose step is scaled for each variable to the norm of its weights.

    With weights w, gradient g (the mean over the global batch, after the all-reduce and clipping),
    learning rate gamma and weight decay beta, step t = 1, 2, ... is, element by element,

        m      = beta_1 m + (1 - beta_1) g
        v      = beta_2 v + (1 - beta_2) g^2
        m^     = m / (1 - beta_1^t),  v^ = v / (1 - beta_2^t)
        r      = m^ / (sqrt(v^) + epsilon)
        u      = r + beta w
        lambda = |w| / |u|               (1 where a norm is zero)
        w      = w - gamma lambda u

    That is algorithm 2 of You et al., "Large Batch Optimization for Deep Learning: Training BERT in
    76 minutes" (arXiv 1904.00962), with the identity for phi, as in its experiments. Norms are over a
    whole variable. A variable excluded from adaptation takes lambda = `excluded_lr_multiplier`; one
    excluded from decay takes beta = 0. The paper is silent about exclusions and zero norms. Moments
    and norms are in float32, for 16-bit variables too (float64 for float64 variables).

    Args:
      learning_rate: gamma; a number or a `LearningRateSchedule`. A step changes each adapted variable
        by gamma of its norm.
      beta_1, beta_2: how much of the moments is kept at a step, in [0, 1).
      epsilon: greater than 0.
      weight_decay: beta. It is part of the step and of its norm, as in the paper.
      exclude_from_weight_decay: variables that are not decayed: a list of regular expressions
        searched for in variable paths, or of variables, or a function of a variable. None excludes
        those of rank 1 or less, biases and normalisation layers; `[]` excludes nothing.
      exclude_from_layer_adaptation: the same for adaptation. The two rules are independent.
      excluded_lr_multiplier: what gamma is multiplied by for variables excluded from adaptation.
      trust_min, trust_max: bounds of lambda where no norm is zero; None for none.
      bias_correction: False for m^ = m and v^ = v, as You's ImageNet code and ColossalAI have it.
      jit_compile: say True where XLA compiles the training step; see `LARS`.
      **kwargs: `clipnorm`, `clipvalue`, `global_clipnorm` (all three on the
        reduced gradient), `use_ema`, `ema_momentum`, `ema_overwrite_frequency` and the like, as in
        Keras's optimizers.

    Gradients of `tf.IndexedSlices` are made dense: moments of rows without gradient decay as well.

    Raises:
      InputError: a value is out of its range; at the first update, where the variables are known,
        a pattern that matches none of them.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        exclude_from_weight_decay: Rule = None,
        exclude_from_layer_adaptation: Rule = None,
        excluded_lr_multiplier: float = 1.0,
        trust_min: float | None = None,
        trust_max: float | None = None,
        bias_correction: bool = True,
        jit_compile: bool = False,
        name: str = "LAMB",
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
        self.beta_1 = checked("LAMB: beta_1", beta_1, Fraction)
        self.beta_2 = checked("LAMB: beta_2", beta_2, Fraction)
        self.epsilon = checked("LAMB: epsilon", epsilon, PositiveFloat)
        self.bias_correction = checked("LAMB: bias_correction", bias_correction, bool)
        self.trust_rule = TrustRule(1.0, "vector", 0.0, "one", None, trust_min, trust_max)

    def create_state(self, variables: Sequence[Any]) -> None:
        super().create_state(variables)
        self._m, self._v = self._moments(variables, "m"), self._moments(variables, "v")

    def _moments(self, variables: Sequence[Any], name: str) -> list[tf.Variable]:
        """One zero variable for each of `variables`: of its shape and dtype, or flat in float32 where
        it has 16 bits, in which v would stay as it is: 0.999 is 1 in bfloat16."""
        return [
            self.vector(math.prod(variable.shape), f"{name}_{index}")
            if tf.as_dtype(variable.dtype).size < 4
            else self.slots([variable], name)[0]
            for index, variable in enumerate(variables)
        ]

    def update(self, index: int, gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        w, m, v, gamma = variable, self._m[index], self._v[index], learning_rate
        g, beta = tf.convert_to_tensor(gradient), self._decays[index]
        if m.dtype == w.dtype:
            # At rate 0 TensorFlow's fused Adam leaves w as it is, and makes both moments in one pass.
            zero, one = tf.zeros((), w.dtype), tf.ones((), w.dtype)
            beta_1, beta_2 = tf.constant(self.beta_1, w.dtype), tf.constant(self.beta_2, w.dtype)
            tf.raw_ops.ResourceApplyAdam(
                var=w.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=zero,
                beta2_power=zero,
                lr=zero,
                beta1=beta_1,
                beta2=beta_2,
                epsilon=one,
                grad=g,
            )
        else:
            g = tf.cast(tf.reshape(g, m.shape), m.dtype)
            m.assign_add((1 - self.beta_1) * (g - m))
            v.assign_add((1 - self.beta_2) * (tf.square(g) - v))
        # r = m^ / (sqrt(v^) + epsilon), its divisions by scalars moved out of the arrays.
        correction_1, correction_2 = self._corrections(m.dtype)
        root = tf.sqrt(correction_2)
        r = (root / correction_1) * (m / (tf.sqrt(v) + self.epsilon * root))
        r = tf.reshape(r, w.shape)
        u = r + beta * tf.cast(w, r.dtype) if beta else r
        ratio, _ = self.ratio(index, w, g, u, beta, gamma)
        tf.raw_ops.ResourceApplyGradientDescent(
            var=w.handle, alpha=scaled(gamma, ratio, w.dtype), delta=tf.cast(u, w.dtype)
        )

    def _corrections(self, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """1 - beta_1^t and 1 - beta_2^t at this step, to the last digits of `dtype` at any t.

        Betas are rounded to `dtype` first, as they are in the moments: 1 - 0.999 is off by 1e-5 in
        float32, and cancels only against itself. `expm1` loses no digits where beta^t is close to 1.
        """
        if not self.bias_correction:
            return tf.ones((), dtype), tf.ones((), dtype)
        t = tf.cast(tf.convert_to_tensor(self.iterations), dtype) + 1
        rounded = [float(np.asarray(beta, dtype.as_numpy_dtype)) for beta in (self.beta_1, self.beta_2)]
        logs = [math.log(beta) if beta else -math.inf for beta in rounded]
        return -tf.math.expm1(t * logs[0]), -tf.math.expm1(t * logs[1])

    def equation(self) -> list[str]:
        beta_1, beta_2, beta, rule = self.beta_1, self.beta_2, self._beta, self.trust_rule
        low = 0.0 if rule.trust_min is None else rule.trust_min
        high = math.inf if rule.trust_max is None else rule.trust_max
        bounds = f", within [{low:g}, {high:g}]" if (low, high) != (0.0, math.inf) else ""
        r = f"m / (sqrt(v) + {self.epsilon:g})"
        if self.bias_correction:
            r = f"m / (1 - {beta_1:g}^t) / (sqrt(v / (1 - {beta_2:g}^t)) + {self.epsilon:g}), t = 1 at the first step"
        return [
            f"  m      = {beta_1:g} m + {1 - beta_1:g} g",
            f"  v      = {beta_2:g} v + {1 - beta_2:g} g^2",
            f"  r      = {r}",
            f"  u      = r + {beta:g} w" if beta else "  u      = r",
            f"  lambda = |w| / |u|{bounds}; 1 where a norm is 0",
            "  w      = w - gamma lambda u",
            f"  not adapted: lambda = {self.excluded_lr_multiplier:g}; not decayed: u = r",
        ]

    def get_config(self) -> dict[str, Any]:
        """Every argument, so that a saved model trains on as it did."""
        config = super().get_config()
        config.update(
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            epsilon=self.epsilon,
            trust_min=self.trust_rule.trust_min,
            trust_max=self.trust_rule.trust_max,
            bias_correction=self.bias_correction,
        )
        return config
