"""Peak memory and throughput of global batch 32,768 in micro-batches of 256, against global batch 256.

    python tests/benchmarks/micro_batches.py [--rounds=3] [--output=configs/results/micro_batches.json]

The network, the data (65,536 images of 28x28 bytes) and the examples a device takes at once are the same. Each run
is a process of its own; the two kinds take turns, and medians are compared. "before" is what a process takes that
has built all and trained nothing: data, TensorFlow, Keras.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 3, "Runs of each kind.")
flags.DEFINE_string("output", None, "JSON file for the result.")
flags.DEFINE_integer("batch", 0, "Global batch of this process; 0 starts the others.")

MICRO_BATCH = 256
BATCHES = (256, 32768)


def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one(batch):
    """Trains, and prints a line of JSON."""
    from tf_largebatch import config, training
    from tf_largebatch.distribution.cluster import Cluster

    recipe = config.load(
        "fashion_mnist_lars_b1k",
        [
            f"global_batch_size={batch}",
            "network_options={width: 8, batch_norm_group_size: 32}",
            "dataset=synthetic",
            "dataset_options={num_train: 65536, num_test: 256}",
            "epochs=4",
            "schedule.warmup_epochs=0",
            "evaluate_every_epochs=0",
        ],
    )
    before = []

    class Before(training.Throughput):
        def on_train_begin(self, logs=None):
            before.append(peak_bytes())

    training.Throughput = Before
    with tempfile.TemporaryDirectory() as folder:
        result = training.run(recipe, Cluster(), Path(folder), max_per_replica_batch_size=MICRO_BATCH)
    assert result["split"]["micro_batches"] == batch // MICRO_BATCH
    numbers = {"images_per_second": result["images_per_second"], "before": before[0], "peak": peak_bytes()}
    print("RESULT", json.dumps({**numbers, "environment": result["environment"]}))


def main(_):
    if FLAGS.batch:
        one(FLAGS.batch)
        return
    runs = {batch: [] for batch in BATCHES}
    for _ in range(FLAGS.rounds):
        for batch in BATCHES:
            command = [sys.executable, __file__, f"--batch={batch}"]
            text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout
            (line,) = [line for line in text.splitlines() if line.startswith("RESULT")]
            runs[batch].append(json.loads(line.removeprefix("RESULT")))
    environment = runs[256][0]["environment"]
    medians = {
        batch: {key: statistics.median(run[key] for run in found) for key in ("images_per_second", "before", "peak")}
        for batch, found in runs.items()
    }
    small, large = (medians[batch] for batch in BATCHES)
    ratios = {key: large[key] / small[key] for key in ("images_per_second", "peak")}
    for batch, found in medians.items():
        print(
            f"global batch {batch:6}: {found['images_per_second']:7.0f} images/s, "
            f"peak {found['peak'] / 2**20:6.0f} MiB, of it {(found['peak'] - found['before']) / 2**20:5.0f} in training"
        )
    print(f"ratios: throughput {ratios['images_per_second']:.3f}, peak memory {ratios['peak']:.3f}")
    if FLAGS.output:
        result = {
            "what": f"global batch {BATCHES[1]} in micro-batches of {MICRO_BATCH} against global batch {BATCHES[0]}",
            "command": "python tests/benchmarks/micro_batches.py --output=configs/results/micro_batches.json",
            "rounds": FLAGS.rounds,
            "medians": medians,
            "ratios": ratios,
            "environment": environment,
        }
        Path(FLAGS.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
