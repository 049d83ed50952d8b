"""A three-layer convolutional network for 28x28 images, small enough to train on a laptop."""

from __future__ import annotations

from tf_largebatch._keras import keras
from tf_largebatch.layers.ghost_batch_normalization import GhostBatchNormalization
from tf_largebatch.layers.global_batch_dropout import GlobalBatchDropout
from tf_largebatch.validation import Fraction, PositiveInt


def build(
    input_shape: tuple[int, ...],
    num_classes: int,
    width: PositiveInt = 16,
    batch_norm: bool = True,
    batch_norm_momentum: Fraction = 0.9,
    batch_norm_group_size: PositiveInt | None = None,
    dropout: Fraction = 0.0,
) -> keras.Model:
    """Convolutions of stride 2 (5x5 width, 3x3 2 width, 3x3 4 width), then a dense layer of logits.

    Args:
      input_shape: (height, width, channels) of images with values 0 to 255.
      num_classes: number of logits.
      width: filters of the first convolution.
      batch_norm: whether each convolution is followed by batch normalisation (else by a bias).
      batch_norm_momentum: share of the old moving average kept at each step. Keras's own default,
        0.99, needs several hundred steps to settle, more than a large-batch run has.
      batch_norm_group_size: consecutive examples that share their statistics in training; None takes
        all that a replica gets at a time, so that the result depends on the number of replicas.
      dropout: fraction of the values before the dense layer that training drops.
    """
    layers = keras.layers
    inputs = keras.Input(input_shape, name="image")
    # On the device, so that pixels travel to it as single bytes.
    x = layers.Rescaling(1 / 255)(inputs)
    for number, (filters, size) in enumerate([(width, 5), (2 * width, 3), (4 * width, 3)], start=1):
        x = layers.Conv2D(
            filters,
            size,
            strides=2,
            padding="same",
            use_bias=not batch_norm,
            kernel_initializer="he_normal",
            name=f"conv_{number}",
        )(x)
        if batch_norm:
            x = GhostBatchNormalization(
                batch_norm_group_size, momentum=batch_norm_momentum, name=f"batch_normalization_{number}"
            )(x)
        x = layers.ReLU(name=f"relu_{number}")(x)
    x = layers.Flatten(name="flatten")(x)
    if dropout:
        x = GlobalBatchDropout(dropout, name="dropout")(x)
    # Logits in at least float32: a softmax over 8-bit mantissas would cost accuracy.
    logits_dtype = "float64" if keras.backend.floatx() == "float64" else "float32"
    logits = layers.Dense(num_classes, name="logits", dtype=logits_dtype)(x)
    return keras.Model(inputs, logits, name="small_cnn")
