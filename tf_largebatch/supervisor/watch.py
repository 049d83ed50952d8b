"""When a job has failed, which worker's fault it is, and how the others are brought to an end.

Nothing here knows how a worker is started or where it runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Exit codes beside a worker's own; 128 + n stands for signal n.
STOPPED_AND_SAVED = 75
START_TIMED_OUT = 124

# After the first failure: time for others to show theirs. A worker that lost a peer can be noticed before the peer.
_SETTLE_SECS = 2.0
_POLL_SECS = 0.05
# Of the grace after ctrl-C: a worker that has not saved and ended by then is interrupted.
_INTERRUPT_AFTER = 0.7


@dataclass(frozen=True)
class Limits:
    """How long is waited, in seconds.

    Attributes:
      start: until all workers have met; None: for ever.
      grace: for workers to end when the user, or a scheduler, asks them to.
      failure_grace: the same after a failure; short, because a worker that waits for a dead peer inside
        TensorFlow does not react.
      exit_grace: for the others to end after a worker has ended well.
    """

    start: float | None = 600.0
    grace: float = 15.0
    failure_grace: float = 5.0
    exit_grace: float = 60.0


class RunningWorker(Protocol):
    """What is asked of a worker, wherever it runs.

    Attributes:
      name: such as "worker 0".
      exit_code: as a shell has it, 128 + n for signal n; None while it runs.
      ended_at: by `time.monotonic`; None while it runs.
      end: how and when it ended, in words.
      told: the events that it has told (`worker_events.py`).
      lost_a_peer: whether its last lines are TensorFlow's when another worker is gone.
    """

    name: str
    exit_code: int | None
    ended_at: float | None
    end: str
    told: set[str]
    lost_a_peer: bool

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
        limits: Limits,
        must_meet: bool = False,
    ):
        """Takes the workers; `until_all_ended` does the rest.

        Args:
          workers: all of the job, started.
          signals: SIGINT, SIGTERM and SIGUSR1 that the launcher got; grows while the job runs.
          say: shows the user a line.
          limits: how long is waited.
          must_meet: whether the program is known to tell when all workers have met. Otherwise the limit
            on the start holds only where a worker tells that it waits.
        """
        self.exit_code = 0
        self.culprit: RunningWorker | None = None
        self.reason = ""
        self._workers = workers
        self._signals = signals
        self._say = say
        self._limits = limits
        self._must_meet = must_meet
        self._started_at = time.monotonic()
        self._failed: list[RunningWorker] = []
        self._first_to_finish: RunningWorker | None = None
        self._asked_at: float | None = None
        self._kill_at: float | None = None
        self._signals_before_kill = 1

    def until_all_ended(self) -> None:
        running = list(self._workers)
        while running:
            just_ended = [worker for worker in running if worker.has_ended()]
            running = [worker for worker in running if worker not in just_ended]
            for worker in just_ended:
                if worker.exit_code:
                    self._failed.append(worker)
                    if not self.reason and running:
                        self._say(f"{worker.name}: {worker.end}")
                else:
                    self._first_to_finish = self._first_to_finish or worker
            if running:
                self._act(running)
                time.sleep(_POLL_SECS)
        self._judge([])
        codes = {worker.exit_code for worker in self._workers}
        if codes == {0} and self.culprit is None and all("stoppable" in worker.told for worker in self._workers):
            # Asked to stop when nothing was left to do: before that they would have ended with 75.
            self.exit_code, self.reason, self.culprit = 0, "", None
        has_saved = STOPPED_AND_SAVED in codes and codes <= {0, STOPPED_AND_SAVED}
        if self._signals and has_saved and self.culprit is None:
            self.reason += ", and saved"
            if self._signals[0] != signal.SIGINT:
                self.exit_code = STOPPED_AND_SAVED

    def _act(self, running: list[RunningWorker]) -> None:
        now = time.monotonic()
        finished = self._first_to_finish
        if self._kill_at is not None:
            if now >= self._kill_at or len(self._signals) > self._signals_before_kill:
                _signal(running, signal.SIGKILL)
            elif self._asked_at and now >= self._asked_at + _INTERRUPT_AFTER * self._limits.grace:
                _signal(running, signal.SIGINT)
                self._asked_at = None
        elif self._signals:
            self._stop_for_user(running)
        elif self._failed:
            if now >= self._failed[0].ended_at + _SETTLE_SECS:
                self._judge(running)
                self._end(running, now)
        elif finished and now >= finished.ended_at + self._limits.exit_grace:
            # A worker with fewer steps than its peers leaves them waiting for it, without an error.
            reason = f"{finished.name} ended early: {finished.end}, but {_names(running)} went on for more than "
            self._blame(finished, 1, f"{reason}{self._limits.exit_grace:g} s")
            self._end(running, now)
        elif self._limits.start is not None and now >= self._started_at + self._limits.start:
            self._check_start(running, now)

    def _judge(self, running: list[RunningWorker]) -> None:
        """Names the culprit, of all that have failed so far."""
        if self.reason or not self._failed:
            return
        causes = [worker for worker in self._failed if not worker.lost_a_peer]
        unwilling = [worker for worker in causes if worker.exit_code != STOPPED_AND_SAVED]
        silent = [worker for worker in running if not worker.lost_a_peer]
        if unwilling:
            # Survivors of a dead peer mostly end with code 1, whatever they print.
            culprit = min(unwilling, key=lambda worker: worker.exit_code == 1)
            self._blame(culprit, culprit.exit_code, f"{culprit.name} failed first: {culprit.end}")
        elif causes:
            self._blame(causes[0], STOPPED_AND_SAVED, f"{causes[0].name} was told to stop, and saved")
        elif self._first_to_finish:
            early, first = self._first_to_finish, self._failed[0]
            reason = f"{early.name} ended early: {early.end}, and {first.name} lost it"
            self._blame(early, first.exit_code, reason)
        elif silent:
            first = self._failed[0]
            reason = f"{_names(silent)} no longer answered, as {first.name} found ({first.end})"
            self._blame(silent[0], first.exit_code, reason)
        else:
            culprit = self._failed[0]
            self._blame(culprit, culprit.exit_code, f"{culprit.name} failed first: {culprit.end}")

    def _blame(self, culprit: RunningWorker, exit_code: int, reason: str) -> None:
        self.culprit, self.exit_code, self.reason = culprit, exit_code, reason

    def _check_start(self, running: list[RunningWorker], now: float) -> None:
        if all("ready" in worker.told for worker in self._workers):
            return
        if not self._must_meet and not any("waiting" in worker.told for worker in self._workers):
            return
        missing = [worker for worker in running if not worker.told & {"waiting", "ready"}]
        what = f"{_names(missing)} had not started" if missing else "the workers had not found each other"
        self._blame((missing or running)[0], START_TIMED_OUT, f"{what} after {self._limits.start:g} s")
        self._end(running, now)

    def _end(self, running: list[RunningWorker], now: float) -> None:
        if self.exit_code == STOPPED_AND_SAVED:
            # The others are saving, or have been told to; a scheduler may still tell the launcher too.
            self._kill_at = now + self._limits.grace
            self._signals_before_kill = len(self._signals) + 1
        else:
            _signal(running, signal.SIGTERM)
            self._kill_at = now + self._limits.failure_grace
            self._signals_before_kill = len(self._signals)

    def _stop_for_user(self, running: list[RunningWorker]) -> None:
        asked_by = signal.Signals(self._signals[0])
        if not self.reason:
            self.exit_code, self.reason = 128 + asked_by, f"stopped by {asked_by.name}"
        self._say(
            f"{asked_by.name}: {_names(running)} may take {self._limits.grace:g} s to end; once more to kill at once."
        )
        for worker in running:
            # A process that has created a MultiWorkerMirroredStrategy ignores SIGTERM, unless it says otherwise.
            worker.signal(signal.SIGTERM if "stoppable" in worker.told else signal.SIGINT)
        self._asked_at = time.monotonic()
        self._kill_at = self._asked_at + self._limits.grace


def _names(workers: Sequence[RunningWorker]) -> str:
    return ", ".join(worker.name for worker in workers)


def _signal(workers: Sequence[RunningWorker], number: int) -> None:
    for worker in workers:
        worker.signal(number)
