"""A network for recipes that does, in one worker and at one step, what the variable FAULT says.

FAULT="rank step how" in the first attempt of a job, such as "1 18 SIGKILL"; several are parted by ";". `how` is a
signal to the worker itself; "raise"; "touch FILE"; "fill FOLDER", which leaves no room on its disk; or, with step 0, at
the start: "late SECONDS", "take_port" and "own_folder FOLDER". In other attempts, and without FAULT, nothing happens,
and the network computes the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time

from tf_largebatch import GhostBatchNormalization, GlobalBatchDropout
from tf_largebatch._keras import keras, tf

_NEW_MOUNTS = 0x00020000
_task = json.loads(os.environ.get("TF_CONFIG") or "{}")
_rank = str(_task.get("task", {}).get("index", 0))
_faults = [fault.split() for fault in os.environ.get("FAULT", "").split(";") if fault.strip()]
if os.environ.get("TFLB_ATTEMPT", "0") != "0":
    _faults = []
_made = 0
_kept = []


def _do(how: str, *where: str) -> None:
    print(f"fault {how} in worker {_rank} at {time.time()}", flush=True)
    if how == "raise":
        raise RuntimeError("a mistake in one worker")
    elif how == "touch":
        open(where[0], "w").close()
    elif how == "fill":
        with contextlib.suppress(OSError), open(f"{where[0]}/filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    elif how == "late":
        time.sleep(float(where[0]))
    elif how == "take_port":
        taken = socket.socket()
        taken.bind(("", int(_task["cluster"]["worker"][int(_rank)].rpartition(":")[2])))
        taken.listen()
        _kept.append(taken)
    elif how == "own_folder":
        # In a mount namespace of its own, as on another host.
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", where[0]], check=True)
    else:
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(0.5)


def _step() -> int:
    global _made
    for rank, step, *what in _faults:
        if (rank, int(step)) == (_rank, _made):
            _do(*what)
    _made += 1
    return 0


# Step 0.
_step()


@keras.utils.register_keras_serializable(package="faulty")
class Faulty(keras.layers.Layer):
    """Gives its inputs; in training it counts steps."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        with tf.control_dependencies([tf.py_function(_step, [], tf.int32)]):
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
