"""The stream rule: global batch k holds the same examples on any cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tf_largebatch.datasets import batches
from tf_largebatch.distribution.batch_split import split

EXAMPLES = np.arange(103)


def global_batches(global_batch_size, workers, devices, epochs=2, seed=7, limit=None):
    """What all workers together read, as one array a global batch, replicas in order."""
    cut = split(global_batch_size, workers, devices, limit)
    steps = epochs * (len(EXAMPLES) // global_batch_size)
    streams = []
    for rank in range(workers):
        stream = batches.training_batches(EXAMPLES, EXAMPLES, cut, rank, epochs, seed).take(steps * devices)
        streams.append([x.numpy() for x, _ in stream])
    # Whole shares: the training step cuts them into micro-batches.
    assert all(part.shape == (global_batch_size // (workers * devices),) for stream in streams for part in stream)
    return [
        np.concatenate([part for stream in streams for part in stream[k * devices : (k + 1) * devices]])
        for k in range(steps)
    ]


@pytest.mark.parametrize(
    ("workers", "devices", "limit"),
    [(1, 2, None), (2, 1, None), (2, 2, None), (4, 1, None), (1, 8, None), (1, 1, 5), (2, 1, 4), (2, 2, 3)],
)
def test_global_batches_do_not_depend_on_the_cluster(workers, devices, limit):
    one = global_batches(16, 1, 1)
    many = global_batches(16, workers, devices, limit=limit)
    assert (split(16, workers, devices, limit).micro_batches > 1) == bool(limit)
    assert len(one) == len(many) == 2 * (len(EXAMPLES) // 16)
    for a, b in zip(one, many):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_holds_no_example_twice_and_the_next_is_another_order():
    stream = np.concatenate(global_batches(16, 1, 1))
    first, second = np.split(stream, 2)
    assert len(set(first)) == len(first) == 96
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.sort(first))


def test_training_begins_again_after_its_epochs():
    stream = batches.training_batches(EXAMPLES, EXAMPLES, split(16, 1, 2), 0, epochs=2, seed=0)
    # Two epochs of six global batches, of which this worker's replicas get two elements each.
    once, again = np.split(np.stack([x.numpy() for x, _ in stream.take(2 * 2 * 6 * 2)]), 2)
    np.testing.assert_array_equal(once, again)


def test_seed_decides_the_order():
    same = [np.concatenate(global_batches(16, 1, 1, seed=3)) for _ in range(2)]
    other = np.concatenate(global_batches(16, 1, 1, seed=4))
    np.testing.assert_array_equal(*same)
    assert not np.array_equal(same[0], other)


def test_order_is_a_contract():
    # A recipe's result must not depend on the version of TensorFlow: this permutation came out of
    # 2.15.1 and of 2.21.0, and a change of it would make old and new results incomparable.
    order, _ = next(iter(batches.training_batches(np.arange(8), np.arange(8), split(8), 0, epochs=1, seed=0)))
    assert order.numpy().tolist() == [6, 4, 1, 0, 3, 2, 5, 7]


def test_images_stay_with_their_labels():
    images = np.arange(60, dtype=np.uint8).reshape(20, 3)
    for x, y in batches.training_batches(images, np.arange(20), split(4), 0, 1, 0).take(5):
        np.testing.assert_array_equal(x, images[y.numpy()])
        assert x.dtype == np.uint8


@pytest.mark.parametrize("size", [4, 16, 64, 103, 128])
@pytest.mark.parametrize(("workers", "devices", "limit"), [(1, 1, None), (2, 1, None), (2, 2, None), (2, 2, 8)])
def test_evaluation_holds_every_example_once_with_equal_weight(size, workers, devices, limit):
    cut = split(math.ceil(size / 4) * 4, workers, devices, limit)
    steps = batches.evaluation_steps(len(EXAMPLES), cut)
    seen, total = [], 0
    for rank in range(workers):
        stream = batches.evaluation_batches(EXAMPLES, EXAMPLES, cut, rank).take(steps * devices)
        parts = list(stream)
        assert len(parts) == steps * devices
        assert len({len(x) for x, _, _ in parts}) == 1, "shapes are static"
        assert len(parts[0][0]) <= min(cut.per_replica_batch_size, limit or math.inf)
        for x, _, weight in parts:
            seen.extend(x.numpy()[weight.numpy() > 0])
            total += len(x)
            # A mean over all positions is then the mean over the examples.
            assert set(np.round(weight.numpy()[weight.numpy() > 0] / weight.numpy().max(initial=1), 6)) <= {1.0}
    assert sorted(seen) == EXAMPLES.tolist()
    weights = next(iter(batches.evaluation_batches(EXAMPLES, EXAMPLES, cut, 0)))[2].numpy()
    assert weights.max() == pytest.approx(total / len(EXAMPLES))


def test_evaluation_begins_again_after_its_steps():
    cut = split(64)
    steps = batches.evaluation_steps(len(EXAMPLES), cut)
    stream = [x.numpy() for x, _, _ in batches.evaluation_batches(EXAMPLES, EXAMPLES, cut, 0).take(steps + 1)]
    np.testing.assert_array_equal(stream[0], stream[steps])


def test_a_small_data_set_is_not_filled_up_to_a_large_batch():
    assert next(iter(batches.evaluation_batches(np.arange(10), np.arange(10), split(32_768, 2, 2), 0)))[0].shape == (3,)
