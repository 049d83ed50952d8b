"""A job of real processes, attempt after attempt: restarts, limits, requests to stop, and what its folder tells."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stub_workers import (
    ENDS_WELL,
    FAILS_WITH_3,
    IGNORES_ALL,
    SAVES,
    TELLS,
    WAITS,
    all_ready,
    is_running,
    launcher,
    logs,
    pids,
    record,
    run,
    run_onto,
    stub_job,
    wait_until,
    writes_pid,
)

from tf_largebatch.supervisor import local_processes, supervise, watch
from tf_largebatch.validation import InputError

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(90)
LOST_A_PEER = "tensorflow.python.framework.errors_impl.UnavailableError: Collective ops is aborted"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(supervise, "_FIRST_PAUSE_SECS", 0.01)


def restarting(max_restarts: int, **limits) -> supervise.Options:
    return supervise.Options(watch.Limits(**limits), max_restarts)


def by_attempt(*programs: str, otherwise: str = "") -> str:
    """A stub whose n-th attempt does what the n-th program says."""
    chosen = f"dict(enumerate({list(programs)!r})).get(int(os.environ['TFLB_ATTEMPT']), {otherwise!r})"
    return f"import os, sys, time\n{TELLS}exec({chosen})"


def attempts(folder: Path) -> list[dict]:
    return record(folder)["attempts"]


# Restarts.


def test_a_job_is_restarted_until_it_ends_well(quick, tmp_path):
    program = by_attempt("sys.exit(1)", "os.kill(os.getpid(), 9)", "sys.exit(124)", otherwise="print('done')")
    code, shown = run(tmp_path, program, options=restarting(3))
    assert code == 0
    assert [attempt["exit_code"] for attempt in attempts(tmp_path)] == [1, 137, 124, 0]
    assert "worker 0 failed first: exit code 1 after" in shown
    assert "(exit code 1); restart 1 of 3 without progress, from the beginning, in 0.01 s." in shown
    assert "(exit code 124); restart 3 of 3 without progress" in shown
    assert "the job ends with" not in shown and shown.endswith("[worker 0] done\n")


def test_without_restarts_a_failure_is_the_end(tmp_path):
    code, shown = run(tmp_path, "raise SystemExit(1)")
    assert code == 1 and len(attempts(tmp_path)) == 1
    assert " restart " not in shown and "no progress" not in shown


@pytest.mark.parametrize("code", [0, 2, 3, 64])
def test_what_would_end_alike_is_not_tried_again(code, quick, tmp_path):
    ended, shown = run(tmp_path, f"raise SystemExit({code})", options=restarting(5))
    assert ended == code and len(attempts(tmp_path)) == 1
    assert " restart " not in shown and "no progress" not in shown


def test_a_job_without_progress_is_given_up(quick, tmp_path):
    code, shown = run(tmp_path, "raise SystemExit(7)", options=restarting(2))
    assert code == 7 and len(attempts(tmp_path)) == 3
    assert shown.endswith("the job ends with exit code 7, after no progress.\n")


def test_no_progress_is_not_said_of_a_job_that_ends_for_another_reason(quick, tmp_path):
    code, shown = run(tmp_path, by_attempt("sys.exit(1)", "sys.exit(2)"), options=restarting(1))
    assert code == 2 and shown.endswith("the job ends with exit code 2.\n")


def test_progress_gives_a_job_all_its_restarts_again(quick, tmp_path):
    saves = [f"tell('saved', step={step}); sys.exit(1)" for step in (10, 20, 30)]
    program = by_attempt(*saves, otherwise="tell('resumed', step=30); sys.exit(1)")
    code, shown = run(tmp_path, program, options=restarting(1))
    assert code == 1
    assert [attempt["step"] for attempt in attempts(tmp_path)] == [10, 20, 30, 30]
    assert shown.count("restart 1 of 1 without progress") == 3 and "restart 2" not in shown
    assert "from step 20, in" in shown and "after no progress" in shown


@pytest.mark.parametrize("told", ["tell('resumed', step=50)", "tell('saved', step=50)", "tell('saved', step=40)", ""])
def test_saving_no_later_step_than_before_is_no_progress(told, quick, tmp_path):
    """For example a checkpoint that cannot be read: training begins again from an earlier one, for ever."""
    program = by_attempt("tell('saved', step=50); sys.exit(1)", otherwise=f"{told}; sys.exit(1)")
    code, shown = run(tmp_path, program, options=restarting(2))
    assert code == 1 and len(attempts(tmp_path)) == 3
    assert "restart 2 of 2 without progress, from step 50, in" in shown


def test_the_pause_doubles_up_to_a_minute_and_progress_makes_it_short_again(monkeypatch, tmp_path):
    pauses = []
    monkeypatch.setattr(supervise, "_interrupted", lambda seconds, signals: pauses.append(seconds))
    program = by_attempt(*["sys.exit(1)"] * 7, "tell('saved', step=1); sys.exit(1)", "sys.exit(1)")
    assert run(tmp_path, program, options=restarting(7))[0] == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 1, 2]


def test_the_pause_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(supervise, "_FIRST_PAUSE_SECS", 0.7)
    began = time.monotonic()
    assert run(tmp_path, by_attempt("sys.exit(1)"), options=restarting(1))[0] == 0
    assert time.monotonic() - began > 0.7


def test_an_attempt_begins_when_nothing_of_the_last_one_runs(quick, tmp_path):
    """Two attempts at once would write the same checkpoints, and want the same ports."""
    looks = f"import glob; print('left', glob.glob({str(tmp_path)!r} + '/*.pid'))"
    hangs = f"""
