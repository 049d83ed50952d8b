"""Stock Keras 3 still fails under MultiWorkerMirroredStrategy, and the repair makes it right.

When `test_stock_keras_still_fails` fails, Keras has mended keras-team/keras#20585: see which
version did, and drop `distribution/keras3_repairs.py` for it.
"""

from __future__ import annotations

import json

import pytest
from conftest import python, tf_configs

from tf_largebatch._keras import KERAS_3, keras_version
from tf_largebatch.distribution import keras3_repairs

pytestmark = pytest.mark.skipif(not KERAS_3, reason="Keras 2 needs no repair")

# A user's own program, with nothing of ours but the repair: nested input, a metric, validation.
PROGRAM = """
import json, os, sys
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tf_largebatch.distribution import keras3_repairs

if sys.argv[1] == "repaired":
    keras3_repairs.apply()
if "TF_CONFIG" in os.environ:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
else:
    strategy = tf.distribute.get_strategy()
draw = np.random.default_rng(0)
a, b, y = (draw.normal(size=(64, n)).astype("float32") for n in (3, 2, 1))
keras.utils.set_random_seed(0)
with strategy.scope():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["a"], inputs["b"]])))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], jit_compile=False)
data = tf.data.Dataset.from_tensor_slices(({"a": a, "b": b}, y)).batch(16, drop_remainder=True)
history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
history["evaluate"] = model.evaluate(data, verbose=0)
print("HISTORY", json.dumps(history), flush=True)
"""


def history(output):
    (line,) = [line for line in output.splitlines() if line.startswith("HISTORY")]
    return json.loads(line.removeprefix("HISTORY "))


def test_stock_keras_still_fails(workers):
    processes = [workers.start("-c", PROGRAM, "stock", TF_CONFIG=config) for config in tf_configs(2)]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert all(process.returncode for process in processes), "Keras is mended: see this file's docstring"
    # The first of the two faults shows first.
    assert any("Attempt to convert a value" in text and "PerReplica" in text for text in outputs), outputs[0][-2000:]


def test_repaired_keras_gives_the_numbers_of_one_process(workers):
    alone = history(python("-c", PROGRAM, "stock").stdout)
    outputs = workers.run(2, "-c", PROGRAM, "repaired")
    for output in outputs:
        for key, values in history(output).items():
            assert values == pytest.approx(alone[key], rel=1e-5), key


def test_this_version_is_among_the_tested():
    assert keras_version() in keras3_repairs.TESTED_VERSIONS


def test_repair_can_be_undone():
    from keras.src.backend.tensorflow import trainer

    # Other tests of this process may have applied it.
    keras3_repairs.undo()
    stock = trainer.reduce_per_replica, trainer.TensorFlowTrainer._maybe_symbolic_build
    keras3_repairs.apply()
    keras3_repairs.apply()
    assert trainer.reduce_per_replica is not stock[0]
    assert trainer.TensorFlowTrainer._maybe_symbolic_build is not stock[1]
    keras3_repairs.undo()
    assert (trainer.reduce_per_replica, trainer.TensorFlowTrainer._maybe_symbolic_build) == stock
