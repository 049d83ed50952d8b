"""Fashion-MNIST: the packaged images, and the reader of the published files with each fault of theirs."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from one_sentence import refusal

from tf_largebatch.datasets import fashion_mnist

NAMES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}
IMAGES, LABELS = NAMES["train", "images"], NAMES["train", "labels"]


def idx(array: np.ndarray, magic: bytes = b"\0\0\x08") -> bytes:
    """An IDX file of bytes, as its published description has it."""
    return magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "images": draw.integers(0, 256, (count, 28, 28), dtype=np.uint8),
        "labels": draw.integers(0, 10, count, dtype=np.uint8),
    }


CONTENT = {"train": examples(12, seed=1), "test": examples(5, seed=2)}


@pytest.fixture
def folder(tmp_path):
    for (part, kind), name in NAMES.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(CONTENT[part][kind]), mtime=0))
    return tmp_path


def put(folder, name: str, content: bytes) -> None:
    """Replaces a file by an unpacked one."""
    (folder / f"{name}.gz").unlink(missing_ok=True)
    (folder / name).write_bytes(content)


def assert_read(folder) -> None:
    for part, (images, labels) in zip(("train", "test"), fashion_mnist.load(folder=str(folder))):
        assert images.dtype == labels.dtype == np.uint8
        np.testing.assert_array_equal(images, CONTENT[part]["images"][..., None])
        np.testing.assert_array_equal(labels, CONTENT[part]["labels"])


def test_the_packaged_images_are_balanced_and_the_test_images_new():
    train, test = fashion_mnist.load()
    for (images, labels), each in ((train, 1000), (test, 200)):
        assert images.shape == (10 * each, 28, 28, 1) and labels.shape == (10 * each,)
        assert images.dtype == labels.dtype == np.uint8
        np.testing.assert_array_equal(np.bincount(labels), [each] * 10)
        # Bytes over their whole range: not scaled, not cut.
        assert images.min() == 0 and images.max() == 255
    seen = {image.tobytes() for image in train[0]}
    assert len(seen) == 10_000
    assert not any(image.tobytes() in seen for image in test[0])
    assert fashion_mnist.num_examples() == 10_000


def test_a_folder_as_published_is_read(folder):
    assert_read(folder)
    assert fashion_mnist.num_examples(folder=str(folder)) == 12
    # A folder says more than a source.
    assert fashion_mnist.num_examples("keras", str(folder)) == 12


def test_an_unpacked_folder_is_read(folder):
    for (part, kind), name in NAMES.items():
        put(folder, name, idx(CONTENT[part][kind]))
    assert_read(folder)


def test_a_folder_may_be_given_from_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert_read(f"~/{folder.name}")


def test_keras_tells_the_number_of_images_only_by_fetching():
    assert fashion_mnist.num_examples("keras") is None


def test_another_source_is_refused():
    assert "source is 'kears', but must be 'packaged' or 'keras'" in refusal(fashion_mnist.load, "kears")


def test_a_missing_folder_is_refused(tmp_path):
    assert f"there is no folder {str(tmp_path / 'nowhere')!r}" in refusal(
        fashion_mnist.load, folder=str(tmp_path / "nowhere")
    )


@pytest.mark.parametrize("name", NAMES.values())
def test_a_missing_file_is_named(name, folder):
    (folder / f"{name}.gz").unlink()
    sentence = refusal(fashion_mnist.load, folder=str(folder))
    assert f"{str(folder)!r} has no file {name}.gz" in sentence
    assert refusal(fashion_mnist.num_examples, folder=str(folder)) == sentence


GOOD = idx(CONTENT["train"]["images"])
# Without the time: the parameters below must be the same in every process of pytest-xdist.
PACKED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PACKED[:-100], "truncated or corrupt"),
        # Only the checksum at the end is gone, or only it tells.
        (PACKED[:-4], "truncated or corrupt"),
        (PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "truncated or corrupt"),
        (PACKED[:5], "truncated or corrupt"),
        # A block of a kind that there is not, right after the header.
        (PACKED[:10] + b"\xff" + PACKED[11:], "truncated or corrupt"),
        (PACKED[:40] + bytes([PACKED[40] ^ 255]) + PACKED[41:], "truncated or corrupt"),
        (GOOD, "truncated or corrupt"),
        (b"<html>not found</html>", "truncated or corrupt"),
        (b"", "not an IDX file of bytes with 3 axes"),
    ],
)
def test_a_damaged_packed_file_is_named(content, said, folder):
    path = folder / f"{IMAGES}.gz"
    path.write_bytes(content)
    sentence = refusal(fashion_mnist.load, folder=str(folder))
    assert sentence.startswith(f"{path}: ") and said in sentence


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an IDX file of bytes with 3 axes"),
        (GOOD[:-1], "(12, 28, 28), which is 9408 bytes, but 9407 follow"),
        (GOOD + b"\0", "(12, 28, 28), which is 9408 bytes, but 9409 follow"),
        (GOOD[:16], "which is 9408 bytes, but 0 follow"),
        (GOOD[:15], "truncated within its header"),
        (GOOD[:4], "truncated within its header"),
        # A header that asks for 2**96 bytes must not be obeyed.
        (GOOD[:4] + b"\xff" * 12, "but 0 follow"),
        (PACKED, "not an IDX file of bytes with 3 axes"),
        (idx(CONTENT["train"]["images"], magic=b"\0\0\x0d"), "not an IDX file of bytes with 3 axes"),
        (idx(CONTENT["train"]["images"], magic=b"\1\0\x08"), "not an IDX file of bytes with 3 axes"),
        (idx(CONTENT["train"]["labels"]), "not an IDX file of bytes with 3 axes"),
        (idx(CONTENT["train"]["images"][..., None]), "not an IDX file of bytes with 3 axes"),
    ],
)
def test_a_damaged_unpacked_file_is_named(content, said, folder):
    put(folder, IMAGES, content)
    sentence = refusal(fashion_mnist.load, folder=str(folder))
    assert sentence.startswith(f"{folder / IMAGES}: ") and said in sentence


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        # A label of no class; one label too few; one image too few; another size; nothing at all.
        (CONTENT["train"]["images"], np.full(12, 10, np.uint8)),
        (CONTENT["train"]["images"], CONTENT["train"]["labels"][:-1]),
        (CONTENT["train"]["images"][:-1], CONTENT["train"]["labels"]),
        (CONTENT["train"]["images"][:, 1:], CONTENT["train"]["labels"]),
        (CONTENT["train"]["images"][:0], CONTENT["train"]["labels"][:0]),
    ],
)
def test_images_and_labels_that_do_not_belong_together_are_refused(images, labels, folder):
    put(folder, IMAGES, idx(images))
    put(folder, LABELS, idx(labels))
    sentence = refusal(fashion_mnist.load, folder=str(folder))
    assert IMAGES in sentence and LABELS in sentence and str(folder) in sentence
    assert f"{images.shape}" in sentence and f"{labels.shape}" in sentence
