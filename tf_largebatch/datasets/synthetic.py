"""Random images with learnable labels: to try a recipe, a network or a cluster without any data."""

from __future__ import annotations

import numpy as np

from tf_largebatch.validation import NonNegativeInt, PositiveInt

Arrays = tuple[np.ndarray, np.ndarray]


def load(
    num_train: PositiveInt = 4096,
    num_test: PositiveInt = 1024,
    image_size: PositiveInt = 28,
    channels: PositiveInt = 1,
    num_classes: PositiveInt = 10,
    data_seed: NonNegativeInt = 0,
) -> tuple[Arrays, Arrays]:
    """Each class is a random picture; an example is its class's picture under as much noise.

    Returns:
      (train images, train labels), (test images, test labels) as `keras.datasets` gives them:
      uint8 (n, image_size, image_size, channels) and uint8 or int32 (n,).
    """
    generator = np.random.Generator(np.random.PCG64(data_seed))
    pictures = generator.integers(0, 256, (num_classes, image_size, image_size, channels), dtype=np.uint8)
    return (
        _examples(generator, pictures, num_train),
        _examples(generator, pictures, num_test),
    )


def num_examples(num_train: int = 4096, **options: int) -> int:
    """Number of training images, without making them."""
    return num_train


def _examples(generator: np.random.Generator, pictures: np.ndarray, count: int) -> Arrays:
    labels = generator.integers(0, len(pictures), count, dtype=np.int32)
    noise = generator.integers(0, 256, (count, *pictures.shape[1:]), dtype=np.uint8)
    # Halved before the sum, so that it stays within a byte.
    return pictures[labels] // 2 + noise // 2, labels
