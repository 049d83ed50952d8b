"""Batch normalisation in groups: against NumPy, Keras's layer on each group, and replicas.

Run as a program, it compares one replica and two of this process, whose devices are fixed at the start.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import python

from tf_largebatch import GhostBatchNormalization
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import strategies
from tf_largebatch.validation import InputError

MOMENTUM, EPSILON = 0.8, 0.01
draw = np.random.default_rng(0)


def twin(x, group_size, channel):
    """(x normalised in groups, mean of the groups' means, mean of their biased variances), in float64."""
    groups = np.asarray(x, np.float64).reshape(-1, group_size, *x.shape[1:])
    axes = tuple(axis for axis in range(1, groups.ndim) if axis != channel + 1)
    mean, variance = groups.mean(axes, keepdims=True), groups.var(axes, keepdims=True)
    y = (groups - mean) / np.sqrt(variance + EPSILON)
    return y.reshape(x.shape), mean.mean(0).ravel(), variance.mean(0).ravel()


def layer_for(shape, group_size=None, axis=-1, dtype="float64", cls=GhostBatchNormalization, **options):
    """A built layer with random gamma, beta and moving statistics, the same for equal numbers of channels."""
    if cls is GhostBatchNormalization:
        options["group_size"] = group_size
    layer = cls(axis=axis, momentum=MOMENTUM, epsilon=EPSILON, dtype=dtype, **options)
    layer.build((None, *shape[1:]))
    values = np.random.default_rng(1)
    layer.set_weights([values.uniform(0.5, 2.0, weight.shape) for weight in layer.get_weights()])
    return layer


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("shape", "group_size", "axis"),
    [((6, 5), 3, -1), ((6, 5), None, 1), ((8, 3, 4, 2), 2, -1), ((8, 2, 3, 4), 4, 1), ((4, 3, 2, 2, 3), 4, 2)],
)
def test_outputs_and_moving_statistics(shape, group_size, axis):
    layer = layer_for(shape, group_size, axis)
    assert [weight.name.split(":")[0] for weight in layer.weights] == [
        "gamma",
        "beta",
        "moving_mean",
        "moving_variance",
    ]
    gamma, beta, mean, variance = layer.get_weights()
    along = [1] * len(shape)
    along[axis] = -1
    for _ in range(2):
        x = draw.normal(3.0, 2.0, shape)
        y, group_mean, group_variance = twin(x, group_size or len(x), axis % len(shape))
        expected = y * gamma.reshape(along) + beta.reshape(along)
        np.testing.assert_allclose(layer(x, training=True), expected, rtol=1e-10, atol=1e-12)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * group_mean
        variance = MOMENTUM * variance + (1 - MOMENTUM) * group_variance
    np.testing.assert_allclose(layer.get_weights()[2:], [mean, variance], rtol=1e-12)


@pytest.mark.parametrize("axis", [1, -1])
def test_gradients_are_those_of_keras_on_each_group(axis):
    x, weights = draw.normal(size=(6, 2, 3, 2)), draw.normal(size=(6, 2, 3, 2))
    gradients = []
    stock = layer_for(x.shape, axis=axis, cls=keras.layers.BatchNormalization)
    for layer, cuts in ((layer_for(x.shape, 2, axis), [6]), (stock, [2, 4, 6])):
        inputs = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = tf.concat([layer(inputs[max(end - cuts[0], 0) : end], training=True) for end in cuts], axis=0)
            loss = tf.reduce_sum(tf.sin(outputs) * weights)
        gradients.append(tape.gradient(loss, [inputs, *layer.trainable_variables]))
    for ours, theirs in zip(*gradients):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_as_keras_without_groups_and_in_inference():
    x = draw.normal(1.0, 2.0, (6, 3, 3, 4)).astype(np.float32)
    stock = layer_for(x.shape, dtype="float32", cls=keras.layers.BatchNormalization)
    ours, grouped, frozen = (
        layer_for(x.shape, group_size, dtype="float32", trainable=trainable)
        for group_size, trainable in ((None, True), (4, True), (4, False))
    )
    before = stock.get_weights()
    for outputs in (ours(x), grouped(x, training=False), frozen(x, training=True)):
        np.testing.assert_allclose(outputs, stock(x), rtol=1e-6, atol=1e-6)
    for layer in (ours, grouped, frozen):
        np.testing.assert_array_equal(layer.get_weights(), before)
    np.testing.assert_allclose(ours(x, training=True), stock(x, training=True), rtol=1e-5, atol=1e-5)


