"""A recipe does not know the machine: the table of README.md, "A recipe does not know the machine".

Batch norm in groups of 32, dropout, augmentation, global batch 256, cut in six ways:
in float64, where rounding cannot hide a fault, to 1e-9 after 30 steps; one float32 step to 1e-6. What 30
float32 steps make of rounding is printed (`pytest -s`), and bounds nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT, Workers, python, tf_configs

PROGRAM = str(ROOT / "tests" / "invariance_runs.py")
# (workers, replicas of a worker, micro-batches): of 32 examples each but for one of 256.
ALONE = (1, 1, 8)
CLUSTERS = [(1, 1, 1), (1, 2, 4), (1, 4, 2), (2, 2, 2), (4, 1, 2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{cluster: ({(dtype, steps): weights}, result.json of the float64 run)}"""
    folder = tmp_path_factory.mktemp("invariance")
    found = {}
    for cluster in [ALONE, *CLUSTERS]:
        workers, devices, micro_batches = cluster
        output = folder / ("x".join(map(str, cluster)) + ".npz")
        arguments = [str(output), str(devices), str(256 // (workers * devices * micro_batches))]
        if workers == 1:
            done = python(PROGRAM, *arguments, timeout=500)
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            job = Workers()
            try:
                processes = [job.start(PROGRAM, *arguments, TF_CONFIG=config) for config in tf_configs(workers)]
                texts = [process.communicate(timeout=500)[0] for process in processes]
                for process, text in zip(processes, texts):
                    assert process.returncode == 0, text[-3000:]
            finally:
                job.end()
            assert "accuracy: " in texts[0] and "accuracy" not in texts[1], "only the chief reports"
        weights = {}
        with np.load(output) as arrays:
            assert tuple(arrays["split"]) == cluster
            for key in arrays:
                if key != "split":
                    dtype, steps, _ = key.split("/")
                    weights.setdefault((dtype, int(steps)), []).append(arrays[key].astype(np.float64))
        result = json.loads((output.with_suffix("") / "float64_30" / "result.json").read_text())
        found[cluster] = weights, result
    return found


def relative(a, b):
    # A dropout layer's own count of steps stays zero here.
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def differences(runs, cluster, which):
    return [relative(ours, alone) for ours, alone in zip(runs[cluster][0][which], runs[ALONE][0][which])]


def name(cluster):
    return "{} workers x {} devices x {} micro-batches".format(*cluster)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=name)
class TestCuts:
    def test_float64_to_1e9_after_30_steps(self, runs, cluster):
        largest = max(differences(runs, cluster, ("float64", 30)))
        print(f"{name(cluster)}: float64, 30 steps: {largest:.1e}")
        assert largest < 1e-9

    def test_one_float32_step_to_1e6(self, runs, cluster):
        ours, alone = runs[cluster][0]["float32", 1], runs[ALONE][0]["float32", 1]
        each = differences(runs, cluster, ("float32", 1))
        # A bias that begins at zero is, after one step, the gradient's own rounding, and so is what batch
        # norm makes of it: those are bounded as part of all weights together.
        kernels = max(difference for difference, weight in zip(each, alone) if weight.ndim > 1)
        together = relative(np.concatenate([a.ravel() for a in ours]), np.concatenate([b.ravel() for b in alone]))
        drift = max(differences(runs, cluster, ("float32", 30)))
        print(f"{name(cluster)}: float32, one step: kernels {kernels:.1e}, all {together:.1e}, each {max(each):.1e}")
        print(f"{name(cluster)}: float32, 30 steps: {drift:.1e}")
        assert kernels < 1e-6 and together < 1e-6

    def test_results_agree(self, runs, cluster):
        # Metrics are counted in float32 whatever the precision.
        for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert runs[cluster][1][key] == pytest.approx(runs[ALONE][1][key], rel=1e-6), key

    def test_it_has_learned_something(self, runs, cluster):
        # Equal weights prove nothing if nothing moved them.
        assert runs[cluster][1]["train_loss"] < 2.0
