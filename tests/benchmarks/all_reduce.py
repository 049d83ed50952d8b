"""Time of one all-reduce of a network's float32 gradients between two processes of this machine.

    python tests/benchmarks/all_reduce.py --rounds=8

Starts the two workers itself, one CPU device each: a new pair for each network and for every four rounds,
killed after five minutes. All variants take turns within each round, so that a busy machine slows all alike;
before each the workers meet, so that none is timed while it waits for the other. Of bfloat16, the time
includes the casts.
"""

from __future__ import annotations

import datetime
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
flags.DEFINE_integer("rounds", 8, "How often each variant is timed.", lower_bound=1)
flags.DEFINE_string("output", "configs/results/all_reduce.json", "JSON file for the result.")
flags.DEFINE_string("worker_of", None, "What the program gives the workers it starts: whose gradients.")

TIMEOUT_SECONDS = 300
ROUNDS_OF_A_PAIR = 4
IMPLEMENTATIONS = ("ring", "auto")
PACK_MEGABYTES = (0, 1, 4, 16, 64)
WIRE_DTYPES = ("float32", "bfloat16")
VARIANTS = {
    f"{implementation}, {megabytes} MiB, {wire_dtype}": (implementation, megabytes, wire_dtype)
    for implementation in IMPLEMENTATIONS
    for megabytes in PACK_MEGABYTES
    for wire_dtype in WIRE_DTYPES
}


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Keras's network in its order, without the biases of the convolutions, which only Keras's has."""
    from tf_largebatch._keras import keras

    layers = keras.applications.ResNet50(weights=None).layers
    kept = [layer.trainable_weights[: 1 if isinstance(layer, keras.layers.Conv2D) else None] for layer in layers]
    return [tuple(weight.shape) for weights in kept for weight in weights]


def alexnet_shapes() -> list[tuple[int, ...]]:
    """Kernels and biases of Caffe's bvlc_alexnet, in which three convolutions see half of the channels."""
    kernels = [(11, 11, 3, 96), (5, 5, 48, 256), (3, 3, 256, 384), (3, 3, 192, 384), (3, 3, 192, 256)]
    kernels += [(9216, 4096), (4096, 4096), (4096, 1000)]
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


# With the number of tensors and of values.
NETWORKS = {"ResNet-50": (resnet50_shapes, 161, 25_557_032), "AlexNet": (alexnet_shapes, 16, 60_965_224)}


def measure(network: str) -> dict:
    """One worker's part: the times of every round, and the error of sums in bfloat16."""
    from tf_largebatch import run_folder
    from tf_largebatch._keras import tf
    from tf_largebatch.collectives_config import Collectives
    from tf_largebatch.distribution import strategies
    from tf_largebatch.distribution.collectives import all_reduce_sum, communication_options

    # TensorFlow warns of many functions that are called once.
    tf.get_logger().setLevel("ERROR")
    # In a call's options TensorFlow takes 0 and AUTO to mean the strategy's own, so that these must be those.
    strategy = strategies.strategy(collectives=Collectives(pack_megabytes=0))
    shapes_of, num_tensors, num_values = NETWORKS[network]
    shapes = shapes_of()
    assert (len(shapes), sum(map(math.prod, shapes))) == (num_tensors, num_values)
    draw = tf.random.Generator.from_seed(strategy.cluster_resolver.task_id)
    gradients = [draw.normal(shape) for shape in shapes]

    def prepared(implementation, megabytes, wire_dtype):
        options = communication_options(Collectives(implementation, megabytes), has_gpus=False)

        def sums(*gradients):
            return all_reduce_sum(gradients, wire_dtype, options=options)

        step = tf.function(lambda *gradients: strategy.run(sums, args=gradients), autograph=False)
        step(*gradients)
        return step

    steps = {name: prepared(*variant) for name, variant in VARIANTS.items()}
    meet = tf.function(lambda: strategy.run(all_reduce_sum, args=([tf.ones(())],)), autograph=False)
    exact, rounded = (steps[f"auto, 4 MiB, {wire_dtype}"](*gradients) for wire_dtype in WIRE_DTYPES)
    errors = [float(tf.norm(b - a) / tf.norm(a)) for a, b in zip(exact, rounded)]
    del exact, rounded
    load_average = [os.getloadavg()[0]]
    milliseconds = {name: [] for name in steps}
    for _ in range(FLAGS.rounds):
        for name, step in steps.items():
            meet()
            start = time.perf_counter()
            step(*gradients)
            milliseconds[name].append(1e3 * (time.perf_counter() - start))
    load_average.append(os.getloadavg()[0])
    return {
        "milliseconds": milliseconds,
        "bfloat16_relative_error": {"median": statistics.median(errors), "largest": max(errors)},
        "load_average": load_average,
        "environment": run_folder.environment(),
    }


