"""Program for tests: Keras's own fit, evaluate and predict, on whatever devices and workers there are.

    python strategy_cases.py OUTPUT.json FOLDER DEVICES [CASE ...]

DEVICES logical CPUs in this process, or in each worker of TF_CONFIG. OUTPUT holds {case: numbers}, which are the
same on any devices. Of this package only `strategy()` is used, which repairs Keras 3, and
once `train_in_micro_batches`.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import worker_devices

import tf_largebatch
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import strategies

output, folder, devices, chosen = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
if "TF_CONFIG" not in os.environ:
    strategies.set_logical_cpus(devices)
elif devices > 1:
    worker_devices.use(devices)
strategy = tf_largebatch.strategy()
replicas = strategy.num_replicas_in_sync

draw = np.random.default_rng(0)
X = draw.normal(size=(32, 3)).astype("float32")
Y = draw.normal(size=(32, 1)).astype("float32")


def dense(units=1, value=0.5):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.Constant(value))


def batches(*arrays, size=8, drop_remainder=True):
    data = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(size, drop_remainder=drop_remainder)


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or keras.optimizers.SGD(0.05), **{"loss": "mse", "jit_compile": False, **options})
    return model


def linear(optimizer=None, **options):
    """A dense layer, and a loss that is linear or quadratic in its weights."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense()])
        return compiled(model, optimizer() if optimizer else None, **options)


def numbers(history):
    return {key: [float(value) for value in values] for key, values in history.history.items()}


def weights(model):
    return [float(value) for array in model.get_weights() for value in np.ravel(array)]


def nested():
    """Dict inputs and outputs, sample weights, validation, evaluate and predict."""
    with strategy.scope():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((1,), name="b")}
        x = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        model = keras.Model(inputs, {"p": dense(1)(x), "q": dense(1, 0.1)(x)})
        losses, metrics = {"p": "mse", "q": "mae"}, {"p": ["mae"], "q": ["mse"]}
        compiled(model, loss=losses, weighted_metrics=metrics)
    sample = np.linspace(0, 2, 32).astype("float32")
    data = batches({"a": X, "b": Y}, {"p": Y, "q": Y}, {"p": sample, "q": sample})
    history = numbers(model.fit(data, epochs=2, validation_data=data, verbose=0))
    tested = model.evaluate(data, verbose=0, return_dict=True)
    predicted = model.predict(batches(({"a": X, "b": Y},), size=8, drop_remainder=False), verbose=0)
    return {**history, "tested": tested, "p": np.ravel(predicted["p"]).tolist(), "weights": weights(model)}


def uneven():
    """Training and evaluation with batches that replicas share unevenly, the first and the last."""
    model = linear()
    first = model.fit(batches(X[:5], Y[:5], size=5), verbose=0, epochs=1)
    with strategy.scope():
        metrics = ["mae", keras.metrics.AUC(name="auc")]
        # Its counts are whole numbers.
        overlap = keras.metrics.BinaryIoU(name="overlap")
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        compiled(model, weighted_metrics=metrics, metrics=[overlap], loss=loss)
    labels, sample = (Y[:30] > 0).astype("float32"), np.linspace(0, 2, 30).astype("float32")
    data = batches(X[:30], labels, sample, drop_remainder=False)
    second = model.fit(data, verbose=0, epochs=2, validation_data=data)
    return {"first": numbers(first), "second": numbers(second), "weights": weights(model)}


def many_steps():
    """steps_per_execution that divides the steps of an epoch, and that does not."""
    results = {}
    for every in (2, 3):
        model = linear(steps_per_execution=every, metrics=["mae"])
        history = model.fit(batches(X, Y), epochs=3, validation_data=batches(X, Y), verbose=0)
        results[f"every {every}"] = {**numbers(history), "weights": weights(model)}
        # Of a length that is known only at its end.
        unknown = batches(X, Y).filter(lambda x, y: True)
        history = linear(steps_per_execution=every).fit(unknown, epochs=2, verbose=0)
        results[f"every {every}, unknown length"] = numbers(history)
    return results


def clipped():
    """Keras's own optimizers clip the gradient of the whole batch."""
    results = {}
    for clip in ({"clipnorm": 0.5}, {"clipvalue": 0.25}, {"global_clipnorm": 0.5}):
        model = linear(lambda clip=clip: keras.optimizers.SGD(1.0, **clip))
        before = np.concatenate([np.ravel(w) for w in model.get_weights()])
        model.fit(batches(10 * X[:16], Y[:16], size=16), verbose=0)
        after = np.concatenate([np.ravel(w) for w in model.get_weights()])
        results[next(iter(clip))] = {"step": float(np.linalg.norm(after - before)), "weights": weights(model)}
    return results


