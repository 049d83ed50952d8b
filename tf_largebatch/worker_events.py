"""What a worker tells the supervisor that started it, as marked lines of its output.

Output is the one channel that every way to start a worker has: a local process, ssh, srun. The
supervisor takes these lines out before it shows the rest. Without a supervisor nothing is told.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, Literal

# Set by the supervisor for its workers.
VARIABLE = "TFLB_EVENTS"

# "waiting": about to meet the other workers; "ready": all have met; "stoppable": a SIGTERM is now answered by
# saving and exit code 75; "resumed" and "saved": with the global step, from the chief.
Event = Literal["waiting", "ready", "stoppable", "resumed", "saved"]

_MARK = "\x1etf_largebatch "
# A progress bar leaves its line unfinished, so that a mark can stand anywhere in a line.
_TOLD = re.compile(_MARK + "([^\n]*)\n")
# One that goes on for longer will never be complete: its writer was interrupted.
_LONGEST = 4096


def tell(event: Event, **facts: int | str) -> None:
    """Tells the supervisor, if there is one."""
    if os.environ.get(VARIABLE):
        sys.stdout.flush()
        # In one write, so that the lines of several threads do not mix.
        sys.stdout.write(f"{_MARK}{json.dumps({'event': event, **facts})}\n")
        sys.stdout.flush()


def taken_out(text: str) -> tuple[str, list[dict[str, Any]]]:
    """(the text without complete events, the events); one that is not complete yet stays in the text."""
    events = []
    for told in _TOLD.findall(text):
        try:
            event = json.loads(told)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return _TOLD.sub("", text), events


def cut_before_event(text: str) -> tuple[str, str]:
    """An unfinished line before and from an event that is not complete yet."""
    at = text.find(_MARK)
    begun = text[at if at >= 0 else text.rfind(_MARK[0]) :] if _MARK[0] in text else ""
    # A program may print the mark's first character for itself.
    if len(begun) > _LONGEST or not (begun.startswith(_MARK) or _MARK.startswith(begun)):
        begun = ""
    return text.removesuffix(begun), begun