open({str(tmp_path)!r} + '/' + str(os.getpid()) + '.pid', 'w').close()
import atexit, signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', {IGNORES_ALL!r}])
open({str(tmp_path)!r} + '/' + str(child.pid) + '.pid', 'w').close()
time.sleep(90)
"""
    fails = f"""
import glob
while len(glob.glob({str(tmp_path)!r} + '/*.pid')) < 2: time.sleep(0.02)
sys.exit(1)
"""
    alive: list[bool] = []

    def plan(attempt):
        alive.extend(is_running(pid) for pid in pids(tmp_path))
        return stub_job(by_attempt(hangs, otherwise=looks), by_attempt(fails))

    options = restarting(1, failure_grace=0.3)
    code = supervise.run(plan, local_processes.LocalProcess, tmp_path, options, io.StringIO())
    assert code == 0 and alive == [False, False]


def test_every_attempt_is_planned_anew_and_has_a_folder_of_its_own(quick, tmp_path):
    """Ports that were free for the first attempt need not be for the second."""

    def plan(attempt):
        job = stub_job(f"import sys; print('attempt', {attempt}); sys.exit({int(attempt < 2)})")
        return dataclasses.replace(job, addresses=(f"127.0.0.1:{3000 + attempt}",))

    assert supervise.run(plan, local_processes.LocalProcess, tmp_path, restarting(2), io.StringIO()) == 0
    for number, attempt in enumerate(attempts(tmp_path)):
        assert attempt["addresses"] == [f"127.0.0.1:{3000 + number}"]
        assert attempt["folder"] == f"attempt_{number}"
        assert (logs(tmp_path, number) / "worker_00000.log").read_text() == f"attempt {number}\n"


def test_a_later_attempt_that_has_no_place_is_tried_again(quick, tmp_path):
    """A host that starts anew, for example; what is wrong from the beginning is the user's mistake."""

    def plan(attempt):
        if attempt in wrong:
            raise InputError(f"host h{attempt} does not answer.")
        return stub_job(by_attempt("sys.exit(1)"))

    output, wrong = io.StringIO(), (1, 2)
    assert supervise.run(plan, local_processes.LocalProcess, tmp_path, restarting(3), output) == 0
    assert "host h2 does not answer (exit code 255); restart 3 of 3" in output.getvalue()
    assert [attempt["folder"] for attempt in attempts(tmp_path)] == ["attempt_0", "attempt_3"]
    output, wrong = io.StringIO(), (1, 2)
    assert supervise.run(plan, local_processes.LocalProcess, tmp_path / "2", restarting(1), output) == 255
    assert output.getvalue().endswith("host h1 does not answer; the job ends with exit code 255, after no progress.\n")
    wrong = (0,)
    with pytest.raises(InputError, match="host h0"):
        supervise.run(plan, local_processes.LocalProcess, tmp_path / "3", restarting(3), io.StringIO())


# What workers are given, and what the folder tells of them.


