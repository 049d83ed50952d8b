"""Time of one all-reduce of a network's gradients between two processes of this machine.

    python tests/benchmarks/all_reduce.py --rounds=9

Starts both workers itself, one CPU device each, first with ResNet-50's gradients, then with AlexNet's, and
ends them after five minutes each, whatever happens. All variants take turns within each round, so that a
busy machine slows all alike; before each the workers meet, so that none is timed while it waits.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

from tf_largebatch.supervisor import local_ports

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 9, "How often each variant is timed.", lower_bound=3)
flags.DEFINE_string("output", "configs/results/all_reduce.json", "JSON file for the result.")
flags.DEFINE_string("network", None, "Set for a worker: whose gradients.")

TIMEOUT_SECONDS = 300
PACK_MEGABYTES = (0, 1, 4, 16, 64)
IMPLEMENTATIONS = ("ring", "auto")
WIRE_DTYPES = ("float32", "bfloat16")
# Weights as published, tensors too for ResNet-50: keras.applications.ResNet50.
SIZES = {"ResNet-50": (161, 25_557_032), "AlexNet": (16, 60_965_224)}


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The trained variables in Keras's order: 107 of the convolutions and the dense layer, with biases, and 106."""
    from tf_largebatch._keras import keras

    model = keras.applications.ResNet50(weights=None)
    return [tuple(variable.shape) for variable in model.trainable_variables]


def alexnet_shapes() -> list[tuple[int, ...]]:
    """Kernels and biases of Caffe's bvlc_alexnet, of which three convolutions see half of the channels."""
    kernels = [(11, 11, 3, 96), (5, 5, 48, 256), (3, 3, 256, 384), (3, 3, 192, 384), (3, 3, 192, 256)]
    kernels += [(9216, 4096), (4096, 4096), (4096, 1000)]
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


SHAPES = {"ResNet-50": resnet50_shapes, "AlexNet": alexnet_shapes}
