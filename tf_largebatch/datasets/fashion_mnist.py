"""Fashion-MNIST: 28x28 grey images of ten kinds of clothing.

A class-balanced part, 10,000 training and 2,000 test images, comes with the package, so that a
first run needs no network. The whole set, 60,000 and 10,000, is read from a folder of the four
published IDX files, or fetched by Keras. Labels: 0 T-shirt, 1 trouser, 2 pullover, 3 dress, 4 coat,
5 sandal, 6 shirt, 7 sneaker, 8 bag, 9 ankle boot.

Source: Zalando SE, https://github.com/zalandoresearch/fashion-mnist, MIT licence (its notice is
beside the packaged images).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from tf_largebatch.validation import InputError

Arrays = tuple[np.ndarray, np.ndarray]

PACKAGED = Path(__file__).with_name("fashion_mnist_subset.npz")
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load(source: Literal["packaged", "keras"] = "packaged", folder: str | None = None) -> tuple[Arrays, Arrays]:
    """Reads the images.

    Args:
      source: "packaged", the part that comes with the package, or "keras", the whole set through
        `keras.datasets`, which keeps it in a cache in the home folder. `folder` overrides it.
      folder: a folder with the four IDX files of the whole set, as published (`.gz`) or unpacked.

    Returns:
      (train images, train labels), (test images, test labels): uint8 (n, 28, 28, 1) and uint8 (n,).

    Raises:
      InputError: no such source; a file is missing, truncated or not what its name says; no network
        for "keras".
    """
    if folder is not None:
        return _from_folder(Path(folder).expanduser(), "train"), _from_folder(Path(folder).expanduser(), "test")
    if source == "keras":
        return _from_keras()
    if source != "packaged":
        raise InputError(f"dataset_options.source is {source!r}, but must be 'packaged' or 'keras'.")
    with np.load(PACKAGED) as arrays:
        return (
            (arrays["train_images"][..., None], arrays["train_labels"]),
            (arrays["test_images"][..., None], arrays["test_labels"]),
        )


def num_examples(source: Literal["packaged", "keras"] = "packaged", folder: str | None = None) -> int | None:
    """Number of training images, without TensorFlow; raises what `load` would.

    None with source "keras", where only the fetch itself can tell.
    """
    if source == "keras" and folder is None:
        return None
    (images, _), _ = load(source, folder)
    return len(images)


def _from_folder(folder: Path, part: str) -> Arrays:
    if not folder.is_dir():
        raise InputError(f"dataset_options.folder: there is no folder {str(folder)!r}.")
    images_name, labels_name = _FILES[part]
    images = read_idx(_published(folder, images_name), axes=3)
    labels = read_idx(_published(folder, labels_name), axes=1)
    if images.shape[1:] != (28, 28) or len(images) != len(labels) or not len(labels) or labels.max() > 9:
        raise InputError(
            f"{folder}: {images_name} has shape {images.shape} and {labels_name} {labels.shape} with labels up to "
            f"{labels.max(initial=0)}; expected (n, 28, 28) and (n,) with labels 0 to 9."
        )
    return images[..., None], labels


def _published(folder: Path, name: str) -> Path:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    raise InputError(f"dataset_options.folder: {str(folder)!r} has no file {name}.gz (nor {name}).")


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The array of bytes in an IDX file: magic 0 0 8 axes, one big-endian uint32 an axis, the bytes.

    Raises:
      InputError: the file is truncated, longer than it says, or of another kind.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as failure:
        raise InputError(f"{path}: the file is truncated or corrupt ({failure}); fetch it again.") from None
    except OSError as failure:
        raise InputError(f"{path}: cannot be read: {failure.strerror}.") from None
    if content[:4] != bytes([0, 0, 8, axes]):
        raise InputError(f"{path}: not an IDX file of bytes with {axes} axes (it begins with {content[:4]!r}).")
    start = 4 + 4 * axes
    if len(content) < start:
        raise InputError(f"{path}: the file is truncated within its header; fetch it again.")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise InputError(
            f"{path}: the file is truncated or corrupt: its header says {shape}, which is {math.prod(shape)} bytes, "
            f"but {len(content) - start} follow; fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _from_keras() -> tuple[Arrays, Arrays]:
    from tf_largebatch._keras import keras

    try:
        (train_images, train_labels), (test_images, test_labels) = keras.datasets.fashion_mnist.load_data()
    except Exception as failure:  # Keras raises a bare Exception where it cannot fetch
        raise InputError(
            f"dataset_options.source: Keras could not fetch Fashion-MNIST ({failure}); "
            "use source 'packaged' or give dataset_options.folder."
        ) from failure
    return (train_images[..., None], train_labels), (test_images[..., None], test_labels)
