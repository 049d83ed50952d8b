"""Program for tests: one recipe on whatever devices and workers there are.

    python invariance_runs.py OUTPUT.npz DEVICES MAX_PER_REPLICA_BATCH_SIZE

DEVICES logical CPUs in this process, or in each worker of TF_CONFIG. The recipe is the packaged Fashion-MNIST
network with batch norm in groups of 32, dropout and augmentation, at global batch 256: 30 steps in float64, and
one and 30 in float32. OUTPUT, written by the chief, holds arrays named `dtype/steps/index of the weight`, and
`split`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import numpy as np
import worker_devices

from tf_largebatch import config, training
from tf_largebatch._keras import keras
from tf_largebatch.datasets import fashion_mnist
from tf_largebatch.distribution import cluster, strategies

BATCH = 256


def load(steps):
    (images, labels), test = fashion_mnist.load()
    return (images[: BATCH * steps], labels[: BATCH * steps]), test


def recipe(precision, steps):
    return config.load(
        "fashion_mnist_lars_b1k",
        [
            f"precision={precision}",
            f"global_batch_size={BATCH}",
            "network_options={width: 8, batch_norm_group_size: 32, dropout: 0.25}",
            "dataset=invariance_runs:load",
            f"dataset_options={{steps: {steps}}}",
            "augmentation=flip_and_shift",
            "epochs=1",
            "schedule.warmup_epochs=0",
            "evaluate_every_epochs=0",
        ],
    )


if __name__ == "__main__":
    output, devices, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    here = cluster.from_environment(os.environ)
    if here.num_workers == 1:
        strategies.set_logical_cpus(devices)
    elif devices > 1:
        worker_devices.use(devices)
    # A process can be part of one cluster, once.
    strategies.strategy = functools.cache(strategies.strategy)
    arrays = {}
    for precision, steps in (("float64", 30), ("float32", 1), ("float32", 30)):
        keras.backend.clear_session()
        workdir = output.with_suffix("") / f"{precision}_{steps}"
        result = training.run(recipe(precision, steps), here, workdir, max_per_replica_batch_size=limit)
        assert result["steps"] == steps
        if here.is_chief:
            weights = keras.models.load_model(str(workdir / "model.keras"), compile=False).get_weights()
            arrays.update({f"{precision}/{steps}/{index}": weight for index, weight in enumerate(weights)})
            arrays["split"] = [result["split"][key] for key in ("num_workers", "replicas_per_worker", "micro_batches")]
    if here.is_chief:
        np.savez(output, **arrays)
