"""Dropout whose mask does not depend on how the global batch is cut up."""

from __future__ import annotations

import math
import random
from typing import Any

from tf_largebatch._keras import keras, register, tf
from tf_largebatch.distribution import global_batch
from tf_largebatch.validation import Fraction, Seed, checked

# `alg` of TensorFlow's stateless random operations.
_PHILOX = 1


@register
class GlobalBatchDropout(keras.layers.Layer):
    """Dropout by seed, global step and position in the global batch.

    In training each value is kept with probability 1 - rate, and divided by it; else it becomes 0.
    An example's mask is the same on any number of replicas, workers and micro-batches, and in any
    precision. Keras draws the same mask on all replicas, and one after the other for micro-batches.

    A training step of this package says where its examples stand (`global_batch.position`). In any
    other, such as Keras's own `fit`, the layer counts its training calls as steps, and takes replicas to
    hold as many examples each as this one. Called twice in a step of this package, as a shared layer
    may be, it uses the same mask twice.

    The bits are those of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
    1, 2, 3"), a function of key and counter: the key is the seed, the counter's high half the step and
    its low half the place of the value in the global batch, in blocks of four.

    Args:
      rate: fraction of the values that become 0; 0 <= rate < 1.
      seed: 0 <= seed < 2**32. Layers with one seed have one mask. None draws a seed from Python's
        `random`, which `keras.utils.set_random_seed` sets: do so on every worker, with the same seed.
      **kwargs: as keras.layers.Layer.

    Call: inputs of shape (n, ...) give outputs of that shape and dtype.

    Raises:
      InputError: `rate` or `seed` is wrong.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rate = checked(f"{type(self).__name__}: rate", rate, Fraction)
        seed = random.randrange(2**32) if seed is None else seed
        self.seed = checked(f"{type(self).__name__}: seed", seed, Seed)
        self.supports_masking = True

    def build(self, input_shape: Any) -> None:
        # Training calls so far, where no training step of this package says the step.
        self.step = self.add_weight(name="step", shape=(), dtype="int64", initializer="zeros", trainable=False)
        super().build(input_shape)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training or self.rate == 0:
            return inputs
        position = global_batch.position() or self._own_position(inputs)
        kept = _kept(inputs, self.rate, self.seed, position)
        return tf.where(kept, inputs / (1 - self.rate), tf.zeros_like(inputs))

    def _own_position(self, inputs: tf.Tensor) -> global_batch.Position:
        step = tf.convert_to_tensor(self.step)
        self.step.assign(step + 1)
        context = tf.distribute.get_replica_context()
        replica = 0 if context is None else context.replica_id_in_sync_group
        return global_batch.Position(step, tf.cast(replica, tf.int64) * tf.shape(inputs, tf.int64)[0])

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}


def _kept(like: tf.Tensor, rate: float, seed: int, position: global_batch.Position) -> tf.Tensor:
    """Booleans of the shape of `like`, whose first axis are the examples from `position` on."""
    dynamic = tf.shape(like)
    examples, *sizes = (dynamic[axis] if size is None else size for axis, size in enumerate(like.shape))
    values = math.prod(sizes)
    # One count of Philox gives four numbers; each example starts with a new count.
    blocks = (values + 3) // 4
    first_block = position.first_example * tf.cast(blocks, tf.int64)
    # Whole numbers, because XLA makes other floats of the same bits than TensorFlow's own kernels.
    drawn = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[examples, 4 * blocks],
        key=tf.constant([seed], tf.uint64),
        counter=tf.bitcast(tf.stack([first_block, position.step]), tf.uint64),
        alg=_PHILOX,
        dtype=tf.uint32,
    )
    kept = drawn >= tf.constant(int(rate * 2**32), tf.uint32)
    return tf.reshape(kept[:, :values], [examples, *sizes])
