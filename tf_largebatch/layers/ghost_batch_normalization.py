"""Batch normalisation whose statistics do not depend on how the global batch is cut up."""

from __future__ import annotations

from typing import Any

from tf_largebatch._keras import keras, register, tf
from tf_largebatch.validation import Fraction, InputError, Int, NonNegativeFloat, PositiveInt, checked

# Options of either Keras that change what training computes, and that `call` does not follow.
_REFUSED = ("renorm", "virtual_batch_size", "adjustment")


@register
class GhostBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation over groups of consecutive examples, the same on both Kerases.

    Training, for the examples x of one group, over all axes but the channels:

        mean = mean(x),  variance = mean((x - mean)^2)
        y = gamma (x - mean) / sqrt(variance + epsilon) + beta
        moving = momentum * moving + (1 - momentum) * (mean over the groups of mean, or of variance)

    The outputs are the same on any number of replicas and micro-batches, as long as each gets whole
    groups. Keras's layer normalises over whatever a replica gets at a time, and that of Keras 2 keeps an
    unbiased moving variance for images. Inference is Keras's own: by the moving statistics, without groups.

    Each replica updates its moving statistics from its own groups, once a call. The training step takes
    their mean over replicas (`distribution/moving_statistics.py`) and makes one update of all micro-batches.

    Source: Hoffer, Hubara and Soudry 2017, "Train longer, generalize better", algorithm 1 ("ghost batch
    normalization"), whose moving statistics instead take the groups one after the other. Group sizes:
    32 in Goyal et al. 2017, 32 to 424 in MLPerf's ResNet-50.

    Args:
      group_size: examples in a group; None takes all that a call gets. As many as all replicas get in a call
        together make one group of all, as with `synchronized`.
      axis: the channels, any axis but the first.
      momentum: share of the old moving statistics kept at each update.
      epsilon: added to the variance.
      synchronized: one group of all that all replicas get in a call, instead. They wait for each other in
        every such layer, which MirroredStrategy cannot do inside a loop over micro-batches.
      **kwargs: as keras.layers.BatchNormalization, without `renorm` and `virtual_batch_size`.

    Call: inputs of shape (n, ...) give outputs of that shape in the compute dtype; statistics are in
    float32, or float64 for float64 inputs.

    Raises:
      InputError: an argument is wrong; the inputs have a mask; in training, `group_size` does not divide
        n. Where n is not known when the call is traced, TensorFlow raises InvalidArgumentError in the step.
    """

    def __init__(
        self,
        group_size: int | None = None,
        axis: int = -1,
        momentum: float = 0.9,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        **kwargs: Any,
    ):
        name = type(self).__name__
        for refused in _REFUSED:
            if kwargs.get(refused):
                raise InputError(f"{name} does not do {refused}; leave it out, or use keras.layers.BatchNormalization.")
        group_size = checked(f"{name}: group_size", group_size, PositiveInt | None)
        if group_size and synchronized:
            raise InputError(
                f"{name}: synchronized=True takes statistics over the whole global batch, not over groups of "
                f"{group_size}; leave out one of the two."
            )
        axis = checked(f"{name}: axis", axis, Int)
        momentum = checked(f"{name}: momentum", momentum, Fraction)
        epsilon = checked(f"{name}: epsilon", epsilon, NonNegativeFloat)
        super().__init__(axis=axis, momentum=momentum, epsilon=epsilon, synchronized=synchronized, **kwargs)
        self.group_size = group_size
        # Keras 2 makes a list of `axis` when it builds.
        self._channel_axis = axis

    def build(self, input_shape: Any) -> None:
        if not -len(input_shape) <= self._channel_axis < len(input_shape):
            raise InputError(f"{self.name}: axis is {self._channel_axis}, but the inputs have {len(input_shape)} axes.")
        if self._channel_axis % len(input_shape) == 0:
            raise InputError(f"{self.name}: axis is {self._channel_axis}, but the first axis holds the examples.")
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        if mask is not None:
            raise InputError(
                f"{self.name}: {type(self).__name__} does not take inputs with a mask; "
                "use keras.layers.BatchNormalization for them."
            )
        if not (training and self.trainable):
            return super().call(inputs, training=False)
        # At least float32: the squares of 16-bit numbers overflow or vanish.
        x = inputs if inputs.dtype == tf.float64 else tf.cast(inputs, tf.float32)
        over_replicas = self.synchronized or self._is_whole_batch(x)
        x = x[tf.newaxis] if over_replicas else self._grouped(x)
        channel = self._channel_axis % inputs.shape.rank + 1
        axes = [axis for axis in range(1, x.shape.rank) if axis != channel]
        mean, variance = _moments_over_replicas(x, axes) if over_replicas else tf.nn.moments(x, axes, keepdims=True)
        for moving, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            value = tf.reshape(tf.reduce_mean(value, axis=0), [-1])
            updated = self.momentum * tf.cast(moving, x.dtype) + (1 - self.momentum) * value
            moving.assign(tf.cast(updated, moving.dtype))
        shape = [1] * x.shape.rank
        shape[channel] = x.shape[channel]
        beta, gamma = (v if v is None else tf.reshape(tf.cast(v, x.dtype), shape) for v in (self.beta, self.gamma))
        y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, self.epsilon)
        return tf.cast(tf.reshape(y, _shape(inputs)), self.compute_dtype)

    def _is_whole_batch(self, x: tf.Tensor) -> bool:
        context = tf.distribute.get_replica_context()
        replicas = 1 if context is None else context.num_replicas_in_sync
        return replicas > 1 and x.shape[0] is not None and self.group_size == x.shape[0] * replicas

    def _grouped(self, x: tf.Tensor) -> tf.Tensor:
        """[n, ...] to [n / group_size, group_size, ...]; one group of all without a group size."""
        if self.group_size is None:
            return x[tf.newaxis]
        examples, *others = _shape(x)
        # TPUs need the static shape wherever there is one.
        groups, rest = divmod(examples, self.group_size) if examples >= 0 else (-1, 0)
        if rest:
            raise InputError(
                f"{self.name}: group_size is {self.group_size}, which does not divide the {examples} examples that "
                "a replica gets at a time; change it, the global batch, or the number of replicas or micro-batches."
            )
        return tf.reshape(x, [groups, self.group_size, *others])

    def get_config(self) -> dict[str, Any]:
        own = {"group_size": self.group_size, "axis": self._channel_axis, "synchronized": self.synchronized}
        return {**super().get_config(), **own}


def _shape(x: tf.Tensor) -> list[Any]:
    """For `tf.reshape`: numbers where known, -1 for an unknown number of examples, else scalar tensors."""
    dynamic = tf.shape(x)
    sizes = [dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)]
    return [-1 if x.shape[0] is None else sizes[0], *sizes[1:]]


def _moments_over_replicas(x: tf.Tensor, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """As `tf.nn.moments(x, axes, keepdims=True)`, over all replicas' x; differentiable."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.nn.moments(x, axes, keepdims=True)

    def total(values: tf.Tensor) -> tf.Tensor:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)

    sums = tf.reduce_sum(x, axes, keepdims=True)
    count = tf.cast(tf.size(x) // tf.size(sums), x.dtype)
    # One collective for both; replicas may have different numbers of examples.
    totals = total(tf.concat([tf.reshape(sums, [-1]), [count]], axis=0))
    count = totals[-1]
    mean = tf.reshape(totals[:-1], sums.shape) / count
    # Keras's mean(x^2) - mean^2 cancels where the mean is large. The variance is at its minimum in the
    # mean, so no gradient flows through that.
    squares = tf.math.squared_difference(x, tf.stop_gradient(mean))
    return mean, total(tf.reduce_sum(squares, axes, keepdims=True)) / count
