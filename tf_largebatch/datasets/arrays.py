"""Checks what a data set's `load` returned, so that a mistake is a sentence and not a wrong result."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_largebatch.validation import InputError

Arrays = tuple[np.ndarray, np.ndarray]


def checked(loaded: Any, name: str) -> tuple[Arrays, Arrays, int]:
    """((train images, train labels), (test images, test labels), number of classes).

    Args:
      loaded: what `load` returned.
      name: of the data set, for errors.

    Raises:
      InputError: it is not two pairs of arrays; images and labels differ in number or shape; a part is
        empty; labels are no whole numbers from 0, or a test label does not occur in training.
    """
    try:
        (train_images, train_labels), (test_images, test_labels) = loaded
    except (TypeError, ValueError):
        raise InputError(
            f"dataset {name!r} returned {type(loaded).__name__}, but must return "
            "(train_images, train_labels), (test_images, test_labels)."
        ) from None
    train = _pair(train_images, train_labels, f"dataset {name!r}, training part")
    test = _pair(test_images, test_labels, f"dataset {name!r}, test part")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise InputError(
            f"dataset {name!r}: training images have shape {train[0].shape[1:]} and test images {test[0].shape[1:]}."
        )
    num_classes = int(train[1].max()) + 1
    if test[1].max() >= num_classes:
        raise InputError(
            f"dataset {name!r}: the test label {test[1].max()} is larger than every training label "
            f"(up to {num_classes - 1})."
        )
    return train, test, num_classes


def _pair(images: Any, labels: Any, part: str) -> Arrays:
    images, labels = np.asarray(images), np.asarray(labels)
    if images.dtype.kind not in "uifb" or images.ndim < 2:
        raise InputError(f"{part}: images are {_what(images)}, but must be numbers of shape (n, ...).")
    if labels.dtype.kind not in "ui" or labels.ndim != 1:
        raise InputError(f"{part}: labels are {_what(labels)}, but must be whole numbers of shape (n,).")
    if len(images) != len(labels) or not len(images):
        raise InputError(f"{part}: there are {len(images)} images and {len(labels)} labels.")
    if labels.min() < 0:
        raise InputError(f"{part}: the label {labels.min()} is below 0.")
    return images, labels


def _what(array: np.ndarray) -> str:
    return f"{array.dtype} of shape {array.shape}"
