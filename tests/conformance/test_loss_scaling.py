"""An inf on one replica alone skips the step on all, and halves the scale on all, without a dead-lock."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT, python

PROGRAM = str(ROOT / "tests" / "loss_scaling.py")


def check(path):
    with np.load(path) as arrays:
        weights, scales = arrays["weights"], arrays["scales"]
    # With eta = 1/2 and no momentum each step halves the weights; the one with the inf leaves them.
    assert weights[:, 0, 0].tolist() == pytest.approx([0.5, 0.5, 0.25, 0.125])
    assert scales.tolist() == [8.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_of_one_process(tmp_path, replicas):
    done = python(PROGRAM, str(tmp_path / "out.npz"), str(replicas), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "out.npz")


def test_two_workers(workers, tmp_path):
    from conftest import tf_configs

    outputs = [tmp_path / "0.npz", tmp_path / "1.npz"]
    processes = [
        workers.start(PROGRAM, str(output), TF_CONFIG=config) for output, config in zip(outputs, tf_configs(2))
    ]
    for process, output in zip(processes, outputs):
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 0, text[-3000:]
        check(output)
