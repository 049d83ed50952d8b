"""How a job of real processes ends: failures, signals, and nothing left running."""

from __future__ import annotations

import dataclasses
import io
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from stub_workers import (
    ENDS_WELL,
    FAILS_WITH_3,
    IGNORES_ALL,
    IGNORES_SIGTERM,
    WAITS,
    all_ready,
    is_running,
    launcher,
    logs,
    pids,
    record,
    run,
    wait_until,
    writes_pid,
)

from tf_largebatch.supervisor import local_processes, supervise, watch
from tf_largebatch.supervisor.job import Job, Worker

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(60)


def test_the_first_failure_ends_the_job_with_its_code_and_is_named(tmp_path):
    code, shown = run(tmp_path, WAITS, FAILS_WITH_3)
    assert code == 3
    assert re.search(r"worker 1 failed first: exit code 3 after [\d.]+ s; the job ends with exit code 3\.$", shown)
    assert f"The last lines of {logs(tmp_path)}/worker_00001.log:\n    no such file\n" in shown
    assert "worker 0: killed by SIGTERM" in shown
    (attempt,) = record(tmp_path)["attempts"]
    assert [worker["exit_code"] for worker in attempt["workers"]] == [143, 3]


def test_a_survivor_that_fails_afterwards_is_not_the_culprit(tmp_path):
    survivor = "import sys, time; time.sleep(1.2); print('UnavailableError'); sys.exit(1)"
    code, shown = run(tmp_path, survivor, "import os; os.kill(os.getpid(), 9)")
    assert code == 137
    assert "worker 1 failed first: killed by SIGKILL" in shown
    assert "worker 0: exit code 1 after" in shown  # it had time to show its own end


def test_of_two_that_are_seen_to_end_together_a_survivor_is_not_the_culprit():
    @dataclasses.dataclass
    class Ended:
        name: str
        exit_code: int
        end: str = "at once"
        ended_at: float = 0.0
        told: frozenset[str] = frozenset()
        lost_a_peer: bool = False

        def has_ended(self) -> bool:
            return True

    watched = watch.Watch([Ended("worker 0", 1), Ended("worker 1", 4)], [], print, watch.Limits())
    watched.until_all_ended()
    assert (watched.exit_code, watched.reason) == (4, "worker 1 failed first: at once")


def test_the_last_worker_to_end_can_be_the_one_that_fails(tmp_path):
    assert run(tmp_path, ENDS_WELL, FAILS_WITH_3)[0] == 3


def test_bad_input_on_every_worker_is_code_2(tmp_path):
    program = "import sys; print('unknown key'); sys.exit(2)"
    assert run(tmp_path, program, program)[0] == 2


def test_only_the_last_twenty_lines_are_repeated(tmp_path):
    shown = run(tmp_path, "for i in range(30): print('line', i)\nraise SystemExit(5)")[1]
    repeated = re.findall(r"^    line (\d+)$", shown, flags=re.MULTILINE)
    assert repeated == [str(number) for number in range(10, 30)]


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    waits_for_ready = f"""
import pathlib, sys, time
folder = pathlib.Path({str(tmp_path)!r})
while not any("ready" in log.read_text() for log in folder.glob("*/attempt_0/worker_00000.log")): time.sleep(0.02)
sys.exit(3)
"""
    code, shown = run(tmp_path, IGNORES_SIGTERM, waits_for_ready, failure_grace=0.5)
    assert code == 3
    assert "worker 0: killed by SIGKILL" in shown


def test_what_a_worker_started_ends_with_it(tmp_path):
    starts_another = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
        open({str(tmp_path)!r} + "/" + str(child.pid) + ".pid", "w").close()
    """
    began = time.monotonic()
    assert run(tmp_path, textwrap.dedent(starts_another))[0] == 0
    (child,) = pids(tmp_path)
    wait_until(lambda: not is_running(child), "the worker's child to end")
    assert time.monotonic() - began < 45


def test_a_worker_that_ends_well_long_before_the_others_has_failed(tmp_path):
    code, shown = run(tmp_path, WAITS, ENDS_WELL, exit_grace=0.5)
    assert code == 1
    assert "worker 1 ended early: exit code 0" in shown
    assert "but worker 0 went on for more than 0.5 s" in shown


def test_workers_may_end_well_one_after_the_other(tmp_path):
    assert run(tmp_path, "import time; time.sleep(0.7)", ENDS_WELL)[0] == 0


def test_a_command_that_does_not_exist_leaves_nothing_running(tmp_path):
    waiting = Worker(0, (sys.executable, "-c", writes_pid(tmp_path, WAITS)))
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        broken = Job((waiting, Worker(1, ("/no/such/program",))), ("a:1", "b:1"))
        supervise.run(lambda attempt: broken, local_processes.LocalProcess, tmp_path, output=io.StringIO())
    time.sleep(1.0)  # were worker 0 still there, it would have left its process id by now
    assert not any(is_running(pid) for pid in pids(tmp_path))


def test_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, ENDS_WELL)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_all_workers_to_end(number, code, tmp_path):
    says_so = """
        import time
        print("ready", flush=True)
        try:
            time.sleep(90)
        except KeyboardInterrupt:
            print("asked")
    """
    with launcher(tmp_path, says_so, says_so) as process:
        all_ready(tmp_path, 2)
        process.send_signal(number)
        shown = process.communicate(timeout=30)[0].decode()
        assert process.returncode == code
        assert "[worker 0] asked" in shown and "[worker 1] asked" in shown
        assert len(pids(tmp_path)) == 2 and not any(is_running(pid) for pid in pids(tmp_path))
    assert record(tmp_path)["attempts"][0]["exit_code"] == code


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL, grace=1000.0) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert not any(is_running(pid) for pid in pids(tmp_path))


def test_workers_that_do_not_end_when_asked_are_killed_after_the_grace(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL, grace=0.5) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert not any(is_running(pid) for pid in pids(tmp_path))


def test_workers_can_be_interrupted_although_the_launcher_began_with_sigint_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with launcher(tmp_path, IGNORES_SIGTERM, grace=1000.0) as process:
            all_ready(tmp_path, 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 143
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_workers_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL) as process:
        all_ready(tmp_path, 2)
        assert all(is_running(pid) for pid in pids(tmp_path)) and len(pids(tmp_path)) == 2
        process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)), "the workers to end")
