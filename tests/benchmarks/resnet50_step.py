"""Time of a whole ResNet-50 training step with LARS, as a ratio to momentum SGD.

    python tests/benchmarks/resnet50_step.py --batch=32 --rounds=5

The two take turns within each round. A step is forward, backward and update of 224x224 images.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

from tf_largebatch import LARS, run_folder
from tf_largebatch._keras import keras, tf

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch", 32, "Images in a step.", lower_bound=1)
flags.DEFINE_integer("rounds", 5, "How often each is timed.", lower_bound=3)
flags.DEFINE_string("output", None, "JSON file for the result.")


def prepared(optimizer):
    """A function that makes one training step of a model of its own."""
    model = keras.applications.ResNet50(weights=None)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    images = tf.random.stateless_uniform((FLAGS.batch, 224, 224, 3), seed=(0, 1))
    labels = tf.random.stateless_uniform((FLAGS.batch,), seed=(0, 2), maxval=1000, dtype=tf.int32)

    def step():
        model.train_on_batch(images, labels)

    step()
    return step


def main(_):
    steps = {
        "keras.SGD": prepared(keras.optimizers.SGD(0.01, momentum=0.9)),
        "LARS": prepared(LARS(1.0, weight_decay=5e-5)),
    }
    seconds = {name: [] for name in steps}
    for _ in range(FLAGS.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    result = {
        "what": f"training step of ResNet-50, {FLAGS.batch} images",
        "rounds": FLAGS.rounds,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "fastest_seconds": {name: min(times) for name, times in seconds.items()},
        "lars_times_sgd": statistics.median(seconds["LARS"]) / statistics.median(seconds["keras.SGD"]),
        "lars_times_sgd_fastest": min(seconds["LARS"]) / min(seconds["keras.SGD"]),
        "environment": run_folder.environment(),
    }
    print(json.dumps(result, indent=2))
    if FLAGS.output:
        Path(FLAGS.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