def test_workers_know_their_job_and_attempt_and_that_they_are_heard(quick, monkeypatch, tmp_path):
    for name in ("TFLB_JOB", "TFLB_ATTEMPT", "TFLB_EVENTS"):
        monkeypatch.setenv(name, "of a launcher that this one runs under")
    names = ("TFLB_JOB", "TFLB_ATTEMPT", "TFLB_EVENTS", "PYTHONUNBUFFERED")
    program = f"print(*(os.environ[name] for name in {names})); sys.exit(os.environ['TFLB_ATTEMPT'] != '2')"
    program = f"import os, sys; {program}"
    assert run(tmp_path, program, program, options=restarting(5))[0] == 0
    job = record(tmp_path)["job"]
    assert logs(tmp_path).parent.name == job
    for attempt in range(3):
        for rank in (0, 1):
            assert (logs(tmp_path, attempt) / f"worker_{rank:05}.log").read_text() == f"{job} {attempt} 1 1\n"


def test_a_job_can_have_a_name_that_outlives_its_launcher(tmp_path):
    options = supervise.Options(job="slurm_17")
    assert run(tmp_path, "import os; print(os.environ['TFLB_JOB'])", options=options) == (0, "[worker 0] slurm_17\n")


def test_the_record_tells_what_was_started_and_how_it_ended(quick, tmp_path):
    program = by_attempt("tell('saved', step=5); sys.exit(1)", otherwise="tell('resumed', step=5)")
    assert run(tmp_path, program, ENDS_WELL, options=restarting(1))[0] == 0
    assert sorted(record(tmp_path)) == ["attempts", "job"]
    failed, ended = attempts(tmp_path)
    for number, attempt in enumerate((failed, ended)):
        assert attempt["folder"] == f"attempt_{number}" and attempt["step"] == 5
        assert attempt["start"] <= attempt["end"]
        for rank, worker in enumerate(attempt["workers"]):
            assert (worker["rank"], worker["host"], worker["log"]) == (rank, None, f"worker_{rank:05}.log")
            assert worker["command"] == [sys.executable, "-c", (program, ENDS_WELL)[rank]]
            assert worker["environment"]["TFLB_ATTEMPT"] == str(number)
    assert (failed["exit_code"], ended["exit_code"], ended["reason"]) == (1, 0, "")
    assert re.fullmatch(r"worker 0 failed first: exit code 1 after [\d.]+ s", failed["reason"])
    assert [[worker["exit_code"] for worker in attempt["workers"]] for attempt in (failed, ended)] == [[1, 0], [0, 0]]


def test_the_record_is_there_while_the_job_runs(tmp_path):
    with launcher(tmp_path, WAITS) as process:
        all_ready(tmp_path, 1)
        (attempt,) = attempts(tmp_path)
        assert "end" not in attempt and attempt["workers"][0]["exit_code"] is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    (attempt,) = attempts(tmp_path)
    assert (attempt["exit_code"], attempt["reason"]) == (130, "stopped by SIGINT") and attempt["end"]


@pytest.mark.parametrize(("tee", "shown_ranks"), [("all", "01"), ("chief", "0"), ("none", "")])
def test_only_the_lines_asked_for_are_shown_and_all_are_logged(tee, shown_ranks, tmp_path):
    program = "import sys; print('out'); print('err', file=sys.stderr); print('unfinished', end='')"
    code, shown = run(tmp_path, program, program, options=supervise.Options(tee=tee))
    assert code == 0
    assert set(re.findall(r"\[worker (\d)\] (?:out|err|unfinished)\n", shown)) == set(shown_ranks)
    assert shown.count("\n") == 3 * len(shown_ranks)
    for rank in (0, 1):
        assert (logs(tmp_path) / f"worker_{rank:05}.log").read_text() == "out\nerr\nunfinished\n"


@pytest.mark.parametrize("tee", ["chief", "none"])
def test_a_failure_is_shown_whosever_lines_are(tee, tmp_path):
    shown = run(tmp_path, ENDS_WELL, FAILS_WITH_3, options=supervise.Options(tee=tee))[1]
    assert "    no such file\n" in shown and "worker 1 failed first: exit code 3" in shown


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path):
    def plan(attempt):
        (job,) = tmp_path.glob("20*-*_*")
        (job / "job.tmp").mkdir()
        (job / "attempt_0").mkdir()
        (job / "attempt_0" / "worker_00000.log").symlink_to("/dev/full")
        return stub_job("for i in range(20000): print('line', i)", ENDS_WELL)

    output = io.StringIO()
    assert supervise.run(plan, local_processes.LocalProcess, tmp_path, output=output) == 0
    shown = output.getvalue()
    assert shown.count("its log ends here: [Errno 28]") == 1
    assert "[worker 0] line 19999\n" in shown
    assert (logs(tmp_path) / "worker_00001.log").read_text() == "done\n"


