"""The small network: its size in closed form, and what it computes in each precision."""

from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch import named_functions
from tf_largebatch._keras import keras, set_precision
from tf_largebatch.networks import small_cnn
from tf_largebatch.validation import InputError

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def default_precision():
    yield
    set_precision("float32")


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize(("side", "channels", "width", "classes"), [(28, 1, 16, 10), (32, 3, 8, 5)])
def test_number_of_weights(side, channels, width, classes, batch_norm):
    model = small_cnn.build((side, side, channels), classes, width=width, batch_norm=batch_norm)
    kernels = 25 * channels * width + 9 * width * 2 * width + 9 * 2 * width * 4 * width
    # A scale, a shift and two moving statistics for each filter, or a bias.
    per_filter = (4 if batch_norm else 1) * 7 * width
    last_side = -(-side // 8)
    dense = (last_side**2 * 4 * width + 1) * classes
    assert model.count_params() == kernels + per_filter + dense


def test_takes_bytes_and_scales_them():
    model = small_cnn.build((28, 28, 1), 10, batch_norm=False)
    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28, 1), dtype=np.uint8)
    logits = np.asarray(model(images))
    # The same layers from behind the scaling on: the division moves into the first kernel.
    bare = keras.Model(model.layers[2].input, model.outputs)
    weights = model.get_weights()
    bare.set_weights([weights[0] / 255, *weights[1:]])
    np.testing.assert_allclose(logits, bare(images.astype(np.float32)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "variables", "logits"),
    [
        ("float32", "float32", "float32"),
        ("float64", "float64", "float64"),
        ("mixed_bfloat16", "float32", "float32"),
    ],
)
def test_precision(precision, variables, logits):
    set_precision(precision)
    model = small_cnn.build((28, 28, 1), 10)
    assert {np.asarray(weight).dtype.name for weight in model.get_weights()} == {variables}
    assert model(np.zeros((2, 28, 28, 1), np.uint8)).dtype.name == logits


def test_batch_norm_momentum_is_set():
    model = small_cnn.build((28, 28, 1), 10, batch_norm_momentum=0.5)
    momenta = [layer.momentum for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert momenta == [0.5, 0.5, 0.5]


def test_batch_norm_groups_and_dropout():
    keras.utils.set_random_seed(1)
    images = np.random.default_rng(1).integers(0, 256, (8, 12, 12, 1), dtype=np.uint8)
    plain = small_cnn.build((12, 12, 1), 3, width=2)
    model = small_cnn.build((12, 12, 1), 3, width=2, batch_norm_group_size=4, dropout=0.5)
    # From the first convolution on; Keras numbers the scaling.
    names = [layer.name for layer in plain.layers[2:]]
    assert [layer.name for layer in model.layers[2:]] == [*names[:-1], "dropout", names[-1]]
    assert model.get_layer("dropout").rate == 0.5
    # Up to the dropout, the plain network on each group of four on its own.
    for name in ("conv_1", "conv_2", "conv_3"):
        plain.get_layer(name).set_weights(model.get_layer(name).get_weights())
    ours, theirs = (keras.Model(network.input, network.get_layer("flatten").output) for network in (model, plain))
    expected = np.concatenate([theirs(images[i : i + 4], training=True) for i in (0, 4)])
    np.testing.assert_allclose(ours(images, training=True), expected, rtol=1e-4, atol=1e-5)
    assert np.any(np.asarray(model(images, training=True)) != np.asarray(model(images, training=True)))


def options(**given):
    return named_functions.find("network", "small_cnn", given, positional=2).options


def test_options_of_a_recipe():
    given = {"batch_norm_group_size": 32, "dropout": "0.25"}
    assert options(**given) == {"batch_norm_group_size": 32, "dropout": 0.25}
    assert options(batch_norm_group_size=None) == {"batch_norm_group_size": None}
    with pytest.raises(InputError, match="batch_norm_group_size is 0, but must be greater than 0"):
        options(batch_norm_group_size=0)
    with pytest.raises(InputError, match="batch_norm_group_size is 'all', but must be a whole number"):
        options(batch_norm_group_size="all")
    with pytest.raises(InputError, match="dropout is 1.0, but must be less than 1"):
        options(dropout=1.0)
