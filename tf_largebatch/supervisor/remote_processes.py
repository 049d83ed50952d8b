"""Starts workers on other hosts, through a command that connects there, such as ssh; none outlives its launcher."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tf_largebatch.supervisor.job import Worker
from tf_largebatch.supervisor.local_processes import die_with

# The exit code with which ssh tells that not the remote command failed, but the connection.
CONNECTION_FAILED = 255
# A connection that is cut never tells the far side, so the far side gives up after this time without a line.
SILENCE_SECS = 60.0
_LINES_PER_SILENCE = 6
# After the end of its stdin: time for the far side to kill the worker and tell its code.
_KILL_AFTER_SECS = 3.0
_LAST_SIGNAL = 64
# In the shell's words no character of it is special within single quotes, csh and fish included. Unbuffered,
# so that what comes after the program's line is left for the program.
# Without a program, killed before it was sent, it ends as if killed.
_BOOTSTRAP = 'import os; exec(eval(open(0, "rb", 0, closefd=False).readline() or "os._exit(137)"))'


class RemoteProcess:
    """A worker behind a connection: a local process, the transport, talks to `remote_wrapper.py` there.

    Args:
      worker: what to start there, in its folder or the launcher's current one.
      output: the descriptor that takes both its outputs, and what the transport has to say.
      transport: the local command that runs there what is appended to it, with its stdin and outputs.
      terminal: (rows, columns) of a pseudo-terminal for its output there; None: it gets a pipe.
      through_shell: whether the transport takes one argument and gives it to a shell, as ssh does.
      python: the Python there that runs the wrapper: 3.8 or later, nothing else is asked of it.
      silence_secs: after this time without hearing from this process the far side kills the worker, which so
        does not outlive a cut connection, nor a launcher that is stopped for longer; None: it never does.

    Raises:
      OSError: the transport cannot be started.
    """

    def __init__(
        self,
        worker: Worker,
        output: int,
        transport: Sequence[str],
        terminal: tuple[int, int] | None = None,
        through_shell: bool = False,
        python: str = "python3",
        silence_secs: float | None = SILENCE_SECS,
    ):
        header = {
            "argv": worker.argv,
            "environment": dict(worker.environment),
            "folder": worker.folder or os.getcwd(),
            "host": worker.host or "this host",
            "terminal": terminal,
            "silence": silence_secs,
        }
        # Through stdin, because everybody there can read a command line.
        self._unsent = program_line("remote_wrapper.py") + json.dumps(header).encode() + b"\n"
        self._line_every = silence_secs / _LINES_PER_SILENCE if silence_secs else float("inf")
        self._sent_at = time.monotonic()
        self._kill_at: float | None = None
        launcher = os.getpid()
        self._transport = subprocess.Popen(
            [*transport, *remote_command(python, through_shell)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            bufsize=0,
            # Ctrl-C is for the launcher alone.
            start_new_session=True,
            preexec_fn=(lambda: die_with(launcher)) if sys.platform == "linux" else None,
        )
        os.set_blocking(self._transport.stdin.fileno(), False)
        self._send()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs; 255 if the connection failed."""
        transport = self._transport
        if transport.returncode is None:
            # As in LocalProcess: until it is waited for, its group is surely its own.
            if not os.waitid(os.P_PID, transport.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._keep_up()
                return None
            self._kill_transport()
            transport.wait()
            transport.stdin.close()
        code = transport.returncode
        if code < 0 or code == CONNECTION_FAILED:
            # How the transport ended; of the worker nothing is known.
            return CONNECTION_FAILED if self._kill_at is None else -signal.SIGKILL
        return 128 - code if 128 < code <= 128 + _LAST_SIGNAL else code

    def signal(self, number: int) -> None:
        """Sends the worker, and what it has started, a signal; does not wait, and is no error if it has ended."""
        if self._transport.returncode is not None or self._transport.stdin.closed:
            return
        if number != signal.SIGKILL:
            self._unsent += b"signal %d\n" % number
            self._send()
            return
        # The end of its stdin makes the wrapper kill; but it may be out of reach.
        self._transport.stdin.close()
        self._kill_at = time.monotonic() + _KILL_AFTER_SECS

    def _keep_up(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._kill_transport()
            return
        if not self._unsent and now >= self._sent_at + self._line_every:
            self._unsent = b"\n"
        self._send()

    def _send(self) -> None:
        """Writes what the pipe takes, the rest at a later call: ssh reads nothing before it is connected."""
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._transport.stdin.fileno(), self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                # The transport has ended, and `poll` will tell.
                self._unsent = b""
            self._sent_at = time.monotonic()

    def _kill_transport(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.pid, signal.SIGKILL)


def remote_command(python: str, through_shell: bool) -> list[str]:
    """What runs there the program that `program_line` puts at the beginning of its stdin.

    Args:
      python: the interpreter there.
      through_shell: gives it as one argument for a shell.
    """
    # -I and -S: no file of the login's folder, and no site-packages, come into the way of the standard library.
    command = [python, "-uIS", "-c", _BOOTSTRAP]
    return [shlex.join(command)] if through_shell else command


def program_line(file: str) -> bytes:
    """One line that holds the program in this file of this folder."""
    source = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return ascii(source).encode() + b"\n"
