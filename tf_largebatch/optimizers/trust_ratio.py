"""Norms, and the layer-wise trust ratio that multiplies the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from tf_largebatch._keras import tf
from tf_largebatch.validation import InputError, nearest

NORM_RULES = ("sum", "vector", "gradient")
ZERO_NORM_RULES = ("coefficient", "one", "zero", "plain")
CLIPS = (None, "larc")


# Sums of fewer elements are not worth slicing.
_SLICES, _WORTH_SLICING = 16, 4096


def norm(x: tf.Tensor, for_xla: bool = False) -> tf.Tensor:
    """L2 norm over all elements, a scalar in float32, or float64 where `x` is float64.

    Squares of 16-bit values overflow and underflow in 16 bits, so they are taken in float32. Matrix
    products, though fast, are no way to sum them: they lose digits on every kind of device.

    Args:
      x: a tensor or variable of any shape, fully defined where `for_xla`.
      for_xla: sum 16 slices element by element first: vector code under XLA on CPU, and four times as
        fast there, but half as fast without XLA.
    """
    x = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    size = x.shape.num_elements()
    if not for_xla or size < _WORTH_SLICING:
        # l2_loss is sum(x^2) / 2 in one pass, without a second array of the size of x.
        return tf.sqrt(2.0 * tf.nn.l2_loss(x))
    whole = size - size % _SLICES
    x = tf.reshape(x, (size,))
    slices = tf.unstack(tf.reshape(x[:whole], (_SLICES, whole // _SLICES)))
    # Each squared on its own: XLA then makes one loop of it, without an array of all squares.
    squares = slices[0] * slices[0]
    for one in slices[1:]:
        squares = squares + one * one
    return tf.sqrt(tf.reduce_sum(squares) + tf.reduce_sum(tf.square(x[whole:])))


@dataclass(frozen=True)
class TrustRule:
    """How lambda follows from the norms of the weights w, of the gradient g, and of d = g + beta w.

    Attributes:
      coefficient: eta, greater than 0.
      norm_rule: "sum",      lambda = eta |w| / (|g| + beta |w| + epsilon), as the LARS paper has it;
                 "vector",   lambda = eta |w| / (|d| + epsilon);
                 "gradient", lambda = eta |w| / (|g| + epsilon).
      epsilon: at least 0, and as it stands: 0.0 means 0.
      zero_norm: what holds where a norm in the fraction is zero, about which the paper is silent:
        "coefficient", lambda = eta; "one", lambda = 1, as most implementations have it, a first step
        1 / eta times too large for a weight that begins at zero; "zero", lambda = 0; "plain",
        lambda = 1, and no weight decay either.
      clip: "larc" for lambda = min(lambda, gamma) / gamma: a layer's rate gamma lambda is then the
        smaller of lambda and gamma. None for lambda alone.
      trust_min, trust_max: bounds of a lambda that came from norms, before `clip`; None for none.

    Raises:
      InputError: a value is not among these.
    """

    coefficient: float
    norm_rule: str = "sum"
    epsilon: float = 0.0
    zero_norm: str = "coefficient"
    clip: str | None = None
    trust_min: float | None = None
    trust_max: float | None = None

    def __post_init__(self):
        for argument, allowed in (("norm_rule", NORM_RULES), ("zero_norm", ZERO_NORM_RULES), ("clip", CLIPS)):
            value = getattr(self, argument)
            if value not in allowed:
                names = [name for name in allowed if name]
                raise InputError(f"{argument} is {value!r}{nearest(value, names)}, but must be one of {allowed}.")
        low = 0.0 if self.trust_min is None else self.trust_min
        high = float("inf") if self.trust_max is None else self.trust_max
        if not 0 <= low <= high or high == 0:
            raise InputError(
                f"trust_min is {self.trust_min} and trust_max {self.trust_max}, but they must be at least 0, "
                "trust_max greater than 0, and in order."
            )

    def apply(
        self, w: tf.Tensor, g: tf.Tensor, d: tf.Tensor, beta: float, gamma: tf.Tensor, for_xla: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor | float]:
        """Lambda, and the beta that holds with it (0 where `zero_norm` is "plain" and applies).

        Args:
          w, g, d: weights, gradient and decayed gradient, of one shape; `d` may be anything where the
            rule is not "vector".
          beta: weight decay of this variable.
          gamma: learning rate, a scalar.
          for_xla: see `norm`.

        Returns:
          Scalars in the dtype of `norm`.
        """
        weight_norm = norm(w, for_xla)
        gradient_norm = norm(d if self.norm_rule == "vector" else g, for_xla)
        denominator = gradient_norm + self.epsilon
        if self.norm_rule == "sum":
            denominator = gradient_norm + beta * weight_norm + self.epsilon
        ratio = self.coefficient * weight_norm / denominator
        if self.trust_min is not None:
            ratio = tf.maximum(ratio, self.trust_min)
        if self.trust_max is not None:
            ratio = tf.minimum(ratio, self.trust_max)
        if self.clip == "larc":
            # Where gamma is 0 the step is 0 whatever lambda is; 0 / 0 must not make it NaN.
            gamma = tf.cast(gamma, ratio.dtype)
            ratio = tf.math.divide_no_nan(tf.minimum(ratio, gamma), gamma)
        defined = tf.logical_and(weight_norm > 0, gradient_norm > 0)
        otherwise = {"coefficient": self.coefficient, "one": 1.0, "zero": 0.0, "plain": 1.0}[self.zero_norm]
        ratio = tf.where(defined, ratio, tf.constant(otherwise, ratio.dtype))
        if self.zero_norm == "plain" and beta:
            return ratio, tf.where(defined, tf.constant(beta, ratio.dtype), tf.zeros((), ratio.dtype))
        return ratio, beta