def test_a_folder_that_cannot_be_written_starts_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        run_onto(io.StringIO(), tmp_path / "file" / "logs", writes_pid(tmp_path, WAITS))
    before = signal.getsignal(signal.SIGTERM)

    def plan(attempt):
        (job,) = tmp_path.glob("20*-*_*")
        (job / "attempt_0" / "worker_00001.log").mkdir(parents=True)
        return stub_job(writes_pid(tmp_path, WAITS), ENDS_WELL)

    with pytest.raises(IsADirectoryError):
        supervise.run(plan, local_processes.LocalProcess, tmp_path, output=io.StringIO())
    assert signal.getsignal(signal.SIGTERM) == before
    time.sleep(1.0)  # had worker 0 been left running, it would have left its process id by now
    assert not any(is_running(pid) for pid in pids(tmp_path))


def test_launchers_that_share_a_folder_do_not_mix_their_logs(tmp_path):
    folders = [tmp_path / str(number) for number in range(3)]
    shared = tmp_path / "logs"
    launches = []
    for folder in folders:
        folder.mkdir()
        (folder / "logs").symlink_to(shared, target_is_directory=True)
    shared.mkdir()
    programs = [f"print('of launcher {number}')" for number in range(3)]
    try:
        for folder, program in zip(folders, programs):
            setup = f"logs = pathlib.Path({str(shared)!r}); run = supervise.run\n"
            setup += "supervise.run = lambda plan, start, folder, options: run(plan, start, logs, options)\n"
            setup += f"import time\nwhile time.time() < {int(time.time()) + 3}: time.sleep(0.001)"
            launches.append(launcher(folder, program, setup=setup))
        processes = [launch.__enter__() for launch in launches]
        shown = [process.communicate(timeout=30)[0].decode() for process in processes]
    finally:
        for launch in launches:
            launch.__exit__(None, None, None)
    assert shown == [f"[worker 0] of launcher {number}\n" for number in range(3)]
    found = sorted(shared.glob("*/job.json"))
    assert len(found) == 3
    for file in found:
        (attempt,) = json.loads(file.read_text())["attempts"]
        assert len(list((file.parent / attempt["folder"]).iterdir())) == 1
    assert sorted(file.read_text() for file in shared.glob("*/attempt_0/*.log")) == [
        f"of launcher {number}\n" for number in range(3)
    ]


# Whose fault it is, as far as it takes real output to see it.


@pytest.mark.parametrize(
    ("culprit_ends_after", "last_line"),
    [
        (0.0, LOST_A_PEER),
        (1.0, LOST_A_PEER),
        # What TensorFlow raises where the other one was silent, as `test_meeting.py` sees it.
        (0.0, "tensorflow.python.framework.errors_impl.DeadlineExceededError: Deadline Exceeded"),
        (0.0, "The following tasks are unhealthy (stopped sending heartbeats):"),
    ],
)
def test_a_survivor_is_not_the_culprit_even_if_it_ends_first(culprit_ends_after, last_line, tmp_path):
    survivor = f"import sys; print('Traceback'); print({last_line!r}); sys.exit(1)"
    culprit = f"import sys, time; time.sleep({culprit_ends_after}); print('no memory'); sys.exit(1)"
    for programs, name in (((survivor, culprit), "worker 1"), ((culprit, survivor), "worker 0")):
        folder = tmp_path / name
        code, shown = run(folder, *programs)
        assert code == 1
        assert f"{name} failed first: exit code 1 after" in shown and "    no memory\n" in shown