def test_shapes_that_are_not_known():
    layer, x = layer_for((None, 3, 3, 2), 2), draw.normal(size=(6, 3, 3, 2))
    y = twin(x, 2, 3)[0] * layer.get_weights()[0] + layer.get_weights()[1]

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3, 2], tf.float64)])
    def unknown(inputs):
        outputs = layer(inputs, training=True)
        assert outputs.shape.as_list() == [None, None, 3, 2]
        return outputs

    np.testing.assert_allclose(unknown(x), y, rtol=1e-10, atol=1e-12)
    with pytest.raises(tf.errors.InvalidArgumentError):
        unknown(x[:5])

    @tf.function(jit_compile=True)
    def in_a_loop(inputs):
        def body(number, _):
            outputs = layer(inputs, training=True)
            assert outputs.shape.as_list() == [6, 3, 3, 2]
            return number + 1, outputs

        return tf.while_loop(lambda number, _: number < 2, body, [0, tf.zeros_like(inputs)])[1]

    before = layer.get_weights()[2]
    np.testing.assert_allclose(in_a_loop(tf.constant(x)), y, rtol=1e-10, atol=1e-12)
    mean = MOMENTUM**2 * before + (1 - MOMENTUM**2) * x.mean((0, 1, 2))
    np.testing.assert_allclose(layer.get_weights()[2], mean, rtol=1e-12)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    # Squares beyond float16; their sums beyond what bfloat16 adds up.
    x = tf.cast(draw.normal(300.0, 400.0, (8, 4, 4, 3)), policy.removeprefix("mixed_"))
    layer = layer_for(x.shape, 4, dtype=policy, center=False, scale=False)
    before = layer.get_weights()
    outputs = layer(x, training=True)
    assert outputs.dtype == x.dtype and {weight.dtype.name for weight in before} == {"float32"}
    y, mean, variance = twin(tf.cast(x, tf.float64).numpy(), 4, 3)
    # Half a unit in the last place of a bfloat16.
    np.testing.assert_allclose(tf.cast(outputs, tf.float64), y, rtol=2.0**-8, atol=1e-5)
    expected = MOMENTUM * np.array(before) + (1 - MOMENTUM) * np.array([mean, variance])
    np.testing.assert_allclose(layer.get_weights(), expected, rtol=1e-5)


