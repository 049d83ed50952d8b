"""Runs on the far side of ssh or srun: starts one worker, and lets nothing of it outlive the connection.

Never imported where it runs: `remote_processes.py` sends this file as text to whatever Python is there. So it
uses the standard library alone, and nothing that is newer than Python 3.8.

It reads from stdin one line of JSON, {"argv": [...], "environment": {name: value or null}, "folder": path,
"host": name, "terminal": null or [rows, columns], "silence": null or seconds}, then lines `signal N` for the
worker's group, and empty lines that only say that the launcher is there. The end of stdin, or silence for too
long, is the end of the launcher or of the connection, and kills the group.

Exit code: the worker's own, 128 + n if signal n ended it, 254 in place of 255 (with which ssh tells of its
own failures); 2 if the worker cannot be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

_CANNOT_START = 2
_POLL_SECS = 0.05
# For the last output to go out although nobody may be there to take it.
_LAST_OUTPUT_SECS = 1.0
_PR_SET_PDEATHSIG = 1
_PRCTL = None
# A Python may have been built without what ctypes needs.
with contextlib.suppress(OSError, TypeError):
    _PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class Launcher:
    """The launcher, as far as it can be known here: by the lines that it writes.

    Attributes:
      silence: seconds without any line that count as its end; None: any number is fine.
    """

    def __init__(self):
        self.silence = None
        self._unfinished = b""
        self._heard_at = time.monotonic()
        self._closed = False

    @property
    def is_gone(self) -> bool:
        silent = self.silence is not None and time.monotonic() - self._heard_at > self.silence
        return self._closed or silent

    def lines(self, timeout: float | None) -> list[bytes]:
        """What it has written; waits for as long as `timeout` if there is nothing (None: for ever)."""
        if self._closed or not select.select([0], [], [], timeout)[0]:
            return []
        try:
            chunk = os.read(0, 65536)
        except OSError:
            chunk = b""
        self._closed = not chunk
        self._heard_at = time.monotonic()
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        return lines


class OutputCopier(threading.Thread):
    """Copies what the worker prints to stdout.

    The worker does not write there itself: a process that it leaves behind would keep the connection open.

    Attributes:
      broken: whether nobody takes the output any more.
    """

    def __init__(self, descriptor: int):
        super().__init__(daemon=True)
        self.broken = False
        self._descriptor = descriptor
        self._worker_has_ended = threading.Event()

    def finish(self) -> None:
        """The worker has ended: no more than what has been printed by now is to be copied."""
        self._worker_has_ended.set()

    def run(self) -> None:
        try:
            while True:
                is_last_look = self._worker_has_ended.is_set()
                if select.select([self._descriptor], [], [], _POLL_SECS)[0]:
                    chunk = self._read()
                    if not chunk:
                        return
                    _write(chunk)
                elif is_last_look:
                    return
        except OSError:
            self.broken = True

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 65536)
        except OSError:
            # How Linux says that nobody holds the other side of a pseudo-terminal any more.
            return b""


def main() -> int:
    for_group = _noted_signals()
    launcher = Launcher()
    lines = []
    while not lines:
        if launcher.is_gone:
            return 128 + signal.SIGKILL
        lines = launcher.lines(None)
    header = json.loads(lines.pop(0))
    launcher.silence = header["silence"]
    try:
        worker, copier = _started(header)
    except OSError as failure:
        what = failure.filename if isinstance(failure.filename, str) else header["argv"][0]
        print(f"{header['host']}: the worker cannot be started: {what}: {failure.strerror}.", file=sys.stderr)
        return _CANNOT_START

    while not _has_ended(worker, os.WNOHANG):
        for line in lines:
            if line.startswith(b"signal "):
                _signal(worker, int(line.split()[1]))
        while for_group:
            _signal(worker, for_group.pop(0))
        if launcher.is_gone or copier.broken:
            _signal(worker, signal.SIGKILL)
            _has_ended(worker, 0)
            break
        lines = launcher.lines(_POLL_SECS)
    # It is not waited for yet, so that its group's number still is its own.
    _signal(worker, signal.SIGKILL)
    code = worker.wait()
    copier.finish()
    while copier.is_alive() and not launcher.is_gone:
        copier.join(_POLL_SECS)
        launcher.lines(0)
    copier.join(_LAST_OUTPUT_SECS)
    return 128 - code if code < 0 else min(code, 254)


def _noted_signals() -> list[int]:
    """What is to be sent to the worker's group: grows with the signals that come here.

    Slurm sends SIGTERM, or what `--signal` says, to every process of a job, and SIGUSR1 asks for the same end.
    SIGHUP comes with the end of a connection, which stdin tells more surely. Handlers, unlike SIG_IGN, are not
    passed on to the worker.
    """
    noted = []
    signal.signal(signal.SIGTERM, lambda *_: noted.append(signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: noted.append(signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: noted.append(signal.SIGINT))
    signal.signal(signal.SIGHUP, lambda *_: None)
    return noted


def _started(header: dict) -> tuple[subprocess.Popen, OutputCopier]:
    """The worker, in a session and process group of its own, and its output on its way.

    Raises:
      OSError: there is no such folder or program.
    """
    os.chdir(header["folder"])
    environment = {**os.environ, **header["environment"]}
    if header["terminal"]:
        reading_end, writing_end = os.openpty()
        fcntl.ioctl(writing_end, termios.TIOCSWINSZ, struct.pack("HHHH", *header["terminal"], 0, 0))
    else:
        reading_end, writing_end = os.pipe()
    wrapper = os.getpid()
    worker = subprocess.Popen(
        header["argv"],
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=writing_end,
        stderr=writing_end,
        start_new_session=True,
        preexec_fn=(lambda: _die_with(wrapper)) if _PRCTL else None,
    )
    os.close(writing_end)
    # Only now: forking a threaded process is not safe.
    copier = OutputCopier(reading_end)
    copier.start()
    return worker, copier


def _die_with(wrapper: int) -> None:
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != wrapper:
        # It died between the fork and the line above.
        os._exit(1)


def _has_ended(worker: subprocess.Popen, how: int) -> bool:
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | how) is not None


def _signal(worker: subprocess.Popen, number: int) -> None:
    # Gone already, or run as another user: nothing that could be done.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, number)


def _write(chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:
            # Whoever started this may have set it so.
            select.select([], [1], [])


if __name__ == "__main__":
    sys.exit(main())
