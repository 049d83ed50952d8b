"""Random images with learnable labels."""

from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch.datasets import synthetic


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (4096, 28, 28, 1)),
        ({"num_train": 30, "num_test": 7, "image_size": 5, "channels": 3, "num_classes": 4}, (30, 5, 5, 3)),
        ({"num_train": 1, "num_test": 1, "image_size": 1, "num_classes": 1}, (1, 1, 1, 1)),
    ],
)
def test_shapes_and_types(options, shape):
    for (images, labels), count in zip(synthetic.load(**options), (shape[0], options.get("num_test", 1024))):
        assert images.shape == (count, *shape[1:]) and images.dtype == np.uint8
        assert labels.shape == (count,) and labels.dtype in (np.uint8, np.int32)
        assert labels.min() >= 0 and labels.max() < options.get("num_classes", 10)
    assert synthetic.num_examples(**options) == shape[0]


def test_the_seed_alone_decides():
    def images(**options):
        return synthetic.load(num_train=20, num_test=20, **options)[0][0]

    np.testing.assert_array_equal(images(), images(data_seed=0))
    assert (images() != images(data_seed=1)).any()


def test_the_training_images_do_not_depend_on_the_number_of_test_images():
    few, many = (synthetic.load(num_train=20, num_test=number)[0] for number in (1, 50))
    for one, other in zip(few, many):
        np.testing.assert_array_equal(one, other)


def test_training_and_test_images_are_of_the_same_pictures_but_not_the_same():
    (train_images, train_labels), (test_images, test_labels) = synthetic.load(num_train=2000, num_test=500)
    seen = {image.tobytes() for image in train_images}
    assert not any(image.tobytes() in seen for image in test_images)
    # What a network is to learn: the class whose mean training image is nearest. Two pictures differ by
    # 42 of 128 levels a pixel on average, the noise by 32: over 784 pixels nothing is mistaken.
    means = np.stack([train_images[train_labels == label].mean(axis=0).ravel() for label in range(10)])
    distances = np.square(test_images.reshape(500, 1, -1) - means).sum(axis=2)
    np.testing.assert_array_equal(distances.argmin(axis=1), test_labels)


def test_pictures_and_noise_stay_within_a_byte():
    # A sum that went over 255 would begin again at 0, and a pixel of a class would vary by more than
    # the noise, which is 0 to 127.
    (images, labels), _ = synthetic.load(num_train=3000, num_classes=3)
    for label in range(3):
        assert np.ptp(images[labels == label].astype(int), axis=0).max() <= 127
    assert images.max() > 240