def accumulated():
    """Gradient accumulation of Keras's own: with a schedule, an average of the weights, and both."""

    def schedule():
        return keras.optimizers.schedules.PolynomialDecay(0.1, 4, 0.01)

    results = {}
    for name, options in {
        "plain": {},
        "clipped": {"clipnorm": 0.1},
        "averaged": {"use_ema": True, "ema_momentum": 0.5},
        "overwritten": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    }.items():
        model = linear(
            lambda options=options: keras.optimizers.SGD(schedule(), gradient_accumulation_steps=2, **options)
        )
        # Batches of 8, two to an update.
        model.fit(batches(X, Y), epochs=3, verbose=0)
        results[name] = {"weights": weights(model), "updates": int(np.asarray(model.optimizer.iterations))}
    return results


def averaged():
    """ema_overwrite_frequency without accumulation."""
    model = linear(lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3))
    model.fit(batches(X, Y), epochs=2, verbose=0)
    return {"weights": weights(model)}


def statistics():
    """Batch norm, whose moving statistics are those of all replicas, also where they have unequal parts."""
    results = {}
    values = np.concatenate([np.zeros(16), np.ones(16)]).astype("float32")[:, None]
    # Batches whose first half is zeros and whose second half ones: each of several replicas gets one kind.
    order = np.arange(32).reshape(2, 4, 4).swapaxes(0, 1).ravel()
    for name, count in (("even", 32), ("uneven", 29)):
        with strategy.scope():
            layer = keras.layers.BatchNormalization(momentum=0.9)
            model = compiled(keras.Sequential([keras.Input((1,)), layer]), keras.optimizers.SGD(0.0))
        model.fit(batches(values[order][:count], values[order][:count], drop_remainder=False), epochs=1, verbose=0)
        results[name] = {"mean": float(np.ravel(layer.moving_mean)[0])}
    return results


def muon():
    """An optimizer of Keras's that asks for the path of what it updates."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(4), dense(1)])
        compiled(model, keras.optimizers.Muon(0.01, exclude_layers=["nothing"]))
    model.fit(batches(X, Y), verbose=0)
    return {"weights": weights(model)}


def callbacks():
    """Every worker has the same callbacks with the same paths; a second fit goes on where a first ended."""
    model = linear(metrics=["mae"])
    here = os.path.join(folder, "callbacks")

    def all_of_them(last):
        return [
            keras.callbacks.ModelCheckpoint(os.path.join(here, "{epoch}.keras")),
            keras.callbacks.BackupAndRestore(os.path.join(here, "backup"), delete_checkpoint=last),
            keras.callbacks.TensorBoard(os.path.join(here, "logs")),
            keras.callbacks.CSVLogger(os.path.join(here, "log.csv"), append=True),
        ]

    model.fit(batches(X, Y), epochs=2, callbacks=all_of_them(False), verbose=0)
    again = linear(metrics=["mae"])
    history = again.fit(batches(X, Y), epochs=3, callbacks=all_of_them(True), verbose=0)
    return {"weights": weights(again), "epochs": history.epoch, **numbers(history)}


def masks():
    """Whether each example has a dropout mask of its own."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1)])

    @tf.function
    def drop(x):
        return strategy.gather(strategy.run(lambda x: model(x, training=True), args=(x,)), axis=0)

    rows = np.asarray(drop(tf.ones((2, 64)))) > 0
    return {"distinct": len({row.tobytes() for row in rows}) == 2 * replicas}


def scaled():
    """Loss scaling where one example, which one replica alone has, makes one gradient infinite."""
    x = X.copy()
    x[13] = np.inf
    results = {}
    for micro_batches in (None, 2):
        model = linear(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0))
        if micro_batches:
            tf_largebatch.train_in_micro_batches(model, micro_batches)
        model.fit(batches(x, Y), verbose=0)
        scale = float(np.asarray(model.optimizer.dynamic_scale))
        results[f"micro-batches {micro_batches}"] = {"weights": weights(model), "scale": scale}
    return results


def single_number():
    """A loss function that takes the mean itself."""
    model = linear(loss=lambda y, p: tf.reduce_mean(tf.square(y - p)))
    return {**numbers(model.fit(batches(X, Y), verbose=0)), "weights": weights(model)}


def validated():
    """Validation that uses its data up exactly, in each epoch."""
    model = linear()
    history = model.fit(batches(X, Y), epochs=2, validation_data=batches(X, Y), validation_steps=4, verbose=0)
    return numbers(history)


CASES = [nested, uneven, many_steps, clipped, accumulated, averaged, statistics, muon, callbacks, masks, validated]
CASES += [scaled, single_number]
results = {}
for case in CASES:
    if not chosen or case.__name__ in chosen:
        keras.utils.set_random_seed(0)
        results[case.__name__] = case()
with open(output, "w") as file:
    json.dump(results, file)
