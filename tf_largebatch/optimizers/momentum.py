"""Momentum steps on one variable, as plain TensorFlow.

`s` is the slot, which holds -v: minus the velocity, as in Keras's SGD. With mu the momentum and d the
decayed gradient, every order of momentum and rate is

    s = mu s - a d
    u = mu s - a d  if Nesterov, else s
    w = w + b u

with (a, b) = (gamma lambda, 1) for "classic", (lambda, gamma) for "torch" and (1, gamma lambda) for
"unscaled" and "post_trust".
"""

from __future__ import annotations

from typing import Any

from tf_largebatch._keras import store, tf


def decayed(g: tf.Tensor, w: tf.Variable, beta: Any, clip: float | None) -> tf.Tensor:
    """d = g + beta w, its elements cut to [-clip, clip]; `beta` is a number or a scalar tensor."""
    if tf.is_tensor(beta) or beta:
        g = g + _scalar(beta, g.dtype) * w
    return g if clip is None else tf.clip_by_value(g, tf.constant(-clip, g.dtype), tf.constant(clip, g.dtype))


def scaled(gamma: tf.Tensor, ratio: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """gamma lambda, multiplied in the wider of their types, then cast to that of the weights."""
    wide = ratio.dtype if ratio.dtype.size >= gamma.dtype.size else gamma.dtype
    return tf.cast(tf.cast(gamma, wide) * tf.cast(ratio, wide), dtype)


def momentum_step(s: tf.Variable, d: tf.Tensor, a: Any, momentum: float, nesterov: bool) -> tf.Tensor:
    """Updates the slot and returns u."""
    mu, step = tf.constant(momentum, s.dtype), tf.cast(a, s.dtype) * d
    new = mu * s - step
    s.assign(new)
    return mu * new - step if nesterov else new


def fused_step(
    w: tf.Variable, s: tf.Variable, g: tf.Tensor, rate: tf.Tensor, beta: Any, momentum: float, nesterov: bool
) -> None:
    """The whole "classic" step in two of TensorFlow's fused kernels; momentum must not be 0.

    The second computes s = mu s - rate g and w = w + s. The decay reaches it through the slot: with
    s - (rate beta / mu) w in place of s it gives s = mu s - rate (g + beta w).
    """
    # tf.constant, because tf.cast takes a number through float32.
    mu = tf.constant(momentum, w.dtype)
    if tf.is_tensor(beta) or beta:
        decay = rate * _scalar(beta, w.dtype)
        value = tf.convert_to_tensor(w)
        tf.raw_ops.ResourceApplyGradientDescent(var=s.handle, alpha=decay / mu, delta=value)
        if nesterov:
            # u = mu s - rate (g + beta w): the kernel leaves out the last term.
            tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=decay, delta=value)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=w.handle, accum=s.handle, lr=rate, grad=g, momentum=mu, use_nesterov=nesterov
    )


def rows_sgd(
    w: tf.Variable, s: tf.Variable, gradient: tf.IndexedSlices, gamma: tf.Tensor, momentum: float, nesterov: bool
) -> None:
    """Momentum SGD on the rows of a sparse gradient; other rows and their slots stay as they are."""
    tf.raw_ops.ResourceSparseApplyKerasMomentum(
        var=w.handle,
        accum=s.handle,
        lr=tf.cast(gamma, w.dtype),
        grad=gradient.values,
        indices=gradient.indices,
        momentum=tf.constant(momentum, w.dtype),
        use_nesterov=nesterov,
    )


def rescale(s: tf.Variable, last_rates: tf.Variable, index: int, gamma: tf.Tensor) -> None:
    """s = s gamma_t / gamma_(t-1) while the rate grows: old steps count as if made at today's rate."""
    last = tf.gather(last_rates, index)
    growing = tf.logical_and(gamma > last, last > 0)
    factor = tf.where(growing, tf.math.divide_no_nan(gamma, last), tf.ones_like(gamma))
    s.assign(s * tf.cast(factor, s.dtype))
    store(last_rates, index, gamma)


def _scalar(value: Any, dtype: tf.DType) -> tf.Tensor:
    """A number or a scalar tensor in `dtype`."""
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)
