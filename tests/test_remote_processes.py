"""Workers behind a transport. Here it is a local command, so the far side is this machine."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stub_workers import ENDS_WELL, IGNORES_ALL, WAITS, is_running, pids, wait_until, writes_pid

from tf_largebatch.supervisor import remote_probe, remote_processes, remote_wrapper
from tf_largebatch.supervisor.job import Worker
from tf_largebatch.supervisor.remote_processes import RemoteProcess

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent"),
]
# As ssh does: the last argument goes to a shell, which stays, in a session that no signal to ssh reaches.
_SHELL = "subprocess.call(['sh', '-c', sys.argv[1]], start_new_session=True)"
SHELL = (sys.executable, "-c", f"import subprocess, sys; sys.exit({_SHELL})")


class Running:
    """A remote process of the test, and what has come from it so far."""

    def __init__(self, worker: Worker, output: tuple[int, int], **options):
        self._reading_end, writing_end = output
        self.output = b""
        options = {"transport": SHELL, "through_shell": True, "python": sys.executable, **options}
        try:
            self.process = RemoteProcess(worker, writing_end, **options)
        finally:
            os.close(writing_end)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._reading_end, 65536):
                self.output += chunk

    def code(self, timeout_secs: float = 30.0) -> int:
        """Its exit code; at its end, nothing holds its output any more."""
        wait_until(lambda: self.process.poll() is not None, "the end of the worker", timeout_secs)
        self._reader.join(5)
        assert not self._reader.is_alive()
        os.close(self._reading_end)
        return self.process.poll()

    def shows(self, text: bytes) -> None:
        wait_until(lambda: self.process.poll() is not None or text in self.output, f"{text} in the output")
        assert text in self.output


@pytest.fixture
def start(tmp_path):
    """Starts a stub; at the end of the test none is left."""
    started = []

    def start_one(program: str, folder: str | None = None, output: tuple[int, int] | None = None, **options) -> Running:
        environment = options.pop("environment", ())
        argv = options.pop("argv", (sys.executable, "-c", writes_pid(tmp_path, program)))
        worker = Worker(1, argv, environment, "far", folder or str(tmp_path))
        started.append(Running(worker, output or os.pipe(), **options))
        return started[-1]

    yield start_one
    for running in started:
        deadline = time.monotonic() + 10
        while running.process.poll() is None and time.monotonic() < deadline:
            running.process.signal(signal.SIGKILL)
            time.sleep(0.01)
    for pid in pids(tmp_path):
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (ENDS_WELL, 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(255)", 254),  # 255 would be a failure of the connection
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_exit_codes_come_across(program, code, start):
    assert start(program).code() == code


def test_a_transport_that_takes_the_command_as_arguments(start):
    running = start("print('here')", transport=("env",), through_shell=False)
    assert running.code() == 0 and running.output == b"here\n"


def test_a_transport_that_fails_is_told_from_a_worker_that_does(start):
    running = start(ENDS_WELL, transport=("sh", "-c", "echo no route; exit 255"))
    assert running.code() == 255 and running.output == b"no route\n"


def test_a_transport_that_does_not_exist(start):
    with pytest.raises(FileNotFoundError, match="no_such_transport"):
        start(ENDS_WELL, transport=("no_such_transport",))


def test_environment_folder_and_input_of_the_worker(start, tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_THERE", "kept")
    monkeypatch.setenv("TAKEN_AWAY", "still there")
    names = ("FROM_THERE", "TAKEN_AWAY", "ADDED")
    given = (("ADDED", "two\nlines 'and' \u00e9"), ("TAKEN_AWAY", None))
    shows = f"import os, sys; print([os.environ.get(n) for n in {names}], os.getcwd(), repr(sys.stdin.read()))"
    folder = tmp_path / "with 'odd' \u00e9 name"
    folder.mkdir()
    running = start(shows, folder=str(folder), environment=given)
    assert running.code() == 0
    assert running.output.decode() == f"{['kept', None, given[0][1]]} {folder} ''\n"


def test_the_environment_is_not_on_a_command_line(start):
    running = start(WAITS, environment=(("SECRET_TOKEN", "abracadabra"),))
    running.shows(b"ready")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert b"abracadabra" not in file.read_bytes()


def test_an_environment_larger_than_a_pipe(start):
    # Linux allows no longer variable. A transport that does not read for a while must not stop the launcher.
    value = "x" * 130_000
    waits_first = (*SHELL[:2], "import time; time.sleep(2); " + SHELL[2])
    began = time.monotonic()
    running = start(
        "import os; print(len(os.environ['LONG_0'] + os.environ['LONG_1']))",
        environment=(("LONG_0", value), ("LONG_1", value)),
        transport=waits_first,
    )
    assert time.monotonic() - began < 1.5
    assert running.code() == 0 and running.output == b"260000\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": "/no/such/folder"}, "/no/such/folder: No such file or directory"),
        ({"argv": ("/no/such/program", "x")}, "/no/such/program: No such file or directory"),
    ],
)
def test_a_worker_that_cannot_be_started_is_bad_input_in_one_sentence(options, words, start):
    running = start(ENDS_WELL, **options)
    assert running.code() == 2
    assert running.output.decode() == f"far: the worker cannot be started: {words}.\n"


def test_no_file_of_the_login_folder_is_taken_for_the_standard_library(start, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = start("", argv=("echo", "started"))
    assert (running.code(), running.output) == (0, b"started\n")


def test_big_output_comes_whole_and_in_order(start):
    program = """
