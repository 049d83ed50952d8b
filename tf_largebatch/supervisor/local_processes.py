"""Runs a job as processes of this machine and watches them: all end well, or all are ended.

Workers of one synchronous job cannot go on without each other, so the first failure ends the job.
Whatever happens, also to the launcher itself, no worker is left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tf_largebatch.supervisor.job import Job, Worker
from tf_largebatch.supervisor.watch import Watch
from tf_largebatch.supervisor.worker_output import Terminal, WorkerOutput

# A process that left its worker's group may hold the output open for ever.
_LAST_OUTPUT_SECS = 5.0

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child should run as little as possible. None where this is not Linux.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


def run(
    job: Job,
    log_folder: str | os.PathLike[str],
    output: TextIO | None = None,
    grace_secs: float = 15.0,
    failure_grace_secs: float = 5.0,
    exit_grace_secs: float = 60.0,
) -> int:
    """Starts every worker of a job and returns when none is left.

    Ctrl-C or SIGTERM asks all workers to end; a second one kills them at once. It must be called
    from the main thread: only there can signals be handled, and workers die with the thread that
    started them.

    Args:
      job: what to start.
      log_folder: gets `worker_RANK.log` of each worker (appended) and `job.json`.
      output: where all workers' lines and the summary of a failure go; default `sys.stdout`.
      grace_secs: how long workers may take to end when the user asks them to.
      failure_grace_secs: the same after a failure; short, because a worker that waits for a dead
        peer inside TensorFlow does not react.
      exit_grace_secs: how long the others may go on after a worker has ended well.

    Returns:
      0 if every worker ended with 0; the code of the worker that failed first (128 + n if signal n
      ended it), 1 if a worker ended too early; 130 or 143 if the user stopped the job by SIGINT or
      SIGTERM.

    Raises:
      OSError: the log folder cannot be written, or a command cannot be started.
    """
    folder = Path(log_folder)
    folder.mkdir(parents=True, exist_ok=True)
    terminal = Terminal(output or sys.stdout)
    start = _now()
    processes: list[_Process] = []
    # Before the first start: an ignored SIGINT (`launcher &` in a script) would be inherited.
    with _noted_signals() as signals:
        watch = Watch(processes, signals, terminal.line, grace_secs, failure_grace_secs, exit_grace_secs)
        try:
            for worker in job.workers:
                processes.append(_Process(worker, folder, terminal))
            # Reader threads come after the last fork: forking a threaded process is not safe.
            for process in processes:
                process.output.start()
            _write_record(folder, job, processes, start)
            watch.until_all_ended()
        finally:
            for process in processes:
                process.kill()
    _write_record(folder, job, processes, start, end=_now(), exit_code=watch.exit_code)
    if watch.culprit:
        terminal.line(f"The last lines of {watch.culprit.log}:")
        for line in watch.culprit.output.tail:
            terminal.line(f"    {line}")
        for process in processes:
            terminal.line(f"{process.name}: {process.end}")
    if watch.reason:
        terminal.line(f"{watch.reason}; the job ends with exit code {watch.exit_code}.")
    return watch.exit_code


class _Process:
    """A `watch.RunningWorker` on this machine: its process group, its output and its end."""

    def __init__(self, worker: Worker, folder: Path, terminal: Terminal):
        self.worker = worker
        self.name = worker.name
        self.log = folder / f"worker_{worker.rank}.log"
        self.ended_at: float | None = None
        self._started_at = time.monotonic()
        # Keras draws a live progress bar only if its output is a terminal; the chief's is worth it.
        live = worker.rank == 0 and terminal.is_live
        reading_end, writing_end = _pseudo_terminal(terminal, worker) if live else os.pipe()
        # First, because its log may not open: then there is no process to end.
        self.output = WorkerOutput(worker.name, reading_end, self.log, terminal, live)
        launcher = os.getpid()
        try:
            self._popen = subprocess.Popen(
                worker.argv,
                env={**worker.full_environment(os.environ), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=writing_end,
                stderr=writing_end,
                # A session, so a process group, of its own: ctrl-C reaches the launcher alone, and
                # a signal to the group reaches also what the worker starts.
                start_new_session=True,
                preexec_fn=(lambda: _die_with(launcher)) if _PRCTL else None,
            )
        finally:
            os.close(writing_end)

    @property
    def exit_code(self) -> int | None:
        code = self._popen.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def end(self) -> str:
        code = self._popen.returncode
        # Real-time signals have no name in Python.
        names = {number.value: number.name for number in signal.Signals}
        how = f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"
        return f"{how} after {self.ended_at - self._started_at:.1f} s"

    def has_ended(self) -> bool:
        if self._popen.returncode is None:
            # An ended process keeps its id until it is waited for. So its group can be rid of what
            # the worker left behind, and is surely not that of an unrelated new process.
            if not os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            self.signal(signal.SIGKILL)
            self._popen.wait()
            self.ended_at = time.monotonic()
        return True

    def signal(self, number: int) -> None:
        # Gone already, or (PermissionError) run as another user: nothing that could be done.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def kill(self) -> None:
        """Makes sure that nothing of it runs, and that its output has been read."""
        if not self.has_ended():
            self.signal(signal.SIGKILL)
            while not self.has_ended():
                time.sleep(0.01)
        if self.output.is_alive():
            self.output.join(_LAST_OUTPUT_SECS)


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The SIGINTs and SIGTERMs that have come so far, instead of what they do otherwise."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with(launcher: int) -> None:
    """In the child before it becomes the worker: it is to be killed when its launcher dies."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It died between the fork and the line above.
        os._exit(1)


def _pseudo_terminal(terminal: Terminal, worker: Worker) -> tuple[int, int]:
    reading_end, writing_end = os.openpty()
    termios.tcsetwinsize(writing_end, (24, max(terminal.columns - len(f"[{worker.name}] "), 20)))
    return reading_end, writing_end


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _write_record(
    folder: Path,
    job: Job,
    processes: list[_Process],
    start: str,
    end: str | None = None,
    exit_code: int | None = None,
) -> None:
    record = {
        "addresses": job.addresses,
        "start": start,
        "end": end,
        "exit_code": exit_code,
        "workers": [
            {
                "rank": process.worker.rank,
                "command": process.worker.argv,
                "environment": dict(process.worker.environment),
                "log": process.log.name,
                "exit_code": process.exit_code,
            }
            for process in processes
        ],
    }
    (folder / "job.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
