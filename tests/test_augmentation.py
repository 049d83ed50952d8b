"""Augmentation against every copy it may make, and on several cuts of the same global batches."""

from __future__ import annotations

import itertools
import typing

import numpy as np
import pytest
from one_sentence import refusal

from tf_largebatch import config
from tf_largebatch._keras import tf
from tf_largebatch.datasets import augmentation, batches
from tf_largebatch.distribution.batch_split import split

PIXELS = 4
# No pixel is 0 and no two are alike, so that a copy tells how it was made.
IMAGE = np.random.default_rng(0).permutation(np.arange(1, 61, dtype=np.uint8)).reshape(5, 6, 2)


def copies(image: np.ndarray) -> dict[tuple[int, int, int], np.ndarray]:
    """{(flipped, rows down, columns right): copy}, pixel by pixel."""
    height, width = image.shape[:2]
    found = {}
    shifts = range(-PIXELS, PIXELS + 1)
    for flipped, down, right in itertools.product((0, 1), shifts, shifts):
        copy = np.zeros_like(image)
        for row, column in itertools.product(range(height), range(width)):
            if 0 <= row + down < height and 0 <= column + right < width:
                copy[row + down, column + right] = image[row, width - 1 - column if flipped else column]
        found[flipped, down, right] = copy
    return found


HOW = {copy.tobytes(): how for how, copy in copies(IMAGE).items()}


def how_changed(seeds: tf.Tensor) -> list[tuple[int, int, int]]:
    """What each seed does to IMAGE; a KeyError if that is none of the copies."""
    change = tf.function(lambda images, seeds: augmentation.augmented("flip_and_shift", images, seeds))
    changed = change(tf.constant(np.stack([IMAGE] * len(seeds))), seeds).numpy()
    return [HOW[image.tobytes()] for image in changed]


def seeds_of(seed: int, epoch: int, num_examples: int) -> tf.Tensor:
    return augmentation.seeds(seed, tf.constant(epoch, tf.int64), num_examples)


def test_every_copy_is_equally_likely():
    drawn = how_changed(seeds_of(0, 0, 10 * len(HOW)))
    expected = len(drawn) / len(HOW)
    # Pearson's statistic has as its mean, and as half its variance, the degrees of freedom.
    statistic = sum((drawn.count(how) - expected) ** 2 / expected for how in HOW.values())
    freedom = len(HOW) - 1
    assert freedom == 2 * 9 * 9 - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def test_what_a_seed_does_is_a_contract():
    # The same on TensorFlow 2.15.1 and 2.21.0; a change would make old and new results incomparable.
    expected = [(1, 3, 2), (0, 4, -3), (0, -3, -4), (0, 2, -4), (0, 4, 1), (1, -4, -3)]
    assert how_changed(seeds_of(0, 0, 6)) == expected


def test_one_image_of_any_type():
    seed = seeds_of(3, 1, 1)
    (how,) = how_changed(seed)
    for dtype in ("bool", "uint8", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"):
        image = (IMAGE > 30 if dtype == "bool" else IMAGE).astype(dtype)
        changed = augmentation.flip_and_shift(tf.constant(image), seed[0])
        assert changed.shape == image.shape and changed.dtype == dtype
        np.testing.assert_array_equal(changed, copies(image)[how])


def test_seeds_differ_between_examples_epochs_and_recipes():
    drawn = [seeds_of(seed, epoch, 50).numpy() for seed, epoch in itertools.product((0, 1, 2**32 - 1), (0, 1, 2))]
    assert len({tuple(row) for row in np.concatenate(drawn)}) == 9 * 50


IMAGES = np.random.default_rng(1).integers(0, 256, (21, 6, 5, 1), dtype=np.uint8)


def stream(global_batch_size, workers=1, devices=1, limit=None, name="flip_and_shift", seed=7, epochs=2):
    """(images, positions in IMAGES) of all global batches, put together from what all workers read."""
    cut = split(global_batch_size, workers, devices, limit)
    steps = epochs * (len(IMAGES) // global_batch_size)
    parts = []
    for rank in range(workers):
        own = batches.training_batches(IMAGES, np.arange(len(IMAGES)), cut, rank, epochs, seed, name)
        parts.append(list(own.take(steps * devices)))
    in_order = [part for step in range(steps) for own in parts for part in own[step * devices : (step + 1) * devices]]
    assert all(x.shape == (cut.share, 6, 5, 1) and x.dtype == tf.uint8 for x, _ in in_order)
    return tuple(np.concatenate([part[i] for part in in_order]) for i in (0, 1))


@pytest.mark.parametrize(("workers", "devices", "limit"), [(1, 1, 3), (2, 1, None), (2, 2, None), (2, 2, 1)])
def test_pixels_do_not_depend_on_the_cluster(workers, devices, limit):
    for ours, alone in zip(stream(8, workers, devices, limit), stream(8)):
        np.testing.assert_array_equal(ours, alone)


def by_position(images, positions):
    """{position in IMAGES: pixels} of each of two epochs."""
    epochs = zip(np.split(positions, 2), np.split(images, 2))
    return [{position: image.tobytes() for position, image in zip(*epoch)} for epoch in epochs]


def test_pixels_depend_on_seed_epoch_and_example_alone():
    first, second = by_position(*stream(8))
    in_other_batches = by_position(*stream(4))
    with_other_seed, _ = by_position(*stream(8, seed=8))

    def alike(ours, others):
        both = set(ours) & set(others)
        assert len(both) > 8, "each epoch leaves some out"
        return sum(ours[position] == others[position] for position in both) / len(both)

    assert alike(first, in_other_batches[0]) == alike(second, in_other_batches[1]) == 1
    # By chance, one in 162.
    assert alike(first, second) < 0.2 and alike(first, with_other_seed) < 0.2


def test_each_image_of_a_batch_is_a_copy_of_its_own():
    for image, position in zip(*stream(8)):
        assert image.tobytes() in {copy.tobytes() for copy in copies(IMAGES[position]).values()}


def test_none_leaves_everything_as_it_was():
    plain, order = stream(8, name="none")
    np.testing.assert_array_equal(plain, IMAGES[order])
    changed, same_order = stream(8)
    np.testing.assert_array_equal(order, same_order)
    assert not np.array_equal(changed, plain)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("flip_and_shift", (28, 28), "which works on images of shape (height, width, channels), but the data set's"),
        ("flip_and_shift", (6,), "have shape (6,); use 'none'"),
        ("flip_and_shfit", (28, 28, 1), "unknown augmentation 'flip_and_shfit' (did you mean 'flip_and_shift'?)"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(name, shape, said):
    assert said in refusal(augmentation.check, name, shape)
    data = np.zeros((4, *shape), np.uint8)
    assert said in refusal(batches.training_batches, data, np.arange(4), split(4), 0, 1, 0, name)


@pytest.mark.parametrize("shape", [(6,), (28, 28), (28, 28, 1), (3, 8, 8, 1)])
def test_none_fits_everything(shape):
    augmentation.check("none", shape)


def test_recipes_may_name_them_all():
    allowed = typing.get_args(typing.get_type_hints(config.Recipe)["augmentation"])
    assert allowed == ("none", *augmentation.AUGMENTATIONS)
