"""When a job has failed, which worker's fault it is, and how the others are brought to an end.

Nothing here knows how a worker is started or where it runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

# After the first failure: time for others to show theirs, so that the summary has them too.
_SETTLE_SECS = 2.0
_POLL_SECS = 0.05


class RunningWorker(Protocol):
    """What is asked of a worker, wherever it runs.

    Attributes:
      name: such as "worker 0".
      exit_code: as a shell has it, 128 + n for signal n; None while it runs.
      ended_at: by `time.monotonic`; None while it runs.
      end: how and when it ended, in words.
    """

    name: str
    exit_code: int | None
    ended_at: float | None
    end: str

    def has_ended(self) -> bool:
        """Looks whether it has ended, without waiting."""

    def signal(self, number: int) -> None:
        """Sends it, and what it has started, a signal; no error if it has ended."""


class Watch:
    """Waits until all workers of a job have ended, and sees to it that they do.

    Attributes:
      exit_code: of the job.
      culprit: the worker that failed first, if one did.
      reason: why the job failed or was stopped; empty if it ended well.
    """

    def __init__(
        self,
        workers: Sequence[RunningWorker],
        signals: list[int],
        say: Callable[[str], None],
        grace_secs: float,
        failure_grace_secs: float,
        exit_grace_secs: float,
    ):
        """Takes the workers; `until_all_ended` does the rest.

        Args:
          workers: all of the job, started.
          signals: the user's SIGINTs and SIGTERMs; grows while the job runs.
          say: shows the user a line.
          grace_secs: how long workers may take to end when the user asks them to.
          failure_grace_secs: the same after a failure.
          exit_grace_secs: how long the others may go on after a worker has ended well.
        """
        self.exit_code = 0
        self.culprit: RunningWorker | None = None
        self.reason = ""
        self._workers = workers
        self._signals = signals
        self._say = say
        self._grace_secs = grace_secs
        self._failure_grace_secs = failure_grace_secs
        self._exit_grace_secs = exit_grace_secs
        self._first_to_finish: RunningWorker | None = None
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self._signals_before_kill = 1

    def until_all_ended(self) -> None:
        running = list(self._workers)
        while running:
            just_ended = [worker for worker in running if worker.has_ended()]
            running = [worker for worker in running if worker not in just_ended]
            self._judge(just_ended)
            if running:
                self._act(running)
                time.sleep(_POLL_SECS)

    def _judge(self, just_ended: list[RunningWorker]) -> None:
        # Survivors of a dead peer end with code 1, so of those that end together they come last.
        for worker in sorted(just_ended, key=lambda worker: worker.exit_code == 1):
            if worker.exit_code == 0:
                self._first_to_finish = self._first_to_finish or worker
            elif not self.reason:
                self._fail(worker, worker.exit_code, f"{worker.name} failed first: {worker.end}")

    def _fail(self, culprit: RunningWorker, exit_code: int, reason: str) -> None:
        self.culprit, self.exit_code, self.reason = culprit, exit_code, reason
        self._failed_at = time.monotonic()

    def _act(self, running: list[RunningWorker]) -> None:
        now = time.monotonic()
        finished = self._first_to_finish
        if self._kill_at is not None:
            if now >= self._kill_at or len(self._signals) > self._signals_before_kill:
                _signal(running, signal.SIGKILL)
        elif self._signals:
            self._stop_for_user(running)
        elif self._failed_at is not None:
            if now >= self._failed_at + _SETTLE_SECS:
                _signal(running, signal.SIGTERM)
                self._kill_at = now + self._failure_grace_secs
                self._signals_before_kill = 0
        elif finished and now >= finished.ended_at + self._exit_grace_secs:
            # A worker with fewer steps than its peers leaves them waiting for it, without an error.
            others = ", ".join(worker.name for worker in running)
            reason = f"{finished.name} ended early: {finished.end}, but {others} went on for more than "
            self._fail(finished, 1, f"{reason}{self._exit_grace_secs:g} s")

    def _stop_for_user(self, running: list[RunningWorker]) -> None:
        stopped_by = signal.Signals(self._signals[0])
        if not self.reason:
            self.exit_code, self.reason = 128 + stopped_by, f"stopped by {stopped_by.name}"
        self._say(
            f"{stopped_by.name}: {', '.join(worker.name for worker in running)} may take {self._grace_secs:g} s to "
            "end; once more to kill at once."
        )
        # Not SIGTERM, which a process ignores once it has created a MultiWorkerMirroredStrategy.
        _signal(running, signal.SIGINT)
        self._kill_at = time.monotonic() + self._grace_secs


def _signal(workers: list[RunningWorker], number: int) -> None:
    for worker in workers:
        worker.signal(number)