import sys
for number in range(100_000):
    (sys.stdout if number % 2 else sys.stderr).write(f"{number:09}\\n")
    sys.stdout.flush()
"""
    running = start(program)
    assert running.code() == 0
    assert running.output == b"".join(b"%09d\n" % number for number in range(100_000))


def test_a_signal_reaches_the_worker_and_what_it_started(start):
    running = start(_with_child(_ANSWERS_SIGTERM))
    running.shows(b"child ready")
    running.process.signal(signal.SIGTERM)
    assert running.code() == 75
    assert b"worker got 15\n" in running.output and b"child got 15\n" in running.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_wrapper_asks_the_group_to_end(number, start):
    # As Slurm does it, to every process of a job.
    running = start(_ANSWERS_SIGTERM)
    running.shows(b"worker ready")
    os.kill(_wrapper_of(running), number)
    assert running.code() == 75
    assert running.output.endswith(b"worker got 15\n")


def test_a_hangup_of_the_wrapper_is_ignored_but_not_by_the_worker(start):
    running = start(WAITS)
    running.shows(b"ready")
    os.kill(_wrapper_of(running), signal.SIGHUP)
    time.sleep(0.3)
    assert running.process.poll() is None
    running.process.signal(signal.SIGHUP)
    assert running.code() == -signal.SIGHUP


def test_sigkill_ends_the_worker_and_what_it_started(start, tmp_path):
    running = start(_with_child(IGNORES_ALL))
    wait_until(lambda: running.output.count(b"ready") == 2, "both to be ready")
    running.process.signal(signal.SIGKILL)
    assert running.code() == -9
    assert running.process._transport.returncode == 137  # told by the wrapper
    assert len(pids(tmp_path)) == 2 and not any(is_running(pid) for pid in pids(tmp_path))
    running.process.signal(signal.SIGTERM)  # no error


def test_sigkill_before_anything_was_sent(start):
    running = start(WAITS, transport=(*SHELL[:2], "import time; time.sleep(0.5); " + SHELL[2]))
    running.process.signal(signal.SIGKILL)
    assert running.code() == -9


def test_sigkill_ends_a_transport_that_hangs(start):
    running = start(WAITS, transport=(sys.executable, "-c", IGNORES_ALL))
    running.shows(b"ready")
    began = time.monotonic()
    running.process.signal(signal.SIGKILL)
    assert running.code() == -9
    assert 2.9 < time.monotonic() - began < 10


def test_signals_to_a_transport_that_hangs_do_not_block(start):
    running = start(WAITS, transport=(sys.executable, "-c", IGNORES_ALL))
    began = time.monotonic()
    for _ in range(20_000):
        running.process.signal(signal.SIGTERM)
    assert time.monotonic() - began < 10
    running.process.signal(signal.SIGKILL)
    assert running.code() == -9


def test_what_a_worker_leaves_behind_ends_with_it(start, tmp_path):
    running = start(_with_child(WAITS, then="time.sleep(0.3)"))
    assert running.code() == 0
    assert len(pids(tmp_path)) == 2 and not any(is_running(pid) for pid in pids(tmp_path))


def test_what_left_the_group_does_not_hold_the_connection(start, tmp_path):
    began = time.monotonic()
    running = start(_with_child(WAITS, then="time.sleep(0.3); print('end')", start_new_session=True))
    assert running.code() == 0
    assert time.monotonic() - began < 30 and running.output.endswith(b"end\n")


def test_a_killed_transport_leaves_nothing_and_counts_as_a_failed_connection(start, tmp_path):
    running = start(_with_child(IGNORES_ALL))
    wait_until(lambda: running.output.count(b"ready") == 2, "both to be ready")
    os.kill(running.process._transport.pid, signal.SIGKILL)
    assert running.code() == 255
    wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)), "the worker to end", 5)


def test_a_killed_wrapper_takes_the_worker_along(start, tmp_path):
    running = start(IGNORES_ALL)
    running.shows(b"ready")
    os.kill(_wrapper_of(running), signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)), "the worker to end", 5)


def test_a_launcher_that_is_silent_counts_as_gone(start, tmp_path):
    running = start(IGNORES_ALL, silence_secs=2.5)
    running.shows(b"ready")
    until = time.monotonic() + 5
    while time.monotonic() < until:
        assert running.process.poll() is None  # whoever looks after it is not silent
        time.sleep(0.02)
    wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)), "the worker to end", 10)
    assert running.code() == -9


def test_a_worker_whose_output_nobody_takes_can_be_killed(start, tmp_path):
    # The connection is stuck: no reader, and full buffers everywhere.
    reading_end, writing_end = os.pipe()
    worker = Worker(0, (sys.executable, "-c", writes_pid(tmp_path, "while True: print('x' * 1000)")))
    process = RemoteProcess(worker, writing_end, SHELL, through_shell=True, python=sys.executable)
    try:
        (pid,) = wait_until(lambda: pids(tmp_path), "the worker")
        time.sleep(0.5)
        process.signal(signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the worker to end", 10)
        wait_until(lambda: process.poll() is not None, "the transport to end", 10)
    finally:
        os.close(reading_end)
        os.close(writing_end)


def test_a_live_terminal_comes_across(start):
    program = """
