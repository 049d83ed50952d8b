"""Runs a job, attempt after attempt, until it ends well or another attempt would not help."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tf_largebatch.supervisor.attempt import Attempt, Start
from tf_largebatch.supervisor.job import Job, supervised
from tf_largebatch.supervisor.watch import Limits
from tf_largebatch.supervisor.worker_output import Terminal
from tf_largebatch.validation import InputError

# The worker's input is wrong (2, and sysexits' 64), or its training diverged (3): once more would end alike.
_NOT_RETRIED = (0, 2, 3, 64)
# As ssh has it where a connection fails.
_NO_PLACE = 255
_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 60.0
_POLL_SECS = 0.05


@dataclass(frozen=True)
class Options:
    """How a job is supervised.

    Attributes:
      limits: how long is waited for what.
      max_restarts: attempts after the first without progress in between; progress is a later step saved
        than when the attempt began.
      tee: whose lines are shown: "chief", "all" or "none".
      job: what workers are told that they belong to, the same for a launcher that goes on with the job in a
        scheduler's next turn; empty: the name of the log folder.
    """

    limits: Limits = field(default_factory=Limits)
    max_restarts: int = 0
    tee: str = "all"
    job: str = ""


def run(
    plan: Callable[[int], Job], start: Start, logs: Path, options: Options | None = None, output: TextIO | None = None
) -> int:
    """Runs a job to its end; of every attempt all workers have ended when the next begins.

    Ctrl-C, SIGTERM or SIGUSR1 asks all workers to end, where they can after saving; a second signal kills
    them at once. It must be called from the main thread: only there can signals be handled, and local
    workers die with the thread that started them.

    Args:
      plan: the number of an attempt, from 0, to its job; called for each, since ports may change.
      start: how to start a worker.
      logs: gets a folder for this job with `job.json` and `attempt_N/worker_00000.log`.
      options: default `Options()`.
      output: where lines and the summary of a failure go; default `sys.stdout`.

    Returns:
      The exit code of the last attempt, see `attempt.Attempt`.

    Raises:
      OSError: the log folder cannot be written, or a command cannot be started.
      InputError: `plan` raised it.
    """
    options = options or Options()
    folder = _new_folder(logs)
    terminal = Terminal(output or sys.stdout)
    attempts: list[Attempt] = []
    step: int | None = None
    restarts = number = 0

    def note() -> None:
        record = {"job": folder.name, "attempts": [attempt.record for attempt in attempts]}
        _write(folder / "job.json", json.dumps(record, indent=2) + "\n")

    # Before the first start: an ignored SIGINT (`launcher &` in a script) would be inherited.
    with noted_signals() as signals:
        while True:
            try:
                job = supervised(plan(number), options.job or folder.name, number)
            except InputError as failure:
                if number == 0:
                    raise
                # What was right for the first attempt may be so again: a host that starts anew, for example.
                code, reason = _NO_PLACE, str(failure).removesuffix(".")
            else:
                attempt = Attempt(job, start, folder / f"attempt_{number}", terminal, options.tee, options.limits)
                attempts.append(attempt)
                attempt.run(signals, note)
                code, reason = attempt.exit_code, attempt.reason
                if attempt.step is not None and (step is None or attempt.step > step):
                    step, restarts = attempt.step, 0
            if signals or code in _NOT_RETRIED or restarts >= options.max_restarts:
                break
            number += 1
            restarts += 1
            pause = min(_FIRST_PAUSE_SECS * 2 ** (restarts - 1), _LONGEST_PAUSE_SECS)
            where = "the beginning" if step is None else f"step {step}"
            terminal.line(
                f"{reason} (exit code {code}); restart {restarts} of {options.max_restarts} without progress, "
                f"from {where}, in {pause:g} s."
            )
            if _interrupted(pause, signals):
                code, reason = 128 + signals[0], f"stopped by {signal.Signals(signals[0]).name}"
                break
    if reason:
        # Otherwise there was another reason not to go on.
        gave_up = restarts >= options.max_restarts > 0 and not signals and code not in _NOT_RETRIED
        terminal.line(f"{reason}; the job ends with exit code {code}{', after no progress' if gave_up else ''}.")
    return code


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The SIGINT, SIGTERM and SIGUSR1 that have come so far, instead of what they do otherwise."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(seconds: float, signals: list[Any]) -> bool:
    until = time.monotonic() + seconds
    while not signals and time.monotonic() < until:
        time.sleep(_POLL_SECS)
    return bool(signals)


def _new_folder(logs: Path) -> Path:
    """A folder named by the time; of several jobs in one second the later ones get a number."""
    logs.mkdir(parents=True, exist_ok=True)
    name = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        folder = logs / (name if number == 1 else f"{name}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(f"{logs}/{name}")


def _write(file: Path, text: str) -> None:
    draft = file.with_suffix(".tmp")
    # A full disk costs the record, not the job.
    with contextlib.suppress(OSError):
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, file)