def test_a_survivor_is_known_by_its_last_lines_even_if_they_are_read_late(tmp_path):
    """The terminal may be slow, an ssh connection for example, and the lines many."""

    class Slow(io.StringIO):
        def write(self, text):
            if "trace" in text:
                time.sleep(0.05)
            return super().write(text)

    survivor = f"for i in range(60): print('trace', i)\nprint({LOST_A_PEER!r})\nraise SystemExit(1)"
    output = Slow()
    assert run_onto(output, tmp_path, survivor, "print('no memory'); raise SystemExit(1)") == 1
    assert "worker 1 failed first" in output.getvalue()


def test_a_worker_that_is_stopped_is_found_although_only_others_fail(tmp_path):
    stopped = "import os, signal; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    survivor = f"import sys, time; time.sleep(0.5); print({LOST_A_PEER!r}); sys.exit(1)"
    code, shown = run(tmp_path, survivor, writes_pid(tmp_path, stopped), failure_grace=0.3)
    assert code == 1
    assert re.search(r"worker 1 no longer answered, as worker 0 found \(exit code 1 after", shown)
    assert f"The last lines of {logs(tmp_path)}/worker_00001.log:\n    ready\n" in shown
    (pid,) = pids(tmp_path)
    assert not is_running(pid)


# The limit on the start.


def test_a_worker_that_does_not_start_is_named_and_the_job_ends_with_124(tmp_path):
    waits = TELLS + "import time; tell('waiting'); time.sleep(90)"
    code, shown = run(tmp_path, waits, WAITS, waits, start=1.5, failure_grace=0.5)
    assert code == 124
    assert "worker 1 had not started after 1.5 s; the job ends with exit code 124." in shown
    assert f"The last lines of {logs(tmp_path)}/worker_00001.log:" in shown


def test_a_worker_that_does_not_start_may_start_the_next_time(quick, tmp_path):
    meets = "tell('waiting'); tell('ready')"
    late = by_attempt("time.sleep(90)", otherwise=meets)
    waits = by_attempt("tell('waiting'); time.sleep(90)", otherwise=meets)
    code, shown = run(tmp_path, waits, late, options=restarting(1, start=1.5, failure_grace=0.5))
    assert code == 0 and "worker 1 had not started after 1.5 s (exit code 124); restart 1 of 1" in shown


def test_a_program_that_tells_nothing_may_take_its_time(tmp_path):
    assert run(tmp_path, "import time; time.sleep(1.5)", start=0.3)[0] == 0


def test_a_program_that_is_known_to_tell_may_not(tmp_path):
    job = dataclasses.replace(stub_job(WAITS), tells_when_ready=True)
    options = supervise.Options(watch.Limits(start=0.5, failure_grace=0.5))
    assert supervise.run(lambda attempt: job, local_processes.LocalProcess, tmp_path, options, io.StringIO()) == 124
    told = dataclasses.replace(stub_job(TELLS + "import time; tell('ready'); time.sleep(1.5)"), tells_when_ready=True)
    options = supervise.Options(watch.Limits(start=1.0))
    other = tmp_path / "other"
    assert supervise.run(lambda attempt: told, local_processes.LocalProcess, other, options, io.StringIO()) == 0


# The user, or a scheduler, stops the job.


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=["TERM", "USR1", "INT"]
)
def test_workers_save_when_the_launcher_is_told_to_stop(number, code, tmp_path):
    with launcher(tmp_path, SAVES, SAVES, options={"max_restarts": 3}) as process:
        all_ready(tmp_path, 2)
        process.send_signal(number)
        shown = process.communicate(timeout=30)[0].decode()
        assert process.returncode == code
        assert "[worker 0] saving" in shown and "[worker 1] saving" in shown
        name = signal.Signals(number).name
        assert f"stopped by {name}, and saved; the job ends with exit code {code}.\n" in shown
        assert " restart " not in shown and not any(is_running(pid) for pid in pids(tmp_path))
    (attempt,) = attempts(tmp_path)
    assert attempt["exit_code"] == code and [worker["exit_code"] for worker in attempt["workers"]] == [75, 75]


def test_workers_that_were_told_to_stop_by_others_give_code_75(tmp_path):
    with launcher(tmp_path, SAVES, SAVES) as process:
        all_ready(tmp_path, 2)
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGTERM)
        shown = process.communicate(timeout=30)[0].decode()
        assert process.returncode == 75
        assert re.search(r"worker [01] was told to stop, and saved; the job ends with exit code 75\.\n", shown)


