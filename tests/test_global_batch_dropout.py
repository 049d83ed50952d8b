"""Dropout by position in the global batch: against Philox in NumPy, statistics, replicas and micro-batches.

Run as a program, it compares one replica and two of this process, whose devices are fixed at the start.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import python

from tf_largebatch import GlobalBatchDropout
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import global_batch, strategies
from tf_largebatch.validation import InputError


def philox(counter, key):
    """Philox4x32-10 as in Salmon et al. 2011: arrays of four and two 32-bit words, the lowest first."""
    c, k = ([np.asarray(word, np.uint64) for word in words] for words in (counter, key))
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> half) ^ c[1] ^ k[0], second & low, (first >> half) ^ c[3] ^ k[1], first & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(np.broadcast_arrays(*c), axis=-1).astype(np.uint32)


def twin(examples, values, rate, seed, step):
    """Which of `values` numbers an example are kept, for the examples with these positions: [examples, values]."""
    blocks = -(-values // 4)
    place = np.asarray(examples)[:, None] * blocks + np.arange(blocks)
    words = philox([place % 2**32, place >> 32, step % 2**32, step >> 32], [seed, 0]).reshape(len(examples), -1)
    return words[:, :values] / 2**32 >= rate


def dropped(layer, x, step, first_example):
    with global_batch.at(tf.constant(step, tf.int64), tf.constant(first_example, tf.int64)):
        return np.asarray(layer(x, training=True))


def test_twin_gives_the_published_words():
    # kat_vectors of Random123: all words 0, and all words of ones.
    assert [f"{word:08x}" for word in philox([0] * 4, [0] * 2)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = philox([2**32 - 1] * 4, [2**32 - 1] * 2)
    assert [f"{word:08x}" for word in ones] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 8), (6, 1), (6,)])
@pytest.mark.parametrize(("seed", "step", "first"), [(3, 0, 0), (2**32 - 1, 2**40 + 1, 2**33 + 7)])
def test_masks_are_those_of_philox(shape, seed, step, first):
    layer = GlobalBatchDropout(0.4, seed=seed)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    kept = twin(first + np.arange(6), int(np.prod(shape[1:])), 0.4, seed, step).reshape(shape)
    outputs = dropped(layer, x, step, first)
    np.testing.assert_allclose(outputs, np.where(kept, x / 0.6, 0), rtol=1e-6)
    # Any part of the global batch, compiled or not, and with shapes that are not known before.
    for jit_compile in (False, True):
        signature = None if jit_compile else [tf.TensorSpec([None] * len(shape)), tf.TensorSpec([], tf.int64)]

        @tf.function(jit_compile=jit_compile, input_signature=signature)
        def part(x, first_example):
            with global_batch.at(tf.constant(step, tf.int64), first_example):
                return layer(x, training=True)

        np.testing.assert_allclose(part(x[1:4], tf.constant(first + 1, tf.int64)), outputs[1:4], rtol=1e-6)
    assert int(layer.step) == 0


@pytest.mark.parametrize(("policy", "dtype"), [("float64", "float64"), ("mixed_bfloat16", "bfloat16")])
def test_precision_leaves_the_mask_alone(policy, dtype):
    x = np.ones((8, 20), np.float32)
    expected = dropped(GlobalBatchDropout(0.3, seed=1), x, 2, 3)
    outputs = dropped(GlobalBatchDropout(0.3, seed=1, dtype=policy), x, 2, 3)
    assert outputs.dtype.name == dtype
    np.testing.assert_allclose(outputs.astype(np.float64), expected, rtol=2.0**-8)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_fraction_kept(rate):
    count = 200_000
    outputs = dropped(GlobalBatchDropout(rate, seed=5), np.ones((100, count // 100), np.float32), 0, 0)
    kept = np.count_nonzero(outputs)
    # Five standard deviations of a binomial distribution.
    assert abs(kept - count * (1 - rate)) < 5 * np.sqrt(count * rate * (1 - rate))
    np.testing.assert_allclose(outputs[outputs != 0], 1 / (1 - rate), rtol=1e-6)
    assert abs(outputs.mean() - 1) < 5 * np.sqrt(rate / (1 - rate) / count)


def test_masks_are_independent():
    rate, count = 0.3, 40_000
    ones = np.ones((2, count), np.float32)
    first, second = GlobalBatchDropout(rate, seed=1), GlobalBatchDropout(rate, seed=2)
    masks = [dropped(layer, ones, step, 0) != 0 for layer, step in ((first, 0), (first, 1), (second, 0), (second, 1))]
    masks = np.concatenate(masks)
    # Of examples, steps and layers: two masks agree where both keep or both drop a value.
    agree = rate**2 + (1 - rate) ** 2
    bound = 5 * np.sqrt(count * agree * (1 - agree))
    for i in range(len(masks)):
        for j in range(i):
            assert abs(np.count_nonzero(masks[i] == masks[j]) - count * agree) < bound


def test_counts_steps_of_its_own():
    layer, x = GlobalBatchDropout(0.5, seed=4), np.ones((3, 9), np.float32)
    for step in range(3):
        outputs = np.asarray(layer(x, training=True))
        np.testing.assert_array_equal(outputs != 0, twin(range(3), 9, 0.5, 4, step))
        assert int(layer.step) == step + 1
    # Neither inference nor a step that knows its position counts.
    np.testing.assert_array_equal(layer(x), x)
    np.testing.assert_array_equal(layer(x, training=False), x)
    dropped(layer, x, 8, 0)
    assert int(layer.step) == 3
    np.testing.assert_array_equal(GlobalBatchDropout(0)(x, training=True), x)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dropout, self.dense = GlobalBatchDropout(0.5, seed=4), keras.layers.Dense(1)

    def call(self, inputs, training=None):
        return self.dense(self.dropout(inputs, training=training))


@pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed"])
def test_trains_in_keras_models(kind):
    x, y = np.random.default_rng(0).normal(size=(8, 6)), np.ones((8, 1))
    model = Subclassed()
    if kind == "sequential":
        model = keras.Sequential([keras.Input((6,)), model.dropout, model.dense])
    elif kind == "functional":
        inputs = keras.Input((6,))
        model = keras.Model(inputs, model.dense(model.dropout(inputs)))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    layer, dense = model.layers[-2:]
    assert int(layer.step) == 2
    dense.set_weights([np.zeros((6, 1)), np.zeros(1)])
    model.fit(x[:4], y[:4], batch_size=4, epochs=1, shuffle=False, verbose=0)
    # From zero weights the mean of 2 (prediction - 1) x over the batch, with the third mask.
    masked = np.where(twin(range(4), 6, 0.5, 4, 2), 2 * x[:4], 0)
    np.testing.assert_allclose(dense.get_weights()[0], 2 * masked.mean(0)[:, None], rtol=1e-5, atol=1e-6)


def test_saved_model_goes_on_in_a_fresh_process(tmp_path):
    model = keras.Sequential([keras.Input((6,)), GlobalBatchDropout(0.5)])
    x = np.ones((4, 6), np.float32)
    model(x, training=True)
    model.save(str(tmp_path / "model.keras"))
    np.savez(tmp_path / "expected.npz", model(x, training=True))
    code = f"""
