"""Faults that a job survives: its final weights are bit for bit those of a run that nothing disturbed."""

from __future__ import annotations

import os
import signal
import time

import fault_runs
import numpy as np
import pytest
from fault_runs import STEPS

pytestmark = pytest.mark.timeout(400)
RESTARTS = "--max_restarts=3"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights of a run on two workers."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = fault_runs.run(workdir)
    assert done.code == 0, done.output[-3000:]
    return fault_runs.weights(workdir)


@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        ("1 18 SIGKILL", "worker 1 failed first: killed by SIGKILL"),
        ("0 18 SIGKILL", "worker 0 failed first: killed by SIGKILL"),
        ("1 18 SIGSTOP", "worker 1 no longer answered, as worker 0 found"),
        ("1 18 raise", "worker 1 failed first: exit code 1"),
    ],
)
def test_a_worker_that_fails(fault, blamed, undisturbed, tmp_path):
    done = fault_runs.run(tmp_path / "run", RESTARTS, fault=fault)
    assert done.code == 0, done.output[-3000:]
    assert f"{blamed} " in done.output and "restart 1 of 3" in done.output
    assert [attempt["exit_code"] == 0 for attempt in done.record["attempts"]] == [False, True]
    # Saved every 5 steps: of 17 made, 2 are made again.
    assert "step_00000015: epoch 2, step 7" in done.output
    assert fault_runs.same(fault_runs.weights(tmp_path / "run"), undisturbed)
    assert not fault_runs.left_over(tmp_path / "run")


def test_sigterm_to_one_worker(undisturbed, tmp_path):
    stopped = fault_runs.run(tmp_path / "run", fault="1 18 SIGTERM")
    assert stopped.code == 75, stopped.output[-3000:]
    assert [worker["exit_code"] for worker in stopped.record["attempts"][0]["workers"]] == [75, 75]
    resumed = fault_runs.run(tmp_path / "run")
    assert resumed.code == 0, resumed.output[-3000:]
    # No step is lost: all have saved after the same one, at most one later than where it was asked.
    assert any(f"step_{step:08}: epoch 3, step {step - 16}" in resumed.output for step in (18, 19))
    assert fault_runs.same(fault_runs.weights(tmp_path / "run"), undisturbed)


def test_the_launcher_killed_and_the_newest_checkpoint_damaged(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    with fault_runs.started(workdir, fault=f"0 23 touch {tmp_path}/there") as launcher:
        fault_runs.wait_for(tmp_path / "there")
        launcher.kill()
        launcher.wait(timeout=30)
        until = time.monotonic() + 10
        while fault_runs.left_over(workdir) and time.monotonic() < until:
            time.sleep(0.1)
        assert not fault_runs.left_over(workdir), "workers outlive their launcher"
    saved = sorted((workdir / "checkpoints").glob("step_*"))
    assert len(saved) == 2 and saved[-1].name >= "step_00000020"
    (data,) = saved[-1].glob("variables.data*")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    resumed = fault_runs.run(workdir)
    assert resumed.code == 0, resumed.output[-3000:]
    assert f"{saved[-1].name} is damaged" in resumed.output
    assert f"going on from {saved[0]}" in resumed.output
    assert fault_runs.same(fault_runs.weights(workdir), undisturbed)


def test_a_late_worker(undisturbed, tmp_path):
    done = fault_runs.run(tmp_path / "run", fault="1 0 late 20")
    assert done.code == 0 and done.secs > 20, done.output[-3000:]
    assert fault_runs.same(fault_runs.weights(tmp_path / "run"), undisturbed)


def test_ctrl_c_saves_and_the_same_command_goes_on(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    with fault_runs.started(workdir, fault=f"0 13 touch {tmp_path}/there") as launcher:
        fault_runs.wait_for(tmp_path / "there")
        os.kill(launcher.pid, signal.SIGINT)
        stopped = fault_runs.ended(launcher, workdir)
    assert stopped.code == 130, stopped.output[-3000:]
    assert "stopped by SIGINT, and saved" in stopped.output
    assert fault_runs.run(workdir).code == 0
    assert fault_runs.same(fault_runs.weights(workdir), undisturbed)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_workers(before, after, tmp_path):
    exactly = "--set=precision=float64"
    reference = fault_runs.run(tmp_path / "reference", exactly, "--local_workers=1")
    assert reference.code == 0, reference.output[-3000:]
    workdir = tmp_path / "run"
    stopped = fault_runs.run(workdir, exactly, f"--local_workers={before}", fault="0 18 SIGKILL")
    assert stopped.code == 137, stopped.output[-3000:]
    resumed = fault_runs.run(workdir, exactly, f"--local_workers={after}")
    assert resumed.code == 0 and "step_00000015" in resumed.output, resumed.output[-3000:]
    for one, other in zip(fault_runs.weights(workdir), fault_runs.weights(tmp_path / "reference")):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    assert resumed.record["attempts"][-1]["step"] == STEPS
