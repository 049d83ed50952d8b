"""Starts workers as processes of this machine; none outlives its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess

from tf_largebatch.supervisor.job import Worker

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child should run as little as possible. None where this is not Linux.
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class LocalProcess:
    """A worker of this machine, in a session and process group of its own.

    So ctrl-C reaches the launcher alone, and a signal to the group reaches also what the worker starts.

    Args:
      worker: what to start.
      output: the descriptor that takes both its outputs.

    Raises:
      OSError: the command cannot be started.
    """

    def __init__(self, worker: Worker, output: int):
        launcher = os.getpid()
        self._popen = subprocess.Popen(
            worker.argv,
            env=worker.full_environment(os.environ),
            cwd=worker.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=(lambda: die_with(launcher)) if _PRCTL else None,
        )

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs. What it has started ends with it."""
        if self._popen.returncode is None:
            # An ended process keeps its id until it is waited for. So its group can be rid of what
            # the worker left behind, and is surely not that of an unrelated new process.
            if not os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return None
            self.signal(signal.SIGKILL)
            self._popen.wait()
        return self._popen.returncode

    def signal(self, number: int) -> None:
        """Sends its group a signal; no error if it has ended."""
        # Gone already, or (PermissionError) run as another user: nothing that could be done.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)


def die_with(launcher: int) -> None:
    """In the child before it becomes the worker: it is to be killed when its launcher dies."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        # It died between the fork and the line above.
        os._exit(1)
