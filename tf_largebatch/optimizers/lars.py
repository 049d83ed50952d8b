"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import logging

from tf_largebatch._keras import Optimizer, register, tf, variable_path
from tf_largebatch.optimizers.exclusions import compiled, excluded
from tf_largebatch.optimizers.trust_ratio import norm, trust_ratio
from tf_largebatch.validation import InputError


@register
class LARS(Optimizer):
    """Momentum SGD whose rate is scaled for each variable by the ratio of its norms.

    With weights w, gradient g (the mean over the global batch, after the all-reduce), velocity v,
    learning rate gamma, trust coefficient eta, momentum mu and weight decay beta, each step is

        d      = g + beta w
        lambda = eta |w| / (|g| + beta |w| + epsilon)
        v      = mu v + gamma lambda d
        w      = w - v                    (Nesterov: w - (mu v + gamma lambda d), with the new v)

    Norms are over a whole variable, in float32 (float64 for float64 variables). Where a norm is
    zero, lambda = eta (`optimizers/trust_ratio.py` says why). A variable excluded from adaptation
    takes lambda = `excluded_lr_multiplier`; one excluded from decay takes beta = 0.

    A gradient of `tf.IndexedSlices` is made dense first: the norm of its values is not the norm of
    the gradient where rows repeat, and momentum and decay reach every row.

    Args:
      learning_rate: gamma; a number or a `LearningRateSchedule`. With eta = 0.001 published values
        are 1 to 35, growing with the batch.
      trust_coefficient: eta.
      momentum: mu, in [0, 1).
      nesterov: whether to look ahead as in the equation.
      weight_decay: beta. It is part of the gradient, so do not add an L2 regulariser as well.
      epsilon: added to the denominator as it stands; 0.0 means 0.
      exclude_from_weight_decay: regular expressions searched for in variable paths; None excludes
        variables of rank 1 or less, biases and normalisation layers; `[]` excludes nothing.
      exclude_from_layer_adaptation: the same for adaptation. The two are independent.
      excluded_lr_multiplier: what gamma is multiplied by for variables excluded from adaptation.
      **kwargs: `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
        `ema_overwrite_frequency` and the like, as in Keras's own optimizers.

    Raises:
      InputError: a value is out of its range; at the first update, where the variables are known,
        a pattern that matches none of them.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", algorithm 1
    (arXiv 1708.03888). Different from it: exclusions and the zero-norm rule, which it leaves open.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        trust_coefficient: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        excluded_lr_multiplier: float = 1.0,
        name: str = "LARS",
        **kwargs: Any,
    ):
        super().__init__(learning_rate, name, **kwargs)
        for argument, value, limit in (
            ("trust_coefficient", trust_coefficient, "greater than 0"),
            ("momentum", momentum, "at least 0 and less than 1"),
            ("weight_decay", weight_decay, "at least 0"),
            ("epsilon", epsilon, "at least 0"),
            ("excluded_lr_multiplier", excluded_lr_multiplier, "at least 0"),
        ):
            # Written so that NaN fails too.
            inside = value > 0 if argument == "trust_coefficient" else value >= 0
            if not inside or value == float("inf") or (argument == "momentum" and value >= 1):
                raise InputError(f"LARS: {argument} is {value}, but must be {limit}.")
        self.trust_coefficient = trust_coefficient
        self.momentum = momentum
        self.nesterov = nesterov
        self.epsilon = epsilon
        self.excluded_lr_multiplier = excluded_lr_multiplier
        # Under these names Keras's base class would find and apply them in its own way.
        self._beta = weight_decay
        self._decay_patterns = _patterns(exclude_from_weight_decay, "exclude_from_weight_decay")
        self._adaptation_patterns = _patterns(exclude_from_layer_adaptation, "exclude_from_layer_adaptation")

    def create_state(self, variables: Sequence[Any]) -> None:
        self._velocities = self.slots(variables, "velocity")
        paths = [variable_path(variable) for variable in variables]
        ranks = [len(variable.shape) for variable in variables]
        no_decay = excluded(self._decay_patterns, paths, ranks, "exclude_from_weight_decay")
        no_adaptation = excluded(self._adaptation_patterns, paths, ranks, "exclude_from_layer_adaptation")
        self._decayed = tuple(not flag for flag in no_decay)
        self._adapted = tuple(not flag for flag in no_adaptation)
        logging.info(
            "LARS: %d variables, %d excluded from layer adaptation, %d from weight decay.",
            len(paths),
            sum(no_adaptation),
            sum(no_decay),
        )

    def update(self, index: int, gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        w, g, v = variable, tf.convert_to_tensor(gradient), self._velocities[index]
        beta = self._beta if self._decayed[index] else 0.0
        d = g + tf.cast(beta, w.dtype) * w if beta else g
        if self._adapted[index]:
            ratio = trust_ratio(norm(w), norm(g), self.trust_coefficient, beta, self.epsilon)
        else:
            ratio = tf.cast(self.excluded_lr_multiplier, learning_rate.dtype)
        step = tf.cast(tf.cast(learning_rate, ratio.dtype) * ratio, w.dtype) * d
        mu = tf.cast(self.momentum, w.dtype)
        velocity = mu * v + step
        v.assign(velocity)
        w.assign_sub(mu * velocity + step if self.nesterov else velocity)

    def get_config(self) -> dict[str, Any]:
        """Every argument, so that a saved model trains on as it did."""
        config = super().get_config()
        config.update(
            trust_coefficient=self.trust_coefficient,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self._beta,
            epsilon=self.epsilon,
            exclude_from_weight_decay=self._decay_patterns,
            exclude_from_layer_adaptation=self._adaptation_patterns,
            excluded_lr_multiplier=self.excluded_lr_multiplier,
        )
        return config


def _patterns(patterns: Sequence[str] | None, argument: str) -> tuple[str, ...] | None:
    if patterns is None:
        return None
    if isinstance(patterns, str):
        raise InputError(f"LARS: {argument} is {patterns!r}, but must be a list of regular expressions or None.")
    for pattern in patterns:
        compiled(pattern, argument)
    return tuple(patterns)
