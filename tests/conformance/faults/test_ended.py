"""Faults that no restart helps against: the job ends within the time it says, and names the culprit."""

from __future__ import annotations

import fault_runs
import pytest

pytestmark = pytest.mark.timeout(300)
# Beside the limit that a test sets: imports on a busy machine, and ending what does not end by itself.
MARGIN_SECS = 60


def test_a_worker_that_never_starts(tmp_path):
    limit = 25
    done = fault_runs.run(tmp_path / "run", f"--start_timeout={limit}", fault="1 0 late 1000")
    assert done.code == 124, done.output[-3000:]
    assert f"worker 1 had not started after {limit} s; the job ends with exit code 124." in done.output
    assert limit < done.secs < limit + MARGIN_SECS
    assert not fault_runs.left_over(tmp_path / "run")


@pytest.mark.parametrize("flags", [["--exit_grace=3"], ["--exit_grace=100", "--heartbeat_timeout=5"]])
def test_a_worker_that_ends_early(flags, tmp_path):
    # The second is found by TensorFlow in the other worker, before the launcher's own limit.
    program = str(fault_runs.FOLDER / "uneven_program.py")
    done = fault_runs.run(tmp_path / "run", *flags, program=program)
    assert done.code == 1, done.output[-3000:]
    assert "worker 1 ended early: exit code 0" in done.output
    assert done.secs < MARGIN_SECS + 20
    assert not fault_runs.left_over(tmp_path / "run")


def test_a_port_that_is_taken_after_the_launcher_looked(tmp_path):
    done = fault_runs.run(tmp_path / "run", fault="1 0 take_port")
    assert done.code == 1, done.output[-3000:]
    assert "of this worker (worker 1) is not free" in done.output
    assert "worker 1 failed first: exit code 1" in done.output
    assert done.secs < MARGIN_SECS
    again = fault_runs.run(tmp_path / "run", "--max_restarts=1", "--set=epochs=2", fault="1 0 take_port")
    assert again.code == 0, again.output[-3000:]
    first, second = again.record["attempts"]
    assert not set(first["addresses"]) & set(second["addresses"])


def test_workers_that_do_not_share_the_folder(tmp_path):
    # Worker 1 has a folder of its own mounted where worker 0 has its own: what other hosts would see.
    (tmp_path / "run").mkdir()
    done = fault_runs.run(tmp_path / "run", fault=f"1 0 own_folder {tmp_path / 'run'}")
    assert done.code == 2, done.output[-3000:]
    assert f"--workdir: '{tmp_path / 'run'}' of worker 0 is not seen by worker 1" in done.output
    assert not fault_runs.left_over(tmp_path / "run")