from tf_largebatch import LARS  # one name brings the others
import numpy as np
from tensorflow import keras
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
assert type(model.layers[-1]).__name__ == "GlobalBatchDropout" and int(model.layers[-1].step) == 1
expected = np.load({str(tmp_path / "expected.npz")!r})["arr_0"]
np.testing.assert_array_equal(model(np.ones((4, 6), np.float32), training=True), expected)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    config = model.layers[-1].get_config()
    assert GlobalBatchDropout.from_config(config).get_config() == config


def test_seeds():
    seeds = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        seeds.append([GlobalBatchDropout(0.5).seed for _ in range(2)])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.0}, "GlobalBatchDropout: rate is 1.0, but must be less than 1"),
        ({"rate": -0.1}, "rate is -0.1, but must be at least 0"),
        ({"rate": "half"}, "rate is 'half', but must be a number"),
        ({"rate": 0.5, "seed": -1}, "seed is -1, but must be at least 0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(InputError, match=message):
        GlobalBatchDropout(**options)


def test_replicas_and_micro_batches_as_one():
    done = python(__file__)
    assert done.returncode == 0, done.stderr


def kept_in_two_steps(strategy, micro_batches):
    """Masks of a global batch of 8 examples, of all replicas; 0 micro-batches: the layer counts by itself."""
    share = 8 // strategy.num_replicas_in_sync
    with strategy.scope():
        layer = GlobalBatchDropout(0.5, seed=3)
        layer.build((None, 6))

    def of_replica(step):
        if not micro_batches:
            return layer(tf.ones((share, 6)), training=True)
        first = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group * share, tf.int64)

        def of_micro_batch(number):
            with global_batch.at(step, first + number * (share // micro_batches)):
                return layer(tf.ones((share // micro_batches, 6)), training=True)

        parts = tf.map_fn(of_micro_batch, tf.range(micro_batches, dtype=tf.int64), fn_output_signature=tf.float32)
        return tf.reshape(parts, [share, 6])

    @tf.function
    def one_step(step):
        return strategy.run(of_replica, args=(step,))

    steps = [strategy.experimental_local_results(one_step(tf.constant(step, tf.int64))) for step in range(2)]
    return np.stack([np.concatenate(replicas) for replicas in steps]) != 0


def compare_replicas():
    strategies.set_logical_cpus(2)
    one, two = tf.distribute.OneDeviceStrategy("/CPU:0"), tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    expected = np.stack([twin(range(8), 6, 0.5, 3, step) for step in range(2)])
    for strategy in (one, two):
        for micro_batches in (0, 1, 2, 4):
            np.testing.assert_array_equal(kept_in_two_steps(strategy, micro_batches), expected)


if __name__ == "__main__":
    compare_replicas()
