"""A network for recipes that does, in one worker and at one step, what the variable FAULT says.

FAULT="rank step how" in the first attempt of a job, such as "1 18 SIGKILL". `how` is a signal to the worker itself;
"raise"; "touch FILE"; "fill FOLDER", which leaves no room on its disk; "late SECONDS", at the start; or "take_port", at
the start too. In other attempts, and without FAULT, nothing happens, and the network computes the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time

from tf_largebatch import GhostBatchNormalization, GlobalBatchDropout
from tf_largebatch._keras import keras, tf

_task = json.loads(os.environ.get("TF_CONFIG") or "{}")
_rank, _step, _how, *_where = [*os.environ.get("FAULT", "").split(), "", "", ""][:4]
_is_due = _how and str(_task.get("task", {}).get("index", 0)) == _rank and os.environ.get("TFLB_ATTEMPT", "0") == "0"
_made = 0

if _is_due and _how == "late":
    time.sleep(float(_where[0]))
if _is_due and _how == "take_port":
    _taken = socket.socket()
    _taken.bind(("", int(_task["cluster"]["worker"][int(_rank)].rpartition(":")[2])))
    _taken.listen()


def _count() -> int:
    global _made
    _made += 1
    if _is_due and _made == int(_step):
        _do()
    return 0


def _do() -> None:
    if _how == "raise":
        raise RuntimeError("a mistake in one worker")
    if _how == "touch":
        open(_where[0], "w").close()
    elif _how == "fill":
        with contextlib.suppress(OSError), open(f"{_where[0]}/filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(65536))
    elif _how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[_how])
        time.sleep(0.5)


@keras.utils.register_keras_serializable(package="faulty")
class Faulty(keras.layers.Layer):
    """Gives its inputs; in training it counts steps."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        with tf.control_dependencies([tf.py_function(_count, [], tf.int32)]):
            return tf.identity(inputs)


def build(input_shape, num_classes, batch_norm_group_size: int = 8) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Flatten(),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Dense(16),
            GhostBatchNormalization(batch_norm_group_size),
            keras.layers.Activation("relu"),
            GlobalBatchDropout(0.25, seed=7),
            Faulty(),
            keras.layers.Dense(num_classes),
        ]
    )
