"""A user's own program that survives: `fit` with `SaveAndResume`, for tests to interrupt.

    interrupted_fit.py FOLDER --data=arrays --stop_at=7 --how=SIGKILL

It ends with one line of JSON: hashes of all weights and of those that are trained, losses of the epochs, steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time

import numpy as np

import tf_largebatch
from tf_largebatch import LARS, SaveAndResume, train_in_micro_batches
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import strategies

EXAMPLES, BATCH, EPOCHS = 100, 20, 4


class Interrupt(keras.callbacks.Callback):
    """Does something to this process after step N that this process makes."""

    def __init__(self, step: int, how: str):
        super().__init__()
        self.left, self.how = step, how

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0 and self.how == "raise":
            raise RuntimeError("the user's own mistake")
        if self.left == 0:
            os.kill(os.getpid(), signal.Signals[self.how])
            # A handler runs only now and then.
            time.sleep(0.2)


def data(kind: str):
    """Arguments of `fit`."""
    random = np.random.default_rng(1)
    x, y = random.random((EXAMPLES, 8), "float32"), random.integers(0, 3, EXAMPLES)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "validation_split": 0.2}
    shuffled = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(EXAMPLES, seed=3).batch(BATCH, drop_remainder=True)
    if kind == "dataset":
        return {"x": shuffled, "validation_data": (x, y), "validation_batch_size": 50}
    if kind == "endless":
        return {"x": shuffled.repeat(), "steps_per_epoch": 3}
    if kind == "unknown":
        # A data set whose length Keras learns in its first epoch.
        return {"x": shuffled.filter(lambda x, y: tf.reduce_all(x >= 0))}
    assert kind == "generator"

    def batches():
        order = np.random.default_rng(5)
        while True:
            chosen = order.integers(0, EXAMPLES, BATCH)
            yield x[chosen], y[chosen]

    return {"x": batches(), "steps_per_epoch": 3}


def network(dropout: bool) -> keras.Model:
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization(momentum=0.9)]
    layers += [keras.layers.Dropout(0.5)] if dropout else []
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--data", default="arrays")
    parser.add_argument("--stop_at", type=int, default=0)
    parser.add_argument("--stopped_rank", type=int, default=0)
    parser.add_argument("--how", default="SIGKILL")
    parser.add_argument("--every_steps", type=int, default=3)
    parser.add_argument("--every_minutes", type=float)
    parser.add_argument("--steps_per_execution", type=int, default=1)
    parser.add_argument("--optimizer", default="lars")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--micro_batches", type=int, default=0)
    parser.add_argument("--no_dropout", action="store_true")
    parser.add_argument("--read_again", default="all")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--pause", type=float, default=0.0)
    return parser


class Pause(keras.callbacks.Callback):
    """Makes steps slow, so that a test can do something between them."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


def hashed(variables) -> str:
    values = b"".join(np.ascontiguousarray(variable.numpy()).tobytes() for variable in variables)
    return hashlib.sha256(values).hexdigest()


def train(given: argparse.Namespace, strategy: tf.distribute.Strategy, callbacks=()) -> dict:
    keras.utils.set_random_seed(1)
    if hasattr(keras.backend, "experimental"):
        # Keras 2: random states that can be saved.
        keras.backend.experimental.enable_tf_random_generator()
    keras.mixed_precision.set_global_policy(given.precision)
    with strategy.scope():
        model = network(dropout=not given.no_dropout and given.micro_batches == 0)
        optimizer = {
            "lars": lambda: LARS(1.0),
            "adam": lambda: keras.optimizers.Adam(0.01),
            "ema": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9),
        }[given.optimizer]()
        if given.precision == "mixed_float16":
            optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=given.steps_per_execution)
        if given.micro_batches:
            train_in_micro_batches(model, given.micro_batches)
    resume = SaveAndResume(given.folder, given.every_steps or None, given.every_minutes, read_again=given.read_again)
    rank = int(json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {}).get("index", 0))
    before = [Pause(given.pause), *callbacks]
    if given.stop_at and rank == given.stopped_rank:
        before.append(Interrupt(given.stop_at, given.how))
    fit = model.fit(**data(given.data), epochs=given.epochs, verbose=0, callbacks=[*before, resume])
    keras.mixed_precision.set_global_policy("float32")
    iterations = model.optimizer.iterations
    return {
        "weights": hashed(model.weights),
        "trained": hashed(model.trainable_weights),
        "losses": fit.history["loss"],
        "epochs": fit.epoch,
        "steps": int(iterations.numpy() if hasattr(iterations, "numpy") else iterations),
    }


def main() -> None:
    given = parser().parse_args()
    if given.replicas > 1:
        strategies.set_logical_cpus(given.replicas)
    print(json.dumps(train(given, tf_largebatch.strategy())))


if __name__ == "__main__":
    main()
