"""A recipe does not know the machine: one process, two devices and two workers give the same weights.

In float64, where rounding cannot hide a fault, to 1e-9 after 20 steps; one float32 step to 1e-6.
Batch norm is off: its statistics are still those of one replica.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import launcher, python

from tf_largebatch import LARS  # noqa: F401  (registers what the saved models name)
from tf_largebatch._keras import keras

BATCH = 64


def train(workers, folder, precision, steps, seed=0):
    """Final weights and result.json of one recipe on each cluster."""
    epochs = min(steps, 2)
    recipe = [
        launcher("train"),
        "--config=fashion_mnist_lars_b1k",
        *("--set", f"precision={precision}"),
        *("--set", "network_options={batch_norm: false, width: 8}"),
        *("--set", "dataset=synthetic"),
        # An odd number of test images, so that evaluation has to fill its last batch.
        *("--set", f"dataset_options={{num_train: {BATCH * steps // epochs}, num_test: 101}}"),
        *("--set", f"global_batch_size={BATCH}"),
        *("--set", f"epochs={epochs}"),
        *("--set", "schedule.warmup_epochs=0"),
        *("--set", f"seed={seed}"),
    ]
    one = python(*recipe, f"--workdir={folder}/one")
    assert one.returncode == 0, one.stderr
    devices = python(*recipe, f"--workdir={folder}/devices", "--cpu_devices=2")
    assert devices.returncode == 0, devices.stderr
    outputs = workers.run(2, *recipe, f"--workdir={folder}/workers")
    assert "2 replicas (2 workers x 1)" in outputs[0]
    assert "accuracy: " in outputs[0] and "accuracy" not in outputs[1], "only the chief reports"
    runs = {}
    for name in ("one", "devices", "workers"):
        with open(folder / name / "result.json") as file:
            result = json.load(file)
        assert result["steps"] == steps
        weights = keras.models.load_model(str(folder / name / "model.keras")).get_weights()
        runs[name] = [np.asarray(weight, np.float64) for weight in weights], result
    return runs


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("cluster", ["devices", "workers"])
class TestFloat64:
    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory):
        from conftest import Workers

        workers = Workers()
        yield train(workers, tmp_path_factory.mktemp("float64"), "float64", steps=20)
        workers.end()

    def test_weights_agree_to_1e9_after_20_steps(self, runs, cluster):
        differences = [relative(ours, alone) for ours, alone in zip(runs[cluster][0], runs["one"][0])]
        # The figures of the README: pytest -s shows them.
        print(f"{cluster}, float64, 20 steps, largest of each tensor: {max(differences):.1e}")
        assert max(differences) < 1e-9

    def test_results_agree(self, runs, cluster):
        for key in ("train_loss", "test_loss"):
            assert runs[cluster][1][key] == pytest.approx(runs["one"][1][key], rel=1e-6)
        # Metrics are counted in float32 whatever the precision.
        for key in ("train_accuracy", "test_accuracy"):
            assert runs[cluster][1][key] == pytest.approx(runs["one"][1][key], rel=1e-6)

    def test_it_has_learned_something(self, runs, cluster):
        # Equal weights prove nothing if nothing moved them.
        assert runs[cluster][1]["test_loss"] < 2.0


@pytest.mark.parametrize("cluster", ["devices", "workers"])
class TestFloat32:
    @pytest.fixture(scope="class")
    def runs(self, tmp_path_factory):
        from conftest import Workers

        workers = Workers()
        yield train(workers, tmp_path_factory.mktemp("float32"), "float32", steps=1)
        workers.end()

    def test_one_step_agrees_to_1e6(self, runs, cluster):
        ours, alone = runs[cluster][0], runs["one"][0]
        # Biases begin at zero: after one step they are the gradient's own rounding, and are compared as
        # part of all weights.
        kernels = max(relative(a, b) for a, b in zip(ours, alone) if b.ndim > 1)
        together = relative(np.concatenate([a.ravel() for a in ours]), np.concatenate([b.ravel() for b in alone]))
        biases = max(relative(a, b) for a, b in zip(ours, alone) if b.ndim == 1)
        print(f"{cluster}, float32, one step: kernels {kernels:.1e}, all {together:.1e}, biases {biases:.1e}")
        assert kernels < 1e-6 and together < 1e-6

    def test_results_agree(self, runs, cluster):
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert runs[cluster][1][key] == pytest.approx(runs["one"][1][key], rel=1e-5)
