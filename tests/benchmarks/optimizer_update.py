"""Time of one optimizer update of ResNet-50's 161 variables, as ratios to Keras's momentum SGD.

    python tests/benchmarks/optimizer_update.py --rounds=15

All optimizers take turns within each round, so that a busy machine slows all alike; the ratio is that
of medians. On a quiet machine its spread is a few percent, on a shared one ten.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

import tf_largebatch
from tf_largebatch import LARS, run_folder
from tf_largebatch._keras import KERAS_3, Optimizer, keras, tf

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 15, "How often each optimizer is timed.", lower_bound=3)
flags.DEFINE_bool("xla", False, "Compile the update with XLA.")
flags.DEFINE_string("output", None, "JSON file for the result.")


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Kernels, batch-norm scales and shifts, and the dense layer: 161 variables, 25,557,032 weights."""
    shapes: list[tuple[int, ...]] = []

    def conv(size, inputs, outputs):
        shapes.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])

    conv(7, 3, 64)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            conv(1, inputs, width)
            conv(3, width, width)
            conv(1, width, 4 * width)
            if block == 0:
                conv(1, inputs, 4 * width)
            inputs = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


class ModelGardenRule(Optimizer):
    """The rule of tensorflow/models, written per variable with plain operations, for comparison."""

    def create_state(self, variables):
        self._velocities = self.slots(variables, "velocity")
        self._plain = [len(variable.shape) <= 1 for variable in variables]

    def update(self, index, gradient, variable, learning_rate):
        w, v = variable, self._velocities[index]
        rate = tf.cast(learning_rate, w.dtype)
        if not self._plain[index]:
            gradient = gradient + 5e-5 * w
            weight_norm, gradient_norm = tf.norm(w, ord=2), tf.norm(gradient, ord=2)
            ratio = tf.where(
                weight_norm > 0, tf.where(gradient_norm > 0, 0.001 * weight_norm / gradient_norm, 1.0), 1.0
            )
            rate = rate * ratio
        v.assign(0.9 * v + rate * gradient)
        w.assign_sub(v)


def contestants() -> dict:
    """{name: optimizer}, the yardstick first."""
    found = {
        "keras.SGD": keras.optimizers.SGD(0.1, momentum=0.9),
        "LARS": LARS(10.0, weight_decay=5e-5, jit_compile=FLAGS.xla),
        "LARS, nesterov": LARS(10.0, weight_decay=5e-5, nesterov=True, jit_compile=FLAGS.xla),
        "LARS, no decay": LARS(10.0, jit_compile=FLAGS.xla),
        "LARS, torch order": LARS(10.0, weight_decay=5e-5, momentum_order="torch", jit_compile=FLAGS.xla),
        "Model Garden's LARS": ModelGardenRule(10.0, "ModelGardenRule"),
        "keras.Adam": keras.optimizers.Adam(1e-3),
    }
    if KERAS_3:
        found["keras.Lamb"] = keras.optimizers.Lamb(1e-3)
    if hasattr(tf_largebatch, "LAMB"):
        found["LAMB"] = tf_largebatch.LAMB(1e-3, weight_decay=1e-2)
    return found


def prepared(optimizer):
    """A function that makes one update of variables of its own."""
    draw = tf.random.Generator.from_seed(0)
    make = keras.Variable if KERAS_3 else tf.Variable
    variables = [make(draw.normal(shape), name=f"kernel_{index}") for index, shape in enumerate(resnet50_shapes())]
    gradients = [draw.normal(shape) for shape in resnet50_shapes()]
    optimizer.build(variables)

    @tf.function(jit_compile=FLAGS.xla)
    def update(gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    def step():
        update(gradients)
        # Wait for the last variable.
        (variables[-1].value if KERAS_3 else variables[-1]).numpy()

    step()
    step()
    return step


def main(_):
    assert sum(tf.TensorShape(shape).num_elements() for shape in resnet50_shapes()) == 25_557_032
    steps = {name: prepared(optimizer) for name, optimizer in contestants().items()}
    seconds = {name: [] for name in steps}
    for _ in range(FLAGS.rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    yardstick = medians["keras.SGD"]
    print(f"update of 161 variables, {'XLA' if FLAGS.xla else 'graph'} mode, {FLAGS.rounds} rounds, interleaved")
    for name, median in medians.items():
        print(f"{name:22} {1e3 * median:8.1f} ms  {median / yardstick:6.2f} x SGD")
    if FLAGS.output:
        result = {
            "what": "optimizer update, 161 variables of ResNet-50",
            "xla": FLAGS.xla,
            "rounds": FLAGS.rounds,
            "milliseconds": {name: 1e3 * median for name, median in medians.items()},
            "times_sgd": {name: median / yardstick for name, median in medians.items()},
            "environment": run_folder.environment(),
        }
        Path(FLAGS.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