def test_saved_model_loads_in_a_fresh_process(tmp_path):
    layers = [GhostBatchNormalization(2, axis=1), GhostBatchNormalization(synchronized=True, momentum=0.5)]
    model = keras.Sequential([keras.Input((3, 4)), *layers])
    x = draw.normal(size=(4, 3, 4)).astype(np.float32)
    model(x, training=True)
    model.save(str(tmp_path / "model.keras"))
    np.savez(tmp_path / "expected.npz", x=x, inference=model(x), training=model(x, training=True))
    code = """
from tf_largebatch import GhostBatchNormalization
import numpy as np, sys
from tensorflow import keras
model, expected = keras.models.load_model(sys.argv[1]), np.load(sys.argv[2])
assert {type(layer) for layer in model.layers} == {GhostBatchNormalization}
np.testing.assert_allclose(model(expected["x"]), expected["inference"], rtol=1e-6, atol=1e-6)
np.testing.assert_allclose(model(expected["x"], training=True), expected["training"], rtol=1e-5, atol=1e-6)
"""
    done = python("-c", code, tmp_path / "model.keras", tmp_path / "expected.npz")
    assert done.returncode == 0, done.stderr
    configs = [layer.get_config() for layer in layers]
    assert [GhostBatchNormalization.from_config(config).get_config() for config in configs] == configs
    chosen = [(config["group_size"], config["synchronized"], config["axis"]) for config in configs]
    assert chosen[0] == (2, False, 1) and chosen[1][:2] == (None, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size is 0, but must be greater than 0"),
        ({"group_size": "all"}, "group_size is 'all', but must be a whole number"),
        ({"group_size": 4, "synchronized": True}, "not over groups of 4; leave out one"),
        ({"axis": [1, 2]}, "axis is .1, 2., but must be a whole number"),
        ({"virtual_batch_size": 2}, "does not do virtual_batch_size"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(InputError, match=message):
        GhostBatchNormalization(**options)


def test_wrong_inputs():
    layer = layer_for((6, 3), 4, name="bn")
    with pytest.raises(InputError, match="bn: group_size is 4, which does not divide the 6 examples"):
        layer(np.zeros((6, 3)), training=True)
    with pytest.raises(InputError, match="does not take inputs with a mask"):
        layer_for((6, 3, 2), 4)(np.zeros((4, 3, 2)), mask=np.ones((4, 3), bool))
    with pytest.raises(InputError, match="the first axis holds the examples"):
        layer_for((6, 3), axis=-2)


def test_two_replicas_as_one():
    done = python(__file__)
    assert done.returncode == 0, done.stderr


def on_replicas(strategy, *ends, **options):
    """Trains a layer once, where each replica's examples end at its number in `ends`.

    Returns the outputs and gradients of x, gamma and beta of all replicas, and each one's moving statistics.
    """
    values = np.random.default_rng(2)
    # mean(x^2) - mean^2 would lose 6 digits.
    arrays = values.normal(1000.0, 2.0, (8, 3, 3, 2)), values.normal(size=(8, 3, 3, 2))
    with strategy.scope():
        layer = layer_for(arrays[0].shape, **options)

    def part(array):
        parts = np.split(array, ends[:-1])
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    def step(x, weights):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True)
            loss = tf.reduce_sum(weights * tf.sin(outputs))
        of_x, *others = tape.gradient(loss, [x, *layer.trainable_variables])
        others = tf.distribute.get_replica_context().all_reduce("SUM", others)
        return outputs, of_x, *others, *(tf.identity(tf.convert_to_tensor(v)) for v in layer.non_trainable_variables)

    results = tf.function(lambda *parts: strategy.run(step, parts))(*map(part, arrays))
    outputs, of_x, of_gamma, of_beta, *moving = map(strategy.experimental_local_results, results)
    return [np.concatenate(outputs), np.concatenate(of_x), of_gamma[0], of_beta[0]], np.array(moving)


def in_micro_batches(strategy, number):
    """Outputs in groups of two, of replicas that go through their four examples in a loop."""
    with strategy.scope():
        layer = layer_for((8, 2), 2)

    def step():
        first = 4 * tf.distribute.get_replica_context().replica_id_in_sync_group
        x = tf.reshape(tf.range(first, first + 4), [number, -1, 1])
        x = tf.sin(tf.cast(tf.concat([x, 3 * x], axis=2), tf.float64))
        return tf.concat(tf.unstack(tf.map_fn(lambda part: layer(part, training=True), x)), axis=0)

    return np.concatenate(strategy.experimental_local_results(tf.function(lambda: strategy.run(step))()))


def compare_replicas():
    strategies.set_logical_cpus(2)
    one, two = tf.distribute.OneDeviceStrategy("/CPU:0"), tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    for ends, alone, together in [
        ((4, 8), {"group_size": 2}, {"group_size": 2}),
        ((2, 8), {"group_size": None}, {"synchronized": True}),
        ((4, 8), {"group_size": None, "axis": 1}, {"synchronized": True, "axis": 1}),
    ]:
        expected, (mean, variance) = on_replicas(one, 8, **alone)
        results, moving = on_replicas(two, *ends, **together)
        for ours, theirs in zip(results, expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)
        moving = moving if "synchronized" in together else moving.mean(1, keepdims=True)
        for ours, theirs in zip(moving, (mean, variance)):
            np.testing.assert_allclose(ours, np.broadcast_to(theirs, ours.shape), rtol=1e-12)
    np.testing.assert_allclose(in_micro_batches(two, 2), in_micro_batches(two, 1), rtol=1e-12)


if __name__ == "__main__":
    compare_replicas()
