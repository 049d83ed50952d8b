"""Keras's own fit, evaluate, predict, optimizers and callbacks give on any replicas what they give on one.

What one process computes with whole batches is the right value; `TestOneProcess` derives some of those by hand.
The cases are in tests/strategy_cases.py; each was wrong, raised or hung with stock Keras 3. Loss scaling is in
test_loss_scaling.py, clipping in steps of an optimizer in test_optimizer_replicas.py, and what an optimizer's
own arithmetic can get wrong in test_lars.py and test_lamb.py.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT, Workers, python, tf_configs

from tf_largebatch._keras import KERAS_3

PROGRAM = str(ROOT / "tests" / "strategy_cases.py")
# The quickest cases that use several replicas of several workers in different ways.
FEW = ["nested", "uneven", "statistics", "clipped"]
CASES = ["nested", "uneven", "many_steps", "clipped", "accumulated", "averaged", "statistics", "muon", "callbacks"]
CASES += ["masks", "validated", "scaled", "single_number"]
CLUSTERS = {"2 replicas": CASES, "4 replicas": FEW, "2 workers": CASES, "2 workers x 2": FEW}

pytestmark = pytest.mark.skipif(not KERAS_3, reason="Keras 2 is not repaired")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{cluster: one {case: numbers} for each of its processes}"""
    folder = tmp_path_factory.mktemp("strategies")
    found = {}
    for replicas, cases in ((1, CASES), (2, CASES), (4, FEW)):
        output = folder / f"{replicas}.json"
        done = python(PROGRAM, str(output), str(folder / f"files{replicas}"), str(replicas), *cases, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        found[f"{replicas} replica" + "s" * (replicas > 1)] = [json.loads(output.read_text())]
    for devices, name, cases in ((1, "2 workers", CASES), (2, "2 workers x 2", FEW)):
        job = Workers()
        outputs = [folder / f"{name} {rank}.json" for rank in range(2)]
        # One folder for the files of both: that is where they got into each other's way.
        arguments = [str(folder / name), str(devices), *cases]
        try:
            processes = [
                job.start(PROGRAM, str(output), *arguments, TF_CONFIG=config)
                for output, config in zip(outputs, tf_configs(2))
            ]
            for process in processes:
                text, _ = process.communicate(timeout=400)
                assert process.returncode == 0, text[-3000:]
        finally:
            job.end()
        found[name] = [json.loads(output.read_text()) for output in outputs]
    return found


def assert_same(ours, right, place=""):
    if isinstance(right, dict):
        assert ours.keys() == right.keys(), place
        for key in right:
            assert_same(ours[key], right[key], f"{place}/{key}")
    else:
        assert ours == pytest.approx(right, rel=2e-5, abs=1e-6), place


@pytest.mark.parametrize(("cluster", "case"), [(cluster, case) for cluster in CLUSTERS for case in CLUSTERS[cluster]])
def test_as_one_process(runs, cluster, case):
    for process in runs[cluster]:
        assert_same(process[case], runs["1 replica"][0][case])


class TestOneProcess:
    """What the others are compared with, where it can be worked out."""

    @pytest.fixture
    def alone(self, runs):
        return runs["1 replica"][0]

    def test_clipped_step_has_the_length_of_the_clip(self, alone):
        assert alone["clipped"]["global_clipnorm"]["step"] == pytest.approx(0.5)
        # Kernel and bias, each clipped to a half.
        assert alone["clipped"]["clipnorm"]["step"] == pytest.approx(np.sqrt(0.5))

    def test_moving_mean_is_that_of_all_examples(self, alone):
        # Each batch is half zeros and half ones; after four, with momentum 0.9:
        assert alone["statistics"]["even"]["mean"] == pytest.approx(0.5 * (1 - 0.9**4))
        # The last batch has its four zeros and one of the ones.
        before = 0.5 * (1 - 0.9**3)
        assert alone["statistics"]["uneven"]["mean"] == pytest.approx(0.9 * before + 0.1 * 0.2)

    def test_steps_per_execution_changes_nothing(self, alone):
        assert_same(alone["many_steps"]["every 3"], alone["many_steps"]["every 2"])
        assert_same(alone["many_steps"]["every 3, unknown length"], alone["many_steps"]["every 2, unknown length"])

    def test_accumulation_of_two_halves_is_the_step_of_the_whole(self, alone):
        draw = np.random.default_rng(0)
        x, y = draw.normal(size=(32, 3)), draw.normal(size=(32, 1))
        kernel, bias = np.full((3, 1), 0.5), np.zeros(1)
        for update in range(6):
            batch = slice(16 * (update % 2), 16 * (update % 2) + 16)
            error = x[batch] @ kernel + bias - y[batch]
            # PolynomialDecay(0.1, 4, 0.01): the schedule counts updates.
            rate = 0.01 + (0.1 - 0.01) * (1 - min(update, 4) / 4)
            kernel, bias = kernel - rate * 2 * x[batch].T @ error / 16, bias - rate * 2 * error.mean()
        assert alone["accumulated"]["plain"]["weights"] == pytest.approx([*kernel.ravel(), *bias], rel=1e-4)
        assert alone["accumulated"]["plain"]["updates"] == 6

    def test_backup_went_on_where_it_was(self, alone):
        assert alone["callbacks"]["epochs"] == [2]

    def test_the_infinite_step_is_left_out(self, alone):
        draw = np.random.default_rng(0)
        x, y = draw.normal(size=(32, 3)), draw.normal(size=(32, 1))
        kernel, bias = np.full((3, 1), 0.5), np.zeros(1)
        for first in (0, 16, 24):
            batch = slice(first, first + 8)
            error = x[batch] @ kernel + bias - y[batch]
            kernel, bias = kernel - 0.05 * 2 * x[batch].T @ error / 8, bias - 0.05 * 2 * error.mean()
        for result in alone["scaled"].values():
            assert result["weights"] == pytest.approx([*kernel.ravel(), *bias], rel=1e-4)
            assert result["scale"] == 4.0

    def test_masks_differ(self, alone):
        assert alone["masks"]["distinct"]