import os, sys, time
print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(), flush=True)
for step in range(3):
    sys.stdout.write(f"\\rstep {step}")
    sys.stdout.flush()
    time.sleep(0.2)
"""
    running = start(program.replace("\\\\r", "\\r"), terminal=(24, 91), output=os.openpty())
    running.shows(b"step 0")
    assert b"step 2" not in running.output  # it comes as it is drawn, not at the end
    assert running.code() == 0
    assert b"True True os.terminal_size(columns=91, lines=24)" in running.output
    assert running.output.endswith(b"\rstep 0\rstep 1\rstep 2")


@pytest.mark.parametrize("program", [remote_wrapper, remote_probe])
def test_what_is_sent_needs_no_new_python_and_no_package(program):
    tree = ast.parse(Path(program.__file__).read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "csh", "tcsh", "fish", "zsh", "ksh"])
def test_the_command_survives_shells(shell):
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    (command,) = remote_processes.remote_command(sys.executable, through_shell=True)
    program = ascii("import sys; print(sys.stdin.readline(), end='')").encode() + b"\nrest\n"
    done = subprocess.run([shell, "-c", command], input=program, capture_output=True, timeout=30)
    assert done.stdout == b"rest\n", done.stderr


_ANSWERS_SIGTERM = """
import os, signal, sys, time
name = os.environ.get("NAME", "worker")
def end(number, frame):
    print(name, "got", number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
print(name, "ready", flush=True)
time.sleep(90)
"""


def _with_child(program: str, then: str | None = None, **options) -> str:
    """A stub that starts another which does the same as itself, or the program while it does `then`."""
    return f"""
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", {program!r}], env={{**os.environ, "NAME": "child"}}, **{options!r}
)
open(os.getcwd() + "/" + str(child.pid) + ".pid", "w").close()
try:
    exec({(program if then is None else then)!r})
finally:
    {"child.wait()" if then is None else "pass"}
"""


def _wrapper_of(running: Running) -> int:
    """The process id of the wrapper: the transport's shell's child."""
    pid = running.process._transport.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid
