"""A model compiled with LARS is saved, loaded in a fresh process, and trains on as if never stopped."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import python

from tf_largebatch import LARS, PolynomialDecay, Warmup
from tf_largebatch._keras import keras, tf

pytestmark = pytest.mark.smoke

OPTIONS = {
    "trust_coefficient": 0.002,
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 0.01,
    "epsilon": 1e-6,
    "exclude_from_weight_decay": ("second",),
    "exclude_from_layer_adaptation": ("bias$",),
    "excluded_lr_multiplier": 0.25,
    "clipnorm": 2.0,
}


def compiled_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="relu", name="first"),
            keras.layers.Dense(2, name="second"),
        ]
    )
    model.compile(LARS(Warmup(PolynomialDecay(4.0, 40), 4, start=0.5), **OPTIONS), "mse")
    return model


def data():
    draw = np.random.default_rng(2)
    return draw.normal(size=(24, 6)).astype(np.float32), draw.normal(size=(24, 2)).astype(np.float32)


def test_config_round_trip_keeps_everything():
    optimizer = LARS(Warmup(PolynomialDecay(4.0, 40), 4), **OPTIONS)
    copy = LARS.from_config(optimizer.get_config())
    config = copy.get_config()
    assert {key: config[key] for key in OPTIONS} == OPTIONS
    assert config == optimizer.get_config()
    assert copy.current_learning_rate() == 0.0
    # A constant rate too, and what JSON makes of a config: tuples become lists.
    constant = json.loads(json.dumps(LARS(0.5, **OPTIONS).get_config()))
    assert LARS.from_config(constant).get_config()["exclude_from_weight_decay"] == ("second",)
    assert LARS.from_config(constant).current_learning_rate() == 0.5


def test_by_name_in_compile():
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(LARS(1.5, **OPTIONS)))
    assert isinstance(optimizer, LARS)
    assert optimizer.get_config()["momentum"] == 0.8


def test_training_goes_on_in_a_fresh_process(tmp_path):
    x, y = data()
    model = compiled_model()
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.save(str(tmp_path / "model.keras"))
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    code = f"""
from tf_largebatch import LARS
import json, numpy as np
from tensorflow import keras
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
optimizer = model.optimizer
assert isinstance(optimizer, LARS) and int(optimizer.iterations) == 6
data = np.load({str(tmp_path / "data.npz")!r})
model.fit(data["x"], data["y"], batch_size=8, epochs=2, shuffle=False, verbose=0)
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
        for ours, theirs in zip(model.get_weights(), after.values()):
            # Sums over threads may round differently from process to process.
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_tensorflow_checkpoint_restores_momentum(tmp_path):
    x, y = data()
    first, second = compiled_model(), compiled_model()
    first.fit(x, y, epochs=2, shuffle=False, verbose=0)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(str(tmp_path / "checkpoint"))
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path).assert_existing_objects_matched()
    for model in (first, second):
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(first.get_weights(), second.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
