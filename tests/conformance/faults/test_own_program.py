"""A user's own program, with Keras's `fit` and one callback of ours, survives as a recipe does."""

from __future__ import annotations

import json
import re

import fault_runs
import pytest
from conftest import ROOT

from tf_largebatch._keras import KERAS_3

# Keras 2 has a batch norm's moving statistics per replica, which cannot be resumed to the bit either.
WEIGHTS = "weights" if KERAS_3 else "trained"
pytestmark = pytest.mark.timeout(300)


def program(folder, *options: str) -> str:
    # On several replicas Keras 2's dropout cannot be resumed.
    network = [] if KERAS_3 else ["--no_dropout"]
    return " ".join([str(ROOT / "tests" / "interrupted_fit.py"), str(folder), "--data=arrays", *network, *options])


def told(output: str) -> list[dict]:
    """What the workers have printed at their end."""
    return [json.loads(text) for text in re.findall(r"^\[worker \d\] (\{.*\})$", output, flags=re.MULTILINE)]


def test_killed_again_and_again_it_ends_with_the_same_weights(tmp_path):
    undisturbed = fault_runs.run(tmp_path / "a", program=program(tmp_path / "a" / "checkpoints"))
    assert undisturbed.code == 0, undisturbed.output[-3000:]
    # Worker 1 is killed at the 8th step of every attempt. Each saves something, so one restart at a time is enough.
    killed = program(tmp_path / "b" / "checkpoints", "--stop_at=8", "--stopped_rank=1")
    done = fault_runs.run(tmp_path / "b", "--max_restarts=1", program=killed)
    assert done.code == 0, done.output[-3000:]
    assert [attempt["exit_code"] for attempt in done.record["attempts"]] == [137, 137, 0]
    assert [attempt["step"] for attempt in done.record["attempts"]] == [6, 12, 16]
    reference, same = told(undisturbed.output)
    assert reference == same and reference["steps"] == 16
    for resumed in told(done.output):
        assert (resumed[WEIGHTS], resumed["steps"]) == (reference[WEIGHTS], 16)
        assert resumed["losses"][-1] == pytest.approx(reference["losses"][-1], rel=1e-6)


def test_one_worker_is_told_to_stop_and_all_save(tmp_path):
    folder = tmp_path / "a" / "checkpoints"
    stopped = fault_runs.run(
        tmp_path / "a", program=program(folder, "--every_steps=0", "--stop_at=7", "--stopped_rank=1", "--how=SIGUSR1")
    )
    assert stopped.code == 75, stopped.output[-3000:]
    assert [worker["exit_code"] for worker in stopped.record["attempts"][0]["workers"]] == [75, 75]
    (saved,) = folder.glob("step_*")
    assert saved.name in ("step_00000007", "step_00000008")
    resumed = fault_runs.run(tmp_path / "a", program=program(folder))
    undisturbed = fault_runs.run(tmp_path / "b", program=program(tmp_path / "b" / "checkpoints"))
    assert {end[WEIGHTS] for end in told(resumed.output)} == {end[WEIGHTS] for end in told(undisturbed.output)}