def measure_in_two_processes(network: str, rounds: int) -> dict:
    """Starts both workers and gives what the first measured."""
    addresses = local_ports.free_addresses(2)
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            command = [sys.executable, __file__, f"--worker_of={network}", f"--rounds={rounds}"]
            environment = {**os.environ, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": ""}
            processes.append(subprocess.Popen([*command, f"--output={folder}/{index}.json"], env=environment))
        try:
            # A worker that fails leaves the other waiting.
            while any(process.poll() is None for process in processes) and not any(
                process.returncode for process in processes
            ):
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
        if any(process.wait() for process in processes):
            sys.exit(f"{network}: a worker failed, or did not end within {TIMEOUT_SECONDS} seconds.")
        return json.loads(Path(folder, "0.json").read_text())


def measure_all_rounds(network: str) -> dict:
    """What the result says of a network: medians over the rounds of all pairs of workers."""
    starts = range(0, FLAGS.rounds, ROUNDS_OF_A_PAIR)
    parts = [measure_in_two_processes(network, min(ROUNDS_OF_A_PAIR, FLAGS.rounds - start)) for start in starts]
    times = {name: [value for part in parts for value in part["milliseconds"][name]] for name in VARIANTS}
    return {
        "tensors": NETWORKS[network][1],
        "values": NETWORKS[network][2],
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "fastest_milliseconds": {name: min(values) for name, values in times.items()},
        "bfloat16_relative_error": parts[0]["bfloat16_relative_error"],
        "load_average": [load for part in parts for load in part["load_average"]],
        "environment": parts[0]["environment"],
    }


def table(measured: dict) -> str:
    """Median times of one network; a line for each size of packs."""
    columns = [(implementation, wire_dtype) for implementation in IMPLEMENTATIONS for wire_dtype in WIRE_DTYPES]
    lines = ["MiB per pack" + "".join(f"{' '.join(column):>16}" for column in columns)]
    for megabytes in PACK_MEGABYTES:
        medians = [measured["milliseconds"][f"{i}, {megabytes} MiB, {wire_dtype}"] for i, wire_dtype in columns]
        lines.append(f"{megabytes or 'all in one':>12}" + "".join(f"{median:13.0f} ms" for median in medians))
    return "\n".join(lines)


def main(_):
    if FLAGS.worker_of:
        # Ends this process whatever it does; TensorFlow has it ignore SIGTERM.
        signal.alarm(TIMEOUT_SECONDS)
        Path(FLAGS.output).write_text(json.dumps(measure(FLAGS.worker_of)))
        return
    result = {
        "what": "one all-reduce of float32 gradients between 2 processes of one machine, median over the rounds",
        "command": f"python tests/benchmarks/all_reduce.py --rounds={FLAGS.rounds}",
        "date": str(datetime.date.today()),
        "rounds": FLAGS.rounds,
    }
    for network in NETWORKS:
        measured = result[network] = measure_all_rounds(network)
        environment = measured.pop("environment")
        load, error = measured["load_average"], measured["bfloat16_relative_error"]
        print(f"\n{network}: {measured['tensors']} tensors, {measured['values']:,} values, {FLAGS.rounds} rounds")
        print(f"load average {min(load):.1f} to {max(load):.1f}\n{table(measured)}")
        print(f"error of a sum in bfloat16, relative: median {error['median']:.2e}, largest {error['largest']:.2e}")
    result["environment"] = environment
    Path(FLAGS.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
