"""A compiled model is saved, loaded in a fresh process, and trains on as if it had never stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import python

from tf_largebatch import LAMB, LARS, PolynomialDecay, Warmup
from tf_largebatch._keras import KERAS_3, keras, tf

pytestmark = pytest.mark.smoke

SHARED = {
    "weight_decay": 0.01,
    "exclude_from_weight_decay": ("second",),
    "exclude_from_layer_adaptation": ("bias$",),
    "excluded_lr_multiplier": 0.25,
    "trust_min": 1e-4,
    "trust_max": 10.0,
    "clipnorm": 2.0,
}
OPTIONS = {
    LARS: {
        **SHARED,
        "trust_coefficient": 0.002,
        "momentum": 0.8,
        "nesterov": True,
        "epsilon": 1e-6,
        "momentum_order": "torch",
        "norm_rule": "vector",
        "zero_norm": "plain",
        "clip": "larc",
        "gradient_clip": 5.0,
        "sparse": "error",
    },
    # With bias correction, so that a lost step count shows.
    LAMB: {**SHARED, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5, "bias_correction": True},
}
PEAK = {LARS: 4.0, LAMB: 0.1}
both = pytest.mark.parametrize("cls", [LARS, LAMB])


def schedule(cls):
    return Warmup(PolynomialDecay(PEAK[cls], 40), 4, start=0.1 * PEAK[cls])


def compiled_model(cls):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, activation="relu", name="first"), keras.layers.Dense(2, name="second")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(cls(schedule(cls), **OPTIONS[cls]), "mse")
    return model


def train(model):
    draw = np.random.default_rng(2)
    x, y = draw.normal(size=(24, 6)).astype(np.float32), draw.normal(size=(24, 2)).astype(np.float32)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


def assert_same_weights(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        # Sums over threads may round differently from process to process.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@both
def test_config_round_trip_keeps_everything(cls):
    optimizer = cls(schedule(cls), **OPTIONS[cls])
    copy = cls.from_config(optimizer.get_config())
    config = copy.get_config()
    assert {key: config[key] for key in OPTIONS[cls]} == OPTIONS[cls]
    assert config == optimizer.get_config()
    assert copy.current_learning_rate() == pytest.approx(0.1 * PEAK[cls])
    # A constant rate too, and what JSON makes of a config: tuples become lists.
    constant = json.loads(json.dumps(cls(0.5, **OPTIONS[cls]).get_config()))
    assert cls.from_config(constant).get_config()["exclude_from_weight_decay"] == ("second",)
    assert cls.from_config(constant).current_learning_rate() == 0.5


@both
def test_keras_serialises_it_by_name(cls):
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(cls(1.5, **OPTIONS[cls])))
    assert type(copy) is cls
    assert copy.get_config()["trust_max"] == 10.0


@both
def test_training_goes_on_in_a_fresh_process(cls, tmp_path):
    model = train(compiled_model(cls))
    model.save(str(tmp_path / "model.keras"))
    train(model)
    code = f"""
from tf_largebatch import LARS  # one name brings the others
import json, numpy as np
from tensorflow import keras
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
optimizer = model.optimizer
assert type(optimizer).__name__ == {cls.__name__!r} and int(optimizer.iterations) == 6
draw = np.random.default_rng(2)
x, y = draw.normal(size=(24, 6)).astype(np.float32), draw.normal(size=(24, 2)).astype(np.float32)
model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
np.savez({str(tmp_path / "after.npz")!r}, *model.get_weights())
print(json.dumps([list(optimizer._adapted), [decay > 0 for decay in optimizer._decays]]))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    # kernel and bias of the first layer, then of the second
    adapted, decayed = json.loads(done.stdout.splitlines()[-1])
    assert adapted == [True, False, True, False]
    assert decayed == [True, True, False, False]
    with np.load(tmp_path / "after.npz") as after:
        assert_same_weights(model.get_weights(), list(after.values()))


@both
def test_tensorflow_checkpoint_restores_the_state(cls, tmp_path):
    first, second = train(compiled_model(cls)), compiled_model(cls)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "checkpoint"))
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path).assert_existing_objects_matched()
    assert_same_weights(train(first).get_weights(), train(second).get_weights())


@pytest.mark.skipif(KERAS_3, reason="Keras 3 does not train on from .h5 files, with its own optimizers either")
@both
def test_h5_files_of_keras_2(cls, tmp_path):
    model = train(compiled_model(cls))
    model.save(str(tmp_path / "model.h5"))
    copy = keras.models.load_model(str(tmp_path / "model.h5"))
    assert copy.optimizer.get_config() == model.optimizer.get_config()
    assert_same_weights(train(model).get_weights(), train(copy).get_weights())
