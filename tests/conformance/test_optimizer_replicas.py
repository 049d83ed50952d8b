"""An update is the same on 1, 2 and 4 replicas and on two processes: sparse gradients, clipping, EMA.

Keras's own SGD goes through the same suite.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT, Workers, python

PROGRAM = str(ROOT / "tests" / "replica_updates.py")
CLIPPED = ["LARS clipnorm", "LARS clipvalue", "LARS global", "LAMB global"]
CASES = ["LARS", "SGD", "LAMB", "keras.SGD", "LARS torch nesterov", "LARS rows", "LARS ema", *CLIPPED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{dtype: {(case, replicas): weights in order}}, replicas "processes" for two of them."""
    folder = tmp_path_factory.mktemp("replicas")
    for replicas in (1, 2, 4):
        done = python(PROGRAM, str(folder / f"{replicas}.npz"), str(replicas), timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    workers = Workers()
    try:
        workers.run(2, PROGRAM, str(folder / "processes.npz"), timeout=500)
    finally:
        workers.end()
    weights = {"float64": {}, "float32": {}}
    for replicas in (1, 2, 4, "processes"):
        with np.load(folder / f"{replicas}.npz") as arrays:
            for key, array in arrays.items():
                dtype, case, _ = key.split("/")
                assert array.dtype == dtype
                weights[dtype].setdefault((case, replicas), []).append(array.astype(np.float64))
    return weights


@pytest.fixture(scope="module")
def float64(runs):
    return runs["float64"]


@pytest.fixture(scope="module")
def float32(runs):
    return runs["float32"]


def largest_difference(weights, case, replicas):
    pairs = zip(weights[case, replicas], weights[case, 1])
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


@pytest.mark.parametrize("replicas", [2, 4, "processes"])
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_in_float64(float64, case, replicas):
    assert largest_difference(float64, case, replicas) < 1e-9


@pytest.mark.parametrize("replicas", [2, 4, "processes"])
@pytest.mark.parametrize("case", CASES)
def test_one_step_in_float32(float32, case, replicas):
    assert largest_difference(float32, case, replicas) < 1e-6


@pytest.mark.parametrize("replicas", [2, 4, "processes"])
def test_keras_clips_after_the_reduction(float64, replicas):
    # Stock Keras 3 clips each replica's own gradient, and repeated rows of it one by one.
    assert largest_difference(float64, "keras.SGD global", replicas) < 1e-9


@pytest.mark.parametrize("case", CLIPPED)
def test_the_clip_is_felt(float64, case):
    # Otherwise its invariance would prove nothing. (LAMB's step does not know the gradient's scale, but its
    # moments do as soon as the clip acts on some steps more than on others.)
    plain, clipped = float64[case.partition(" ")[0], 1], float64[case, 1]
    assert max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(plain, clipped)) > 1e-6


def test_without_adaptation_it_is_keras_sgd(float64):
    for replicas in (1, 2, 4, "processes"):
        for a, b in zip(float64["SGD", replicas], float64["keras.SGD", replicas]):
            np.testing.assert_allclose(a, b, rtol=1e-9)
