"""Where the workers' output goes: one log file for each, and all of it to one terminal, line by line."""

from __future__ import annotations

import codecs
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from tf_largebatch import worker_events

_TAIL_LINES = 20
# The words of an exception can stand above a long list of where an operation was made.
_RECENT_LINES = 100
_DEFAULT_COLUMNS = 80
_CLEAR_LINE = "\r\x1b[K"


class Terminal:
    """The launcher's own output, shared by all workers.

    On a real terminal the last line may be unfinished: a progress bar that its worker redraws in
    place. Lines of others go above it.

    Attributes:
      is_live: whether this is a real terminal.
    """

    def __init__(self, stream: TextIO):
        self.is_live = stream.isatty()
        self._stream = stream
        self._lock = threading.Lock()
        self._unfinished: tuple[str, str] | None = None
        self._broken = False

    @property
    def columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_COLUMNS
        except (OSError, ValueError):
            return _DEFAULT_COLUMNS

    def line(self, text: str, prefix: str = "") -> None:
        """Shows a finished line."""
        with self._lock:
            clear = _CLEAR_LINE if self._unfinished else ""
            if self._unfinished and self._unfinished[0] == prefix:
                self._unfinished = None
            self._write(f"{clear}{prefix}{text}\n{self._drawn()}")

    def redraw(self, text: str, prefix: str) -> None:
        """Shows a line as far as it goes, in place of what was shown of it before."""
        with self._lock:
            clear = _CLEAR_LINE if self._unfinished else ""
            self._unfinished = (prefix, text) if text else None
            self._write(clear + self._drawn())

    def _drawn(self) -> str:
        # A carriage return cannot undo a line that has wrapped, so it must not reach the last column.
        return cut("".join(self._unfinished), self.columns - 1) if self._unfinished else ""

    def _write(self, text: str) -> None:
        if self._broken:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            # Whoever read it is gone (`| head`, a closed ssh session). The logs go on.
            self._broken = True


class WorkerOutput(threading.Thread):
    """Reads what one worker prints until its end, into its log and onto the terminal.

    Attributes:
      recent: the last lines, as they were finished.
      told: the names of the events that the worker has told.
      step: the last global step that it has told to be saved; None before the first.
    """

    def __init__(self, name: str, descriptor: int, log: Path, terminal: Terminal, live: bool, is_shown: bool = True):
        """Prepares the reader; `start` begins to read.

        Args:
          name: such as "worker 0", the prefix of every line on the terminal.
          descriptor: the reading end of the worker's output; closed at its end.
          log: a file to append to. Of a line that is redrawn it gets the last state.
          terminal: where to show the lines.
          live: whether to show unfinished lines too.
          is_shown: whether to show any line; the log has all.
        """
        super().__init__(name=f"output of {name}", daemon=True)
        self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
        self.told: set[str] = set()
        self.step: int | None = None
        self._prefix = f"[{name}] "
        self._descriptor = descriptor
        self._log: TextIO | None = open(log, "a", encoding="utf-8")  # noqa: SIM115 (closed by the thread)
        self._terminal = terminal
        self._live = live
        self._is_shown = is_shown

    @property
    def tail(self) -> list[str]:
        """The last of them, for the summary of a failure."""
        return list(self.recent)[-_TAIL_LINES:]

    def run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        unfinished = ""
        while chunk := self._read():
            text, events = worker_events.taken_out(unfinished + decoder.decode(chunk))
            for event in events:
                self._note(event)
            *lines, unfinished = text.split("\n")
            for line in lines:
                self._finish(folded(line))
            drawn, event = worker_events.cut_before_event(unfinished)
            # The carriage return stays: what comes after it replaces the line.
            drawn = folded(drawn) + ("\r" if drawn.endswith("\r") else "")
            unfinished = drawn + event
            if self._live and self._is_shown:
                self._terminal.redraw(drawn.rstrip("\r"), self._prefix)
        last, _ = worker_events.cut_before_event(unfinished + decoder.decode(b"", final=True))
        if last := folded(last):
            self._finish(last)
        os.close(self._descriptor)
        if self._log:
            self._log.close()

    def _note(self, event: dict[str, Any]) -> None:
        self.told.add(event["event"])
        if event["event"] in ("resumed", "saved") and isinstance(event.get("step"), int):
            self.step = event["step"]

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, 65536)
        except OSError:
            # How Linux says that nobody holds the other side of a pseudo-terminal any more.
            return b""

    def _finish(self, line: str) -> None:
        # A progress bar pads itself with blanks to cover its longer predecessor.
        line = line.rstrip(" ")
        self.recent.append(line)
        if self._is_shown:
            self._terminal.line(line, self._prefix)
        if self._log:
            try:
                self._log.write(line + "\n")
                self._log.flush()
            except OSError as failure:
                # A full disk must not stop the reading: the worker would block on a full pipe.
                self._terminal.line(f"(its log ends here: {failure})", self._prefix)
                self._log = None


def folded(line: str) -> str:
    """What is to be kept of a line that was redrawn with carriage returns and backspaces."""
    if "\r" in line:
        drawings = [drawing for drawing in line.split("\r") if drawing]
        line = drawings[-1] if drawings else ""
    if "\b" in line:
        kept: list[str] = []
        for character in line:
            if character != "\b":
                kept.append(character)
            elif kept:
                kept.pop()
        line = "".join(kept)
    return line


def cut(text: str, columns: int) -> str:
    """The text without what is beyond `columns`; colour codes take no column and all stay."""
    kept = []
    for part in re.split(r"(\x1b\[[0-9;]*m)", text):
        if part.startswith("\x1b["):
            kept.append(part)
        else:
            kept.append(part[: max(columns, 0)])
            columns -= len(part)
    return "".join(kept)
