"""The small network: its size in closed form, and what it computes in each precision."""

from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch._keras import keras, set_precision
from tf_largebatch.networks import small_cnn

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
