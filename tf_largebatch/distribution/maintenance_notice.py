"""Google Cloud's word that this machine is about to be taken away, from its metadata server.

A spot machine's end and a host's maintenance (TPUs and GPUs cannot move to another host) are told there, not by a
signal: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice.
"""

from __future__ import annotations

import http.client
import os
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

_HARDWARE = Path("/sys/class/dmi/id/product_name")
_PERIOD_SECS = 5.0
_TIMEOUT_SECS = 2.0
# A proxy for the web, which the environment may name, does not know this machine's metadata.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def metadata_server() -> str | None:
    """`host[:port]` of the metadata server; None where this is no machine of Google Cloud.

    GCE_METADATA_HOST, which Google's own libraries read, decides if it is set.
    """
    if host := os.environ.get("GCE_METADATA_HOST"):
        return host
    try:
        return "metadata.google.internal" if "Google" in _HARDWARE.read_text() else None
    except OSError:
        return None


class MaintenanceNotice:
    """Calls `notify` once when this machine is to be stopped; does nothing elsewhere."""

    def __init__(self, notify: Callable[[], None], period_secs: float = _PERIOD_SECS):
        self._notify = notify
        self._period_secs = period_secs
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins to ask, in a thread."""
        if server := metadata_server():
            threading.Thread(target=self._ask, args=(server,), name="maintenance notice", daemon=True).start()

    def stop(self) -> None:
        """Asks no more."""
        self._stopped.set()

    def _ask(self, server: str) -> None:
        while not self._stopped.wait(self._period_secs):
            if _read(server, "preempted") == "TRUE" or _read(server, "maintenance-event").startswith("TERMINATE"):
                if not self._stopped.is_set():
                    self._notify()
                return


def _read(server: str, name: str) -> str:
    address = f"http://{server}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECS) as answer:
            return answer.read().decode().strip()
    except (OSError, ValueError, http.client.HTTPException):
        # The server does not answer now and then.
        return ""
