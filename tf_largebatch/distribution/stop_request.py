"""A request to stop, such as SIGTERM, that reaches one worker and that all of them follow after the same step.

TensorFlow's own `PreemptionCheckpointHandler` does the same, but on Google Cloud leaves out CPUs and TPUs, knows
no signal other than SIGTERM, and asks a metadata server on the network wherever it starts. Agreement is by the
key-value store of the coordination service that MultiWorkerMirroredStrategy runs, so that it costs nothing until
somebody asks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from absl import logging

# TensorFlow gives its store no public name.
from tensorflow.python.eager import context

from tf_largebatch._keras import tf
from tf_largebatch.distribution import worker_sums
from tf_largebatch.distribution.maintenance_notice import MaintenanceNotice

# SIGUSR1 is what Slurm users choose for `--signal`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_NEVER = "never"
_LISTENER_SECS = 10.0
_OVERDUE_SECS = 60.0


class StopRequest:
    """Notes signals and maintenance notices of this worker, and agrees with the others on a step.

    Every worker calls `open`, then `is_due` after each step, then `close`, all equally often.

    Attributes:
      reason: such as "SIGTERM"; empty where the request came to another worker.
    """

    # How often this process has opened one: keys of the store cannot be used again.
    _opened = 0

    def __init__(self, strategy: tf.distribute.Strategy):
        self.reason = ""
        self._workers = worker_sums.num_workers(strategy)
        self._rank = worker_sums.rank(strategy)
        self._requested = threading.Event()
        self._requested_at: float | None = None
        self._agreed_step: int | None = None

    def open(self) -> None:
        """Starts to listen; to signals only from the main thread, as Python has it."""
        StopRequest._opened += 1
        self._key = f"tf_largebatch/stop_{StopRequest._opened}"
        _listen_to_signals(self)
        self._notice = MaintenanceNotice(lambda: self.request("maintenance notice"))
        self._notice.start()
        if self._workers > 1:
            self._listener = threading.Thread(target=self._listen, name="stop request", daemon=True)
            self._listener.start()

    def is_due(self, step: int) -> bool:
        """Whether all workers are to save and end now, `step` steps after `open`."""
        if self._agreed_step is not None:
            return step >= self._agreed_step
        if not self._requested.is_set():
            return False
        if self._workers == 1:
            return True
        # No worker can finish the next step without this one, which goes on only when all know of it.
        if _set(self._key, str(step + 1)):
            for rank in range(self._workers):
                _wait_for(f"{self._key}/heard_by_{rank}")
        return False

    def close(self) -> None:
        """Stops listening and puts the signal handlers back."""
        self._notice.stop()
        _listen_to_signals(None)
        if self._workers > 1:
            # The listener waits until the key has a value.
            _set(self._key, _NEVER)
            self._listener.join(timeout=_LISTENER_SECS)

    def request(self, reason: str) -> None:
        """Asks all workers to stop."""
        # Nothing more: a signal can come in the middle of whatever the main thread does.
        self.reason = self.reason or reason
        self._requested_at = self._requested_at or time.monotonic()
        self._requested.set()

    def is_overdue(self) -> bool:
        """Whether this worker was asked so long ago that it seems to make no steps any more."""
        return self._requested_at is not None and time.monotonic() > self._requested_at + _OVERDUE_SECS

    def _listen(self) -> None:
        try:
            value = _wait_for(self._key)
            if value != _NEVER:
                self._agreed_step = int(value)
                _set(f"{self._key}/heard_by_{self._rank}", "yes")
        except tf.errors.OpError as failure:
            # The service is gone, and with it a worker; training itself will find that.
            logging.debug("No longer listening for requests to stop: %s", failure)


# Who is told of signals, and what they did before.
_told: StopRequest | None = None
_before: dict[int, Any] = {}


def _listen_to_signals(request: StopRequest | None) -> None:
    """Tells a request of signals from now on; None: they do again what they did before."""
    global _told
    if threading.current_thread() is not threading.main_thread():
        return
    _told = request
    if request is None:
        while _before:
            signal.signal(*_before.popitem())
        return
    for number in SIGNALS:
        # Here and not earlier: a strategy takes SIGTERM for itself when it is made.
        previous = signal.signal(number, _note)
        # A training that has raised has not put back what was before it.
        if previous is not _note:
            _before[number] = previous


def _note(number: int, frame: Any) -> None:
    if _told is None or _told.is_overdue() or not _is_in_fit(frame):
        # As without this. Schedulers repeat a signal within seconds, so that the second is not yet a second wish.
        signal.signal(number, _before.get(number) or signal.SIG_DFL)
        signal.raise_signal(number)
    else:
        _told.request(signal.Signals(number).name)


@contextlib.contextmanager
def finishing_when_asked() -> Iterator[None]:
    """Within it, and outside of trainings that a `StopRequest` listens to, a request to stop changes nothing.

    For what comes after a training: its evaluation and the saving of its model, which a restart would only do again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _finish) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(number: int, frame: Any) -> None:
    """Goes on with what the process does."""


def _is_in_fit(frame: Any) -> bool:
    """Whether what was interrupted is part of Keras's `fit`; an exception may have ended it without our hearing."""
    while frame is not None:
        if frame.f_code.co_name == "fit":
            return True
        frame = frame.f_back
    return False


def _set(key: str, value: str) -> bool:
    """Gives a key of the coordination service its value; False if it has one already."""
    try:
        context.context().set_config_key_value(key, value)
    except tf.errors.AlreadyExistsError:
        return False
    return True


def _wait_for(key: str) -> str:
    return context.context().get_config_key_value(key)
