"""What LARS and LAMB share: who is adapted and decayed, and a record of the trust ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from tf_largebatch._keras import Optimizer, store, tf
from tf_largebatch.optimizers.exclusions import Exclusions
from tf_largebatch.optimizers.trust_ratio import TrustRule
from tf_largebatch.validation import NonNegativeFloat, checked

Rule = Sequence[Any] | Callable[[Any], bool] | None


class LayerAdaptedOptimizer(Optimizer):
    """An optimizer whose rate is multiplied, for each variable, by a trust ratio.

    A subclass sets `trust_rule`, implements `update` and `equation`, and calls `create_state` when it
    makes its own slots.
    """

    trust_rule: TrustRule

    def __init__(
        self,
        learning_rate: Any,
        name: str,
        jit_compile: bool,
        weight_decay: float,
        exclude_from_weight_decay: Rule,
        exclude_from_layer_adaptation: Rule,
        excluded_lr_multiplier: float,
        **kwargs: Any,
    ):
        super().__init__(learning_rate, name, jit_compile, **kwargs)
        named = type(self).__name__
        self.excluded_lr_multiplier = checked(
            f"{named}: excluded_lr_multiplier", excluded_lr_multiplier, NonNegativeFloat
        )
        # Under their own names Keras's base class would find and apply these in its own way.
        self._beta = checked(f"{named}: weight_decay", weight_decay, NonNegativeFloat)
        self._no_decay = Exclusions(exclude_from_weight_decay, "exclude_from_weight_decay")
        self._no_adaptation = Exclusions(exclude_from_layer_adaptation, "exclude_from_layer_adaptation")

    def create_state(self, variables: Sequence[Any]) -> None:
        """Decides the exclusions, once, and makes the record of trust ratios."""
        no_decay, no_adaptation = self._no_decay.flags(variables), self._no_adaptation.flags(variables)
        self._decays = tuple(0.0 if excluded else self._beta for excluded in no_decay)
        self._adapted = tuple(not excluded for excluded in no_adaptation)
        self._trust_ratios = self.vector(len(variables), "trust_ratios")
        logging.info(
            "%s: %d variables, %d excluded from layer adaptation, %d from weight decay.",
            type(self).__name__,
            len(variables),
            sum(no_adaptation),
            sum(no_decay),
        )

    def ratio(
        self, index: int, w: Any, g: tf.Tensor, d: tf.Tensor, beta: float, gamma: tf.Tensor
    ) -> tuple[tf.Tensor, Any]:
        """Lambda of a variable at this step, recorded, and the beta that holds with it; see `TrustRule.apply`."""
        if self._adapted[index]:
            ratio, beta = self.trust_rule.apply(w, g, d, beta, gamma, self.jit_compile)
        else:
            ratio = tf.constant(self.excluded_lr_multiplier, tf.float64 if w.dtype == tf.float64 else tf.float32)
        store(self._trust_ratios, index, ratio)
        return ratio, beta

    def trust_ratios(self) -> list[float]:
        """Lambda of each variable at the last update, in the order of `paths`; 0 before the first."""
        return [float(ratio) for ratio in self._trust_ratios.numpy()]

    def equation(self) -> list[str]:
        """The update, with the numbers in force, one equation a line."""
        raise NotImplementedError

    def explain(self) -> str:
        """The equation in force, and for each variable what was done to it at the last step."""
        title = f"{type(self).__name__}, gamma = {self.current_learning_rate():.6g} at step {self.step_count()}"
        lines = [title, *self.equation()]
        if not getattr(self, "_state_created", False):
            return "\n".join([*lines, "", "Not built yet: the variables are known from the first update on."])
        rate = self.last_learning_rate()
        rows = [("variable", "shape", "adapted", "decayed", "trust ratio", "effective rate")]
        for path, shape, adapted, decay, ratio in zip(
            self.paths, self.shapes, self._adapted, self._decays, self.trust_ratios()
        ):
            numbers = ("-", "-") if rate is None else (f"{ratio:.4g}", f"{rate * ratio:.4g}")
            flags = ("yes" if adapted else "no", "yes" if decay > 0 else "no")
            rows.append((path, "x".join(map(str, shape)) or "scalar", *flags, *numbers))
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", *table])

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config.update(
            weight_decay=self._beta,
            exclude_from_weight_decay=self._no_decay.config(),
            exclude_from_layer_adaptation=self._no_adaptation.config(),
            excluded_lr_multiplier=self.excluded_lr_multiplier,
        )
        return config
