"""What a user's data set may return, and the sentence for everything else."""

from __future__ import annotations

import numpy as np
import pytest
from one_sentence import refusal

from tf_largebatch.datasets import arrays

IMAGES, LABELS = np.zeros((6, 4, 4), np.uint8), np.array([0, 1, 2, 0, 1, 2])
GOOD = (IMAGES, LABELS), (IMAGES[:2], LABELS[:2])


def test_good_data_pass_unchanged():
    train, test, num_classes = arrays.checked(GOOD, "mine:load")
    assert num_classes == 3
    assert train[0] is IMAGES and test[1].tolist() == [0, 1]


def test_lists_are_arrays():
    train, _, _ = arrays.checked((([[1.0, 2.0]] * 3, [0, 1, 0]), ([[3.0, 4.0]], [1])), "mine:load")
    assert train[0].shape == (3, 2) and train[1].dtype.kind == "i"


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (None, "returned NoneType, but must return"),
        ((GOOD[0],), "returned tuple, but must return"),
        ((GOOD[0], GOOD[1], GOOD[1]), "returned tuple, but must return"),
        (((IMAGES, LABELS / 2.5), GOOD[1]), "labels are float64 of shape (6,), but must be whole numbers"),
        (((IMAGES, np.eye(3)[LABELS]), GOOD[1]), "labels are float64 of shape (6, 3)"),
        (((IMAGES, LABELS.astype(str)), GOOD[1]), "but must be whole numbers"),
        (((IMAGES, LABELS - 1), GOOD[1]), "the label -1 is below 0"),
        (((IMAGES[:5], LABELS), GOOD[1]), "there are 5 images and 6 labels"),
        ((GOOD[0], (IMAGES[:0], LABELS[:0])), "there are 0 images and 0 labels"),
        ((GOOD[0], (IMAGES[:2, :3], LABELS[:2])), "training images have shape (4, 4) and test images (3, 4)"),
        (
            (GOOD[0], (IMAGES[:1], np.array([1000]))),
            "the test label 1000 is larger than every training label (up to 2)",
        ),
        (((IMAGES.astype(object), LABELS), GOOD[1]), "images are object of shape (6, 4, 4)"),
        (((np.array(["a.jpg"] * 6), LABELS), GOOD[1]), "images are <U5 of shape (6,)"),
    ],
)
def test_bad_data(loaded, words):
    assert words in refusal(arrays.checked, loaded, "mine:load")