def test_a_job_whose_workers_stopped_and_saved_goes_on_in_the_next_attempt(quick, tmp_path):
    program = by_attempt("tell('saved', step=9); sys.exit(75)", otherwise="tell('resumed', step=9)")
    code, shown = run(tmp_path, program, program, options=restarting(1))
    assert code == 0 and "was told to stop, and saved (exit code 75); restart 1 of 1" in shown


def test_a_stoppable_worker_that_hangs_is_interrupted_and_then_killed(tmp_path):
    """As one whose peer is gone: it waits inside TensorFlow for a step that never ends."""
    hangs = TELLS + textwrap.dedent("""
        import signal, time
        def note(number, frame): print("got", signal.Signals(number).name, round(time.monotonic(), 2), flush=True)
        for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, note)
        tell("stoppable")
        print("ready", flush=True)
        until = time.monotonic() + 60
        while time.monotonic() < until: time.sleep(0.05)
    """)
    with launcher(tmp_path, hangs, grace=3.0) as process:
        all_ready(tmp_path, 1)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        shown = process.communicate(timeout=30)[0].decode()
        took = time.monotonic() - sent
        assert process.returncode == 143 and not any(is_running(pid) for pid in pids(tmp_path))
    got = re.findall(r"got (\w+) ([\d.]+)", shown)
    assert [name for name, _ in got] == ["SIGTERM", "SIGINT"]
    assert 2.0 <= float(got[1][1]) - float(got[0][1]) <= 2.9
    assert 3.0 <= took < 6.0
    assert attempts(tmp_path)[0]["workers"][0]["exit_code"] == 137


def test_workers_that_are_not_stoppable_are_interrupted_at_once(tmp_path):
    program = IGNORES_ALL.replace("signal.signal(signal.SIGINT, signal.SIG_IGN); ", "")
    with launcher(tmp_path, program, program, grace=60.0) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGUSR1)
        shown = process.communicate(timeout=30)[0].decode()
        assert process.returncode == 138 and "stopped by SIGUSR1; the job ends with exit code 138." in shown


@pytest.mark.parametrize("name", ["INT", "TERM", "USR1"])
def test_a_signal_during_a_pause_ends_the_launcher_at_once(name, tmp_path):
    """A scheduler that waits for it would kill it in the end."""
    number, setup = signal.Signals[f"SIG{name}"], "supervise._FIRST_PAUSE_SECS = 45"
    with launcher(tmp_path, "raise SystemExit(6)", options={"max_restarts": 1}, setup=setup) as process:
        line = process.stdout.readline()
        while b"restart 1 of 1" not in line:
            assert line, "the launcher ended"
            line = process.stdout.readline()
        process.send_signal(number)
        shown = process.communicate(timeout=2)[0].decode()
        assert process.returncode == 128 + number
        assert shown == f"stopped by SIG{name}; the job ends with exit code {128 + number}.\n"
    assert len(attempts(tmp_path)) == 1


def test_a_signal_between_two_attempts_is_not_lost(tmp_path):
    """It comes while an attempt is planned; the workers are not to train on."""
    count = []

    def plan(attempt):
        count.append(attempt)
        if attempt == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return stub_job("import os, sys, time; os.environ['TFLB_ATTEMPT'] == '0' and sys.exit(1); time.sleep(90)")

    options, began = restarting(3, grace=5.0), time.monotonic()
    assert supervise.run(plan, local_processes.LocalProcess, tmp_path, options, io.StringIO()) == 130
    assert count == [0, 1] and time.monotonic() - began < 30


def test_a_second_signal_of_another_kind_kills_at_once(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, SAVES.replace("sys.exit(75)", "time.sleep(90)"), grace=1000.0) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "saving" in (logs(tmp_path) / "worker_00001.log").read_text(), "worker 1 to save")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 143
        assert not any(is_running(pid) for pid in pids(tmp_path))


# What it costs.


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the times of another process are in /proc")
def test_a_waiting_launcher_takes_next_to_no_time_of_the_processor(tmp_path):
    def cpu_secs(pid: int) -> float:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    with launcher(tmp_path, WAITS, WAITS) as process:
        all_ready(tmp_path, 2)
        before = cpu_secs(process.pid)
        time.sleep(5)
        used = cpu_secs(process.pid) - before
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    print(f"{used / 5:.2%} of a core")
    assert used / 5 < 0.03
