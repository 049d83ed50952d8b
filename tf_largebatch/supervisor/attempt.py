"""One attempt of a job: all workers end well, or all are ended.

Workers of one synchronous job cannot go on without each other, so the first failure ends the attempt.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tf_largebatch.supervisor.job import Job, Worker
from tf_largebatch.supervisor.watch import Limits, Watch
from tf_largebatch.supervisor.worker_output import Terminal, WorkerOutput

# A process that left its worker's group may hold the output open for ever.
_LAST_OUTPUT_SECS = 5.0
# What TensorFlow raises in a worker when another is gone or silent.
_LOST_PEER = re.compile(
    r"\b(Unavailable|Aborted|DeadlineExceeded|Cancelled)Error\b|stopped sending heartbeats|heartbeat timeout"
    r"|Error reported from /job:"
)


class StartedWorker(Protocol):
    """What a way to start workers returns: `local_processes.LocalProcess`, for example."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""

    def signal(self, number: int) -> None:
        """Sends it, and what it has started, a signal; no error if it has ended. SIGKILL always ends it."""


# A worker and the descriptor for its output -> the started worker.
Start = Callable[[Worker, int], StartedWorker]


class Attempt:
    """Starts all workers of a job and waits until none is left.

    It must be used from the main thread: local workers die with the thread that started them.

    Attributes:
      exit_code: 0 if every worker ended with 0; the code of the worker that failed first (128 + n if signal
        n ended it), 1 if a worker ended too early, 124 if one never started; 130 or 143 if the user stopped
        the job by SIGINT or SIGTERM; 75 if the workers were told to stop, and saved.
      reason: why it did not end well; empty if it did.
      record: for job.json.
      step: the last global step that the chief told to be saved or resumed from; None if it told none.
    """

    def __init__(self, job: Job, start: Start, folder: Path, terminal: Terminal, tee: str, limits: Limits):
        """Prepares; `run` starts.

        Args:
          job: what to start.
          start: how to start a worker.
          folder: gets `worker_00000.log` of each worker.
          terminal: shows the workers' lines and the summary of a failure.
          tee: whose lines are shown: "chief", "all" or "none".
          limits: how long is waited for what.

        Raises:
          OSError: the folder cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.exit_code = 0
        self.reason = ""
        self.record: dict[str, Any] = {}
        self._job, self._start, self._folder, self._terminal = job, start, folder, terminal
        self._tee, self._limits = tee, limits
        self._workers: list[_Watched] = []

    @property
    def step(self) -> int | None:
        steps = [worker.output.step for worker in self._workers if worker.output.step is not None]
        return max(steps, default=None)

    def run(self, signals: list[int], note: Callable[[], None]) -> None:
        """Runs the attempt to its end; `signals` grows as the user sends them, and `note` writes the record.

        Raises:
          OSError: a log cannot be written, or a command cannot be started.
        """
        start = _now()
        watch = Watch(self._workers, signals, self._terminal.line, self._limits, self._job.tells_when_ready)
        try:
            for worker in self._job.workers:
                self._workers.append(_Watched(worker, self._start, self._folder, self._terminal, self._tee))
            # Reader threads come after the last fork: forking a threaded process is not safe.
            for worker in self._workers:
                worker.output.start()
            self.record = self._described(start)
            note()
            watch.until_all_ended()
        finally:
            for worker in self._workers:
                worker.kill()
        self.exit_code, self.reason = watch.exit_code, watch.reason
        self.record = self._described(start, end=_now(), exit_code=watch.exit_code, reason=watch.reason)
        note()
        if watch.culprit and watch.exit_code:
            self._terminal.line(f"The last lines of {watch.culprit.log}:")
            for line in watch.culprit.output.tail:
                self._terminal.line(f"    {line}")
            for worker in self._workers:
                self._terminal.line(f"{worker.name}: {worker.end}")

    def _described(self, start: str, **end: Any) -> dict[str, Any]:
        workers = [
            {
                "rank": watched.worker.rank,
                "host": watched.worker.host,
                "command": watched.worker.argv,
                "environment": dict(watched.worker.environment),
                "log": watched.log.name,
                "exit_code": watched.exit_code,
            }
            for watched in self._workers
        ]
        return {
            "folder": self._folder.name,
            "addresses": self._job.addresses,
            "start": start,
            **end,
            "step": self.step,
            "workers": workers,
        }


class _Watched:
    """A `watch.RunningWorker`: a started worker, its output and its end."""

    def __init__(self, worker: Worker, start: Start, folder: Path, terminal: Terminal, tee: str):
        self.worker = worker
        self.name = worker.name
        self.log = folder / f"worker_{worker.rank:05}.log"
        self.ended_at: float | None = None
        self._code: int | None = None
        self._started_at = time.monotonic()
        is_shown = tee == "all" or (tee == "chief" and worker.rank == 0)
        # Keras draws a live progress bar only if its output is a terminal; the chief's is worth it.
        live = worker.rank == 0 and terminal.is_live and is_shown
        reading_end, writing_end = _pseudo_terminal(terminal, worker) if live else os.pipe()
        # First, because its log may not open: then there is no process to end.
        self.output = WorkerOutput(worker.name, reading_end, self.log, terminal, live, is_shown)
        try:
            self._started = start(worker, writing_end)
        finally:
            os.close(writing_end)

    @property
    def told(self) -> set[str]:
        return self.output.told

    @property
    def lost_a_peer(self) -> bool:
        if self.ended_at is not None:
            # What it printed last may not have been read yet.
            self.output.join(_LAST_OUTPUT_SECS)
        return any(_LOST_PEER.search(line) for line in list(self.output.recent))

    @property
    def exit_code(self) -> int | None:
        return self._code if self._code is None or self._code >= 0 else 128 - self._code

    @property
    def end(self) -> str:
        if self._code is None:
            return "did not end by itself"
        # Real-time signals have no name in Python.
        names = {number.value: number.name for number in signal.Signals}
        code = self._code
        how = f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"
        return f"{how} after {self.ended_at - self._started_at:.1f} s"

    def has_ended(self) -> bool:
        if self._code is None:
            self._code = self._started.poll()
            if self._code is None:
                return False
            self.ended_at = time.monotonic()
        return True

    def signal(self, number: int) -> None:
        self._started.signal(number)

    def kill(self) -> None:
        """Makes sure that nothing of it runs, and that its output has been read."""
        while not self.has_ended():
            self.signal(signal.SIGKILL)
            time.sleep(0.01)
        if self.output.is_alive():
            self.output.join(_LAST_OUTPUT_SECS)


def _pseudo_terminal(terminal: Terminal, worker: Worker) -> tuple[int, int]:
    reading_end, writing_end = os.openpty()
    termios.tcsetwinsize(writing_end, (24, max(terminal.columns - len(f"[{worker.name}] "), 20)))
    return reading_end, writing_end


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
