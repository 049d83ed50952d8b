"""Norms and the layer-wise trust ratio that LARS multiplies the learning rate by."""

from __future__ import annotations

from tf_largebatch._keras import tf


def norm(x: tf.Tensor) -> tf.Tensor:
    """L2 norm over all elements, a scalar in float32, or float64 where `x` is float64.

    Squares of 16-bit values overflow and underflow in 16 bits, so they are taken in float32.
    """
    x = tf.cast(x, tf.float64 if x.dtype == tf.float64 else tf.float32)
    return tf.sqrt(tf.reduce_sum(tf.square(x)))


def trust_ratio(
    weight_norm: tf.Tensor,
    gradient_norm: tf.Tensor,
    trust_coefficient: float,
    weight_decay: float,
    epsilon: float,
) -> tf.Tensor:
    """lambda = eta |w| / (|g| + beta |w| + epsilon), and eta where either norm is zero.

    The equation is that of You, Gitman and Ginsburg, "Large Batch Training of Convolutional
    Networks" (arXiv 1708.03888), with beta = `weight_decay`. It is silent about zero norms. Other
    implementations then take lambda = 1, a step 1 / eta times too large for a weight that begins
    at zero; here such a weight is stepped at the rate gamma eta until it has a norm.

    Args:
      weight_norm, gradient_norm: scalars of one floating dtype.

    Returns:
      A scalar of that dtype.
    """
    ratio = trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon)
    defined = tf.logical_and(weight_norm > 0, gradient_norm > 0)
    return tf.where(defined, ratio, tf.cast(trust_coefficient, ratio.dtype))
