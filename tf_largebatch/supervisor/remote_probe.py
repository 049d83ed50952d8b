"""Runs on the far side of ssh before a job: what there is for its workers.

Never imported where it runs, see `remote_wrapper.py`: the standard library alone, Python 3.8 or later.

It reads from stdin one line of JSON, {"folder": path, "ports": how many, "first_port": null or number,
"cuda_visible_devices": null or text}, and prints the mark and one line of JSON, {"folder": whether it is there,
"ports": [...], "busy": null or [port, why], "gpus": [...], "warning": text}.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys

# Shells there may print words of their own.
MARK = "\x1etf_largebatch probe "
_TIMEOUT_SECS = 30


def main() -> None:
    request = json.loads(sys.stdin.readline())
    chosen = request["cuda_visible_devices"]
    if chosen is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    gpus, warning = visible_gpus(os.environ)
    ports, busy = free_ports(request["ports"], request["first_port"])
    folder = os.path.isdir(request["folder"]) and os.access(request["folder"], os.X_OK)
    found = {"folder": folder, "ports": ports, "busy": busy, "gpus": gpus, "warning": warning}
    print("\n" + MARK + json.dumps(found), flush=True)


def visible_gpus(environment) -> tuple[list[str], str]:
    """(what `gpus.visible_gpus` gives on the launcher's own host, what it warns of)."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        gpus = []
        for entry in chosen.split(","):
            if entry.strip() in ("", "-1", "NoDevFiles"):
                break
            gpus.append(entry.strip())
        return gpus, ""
    program = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if program is None:
        return [], ""
    try:
        listing = subprocess.run(
            [program, "-L"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as failure:
        return [], str(failure)
    return re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE), ""


def free_ports(count: int, first_port: int | None) -> tuple[list[int], list | None]:
    """(ports on which nobody listens, None), or ([], (port, why)) if one from `first_port` on is taken."""
    held = []
    try:
        # All are held open until the last is found: otherwise the system may give one out twice.
        for index in range(count):
            port = first_port + index if first_port else 0
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.append(holder)
            try:
                # As TensorFlow's server does: on every interface, and beside closed connections of an earlier job.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("0.0.0.0", port))
                holder.listen()
            except OSError as failure:
                return [], [port, failure.strerror]
        return [holder.getsockname()[1] for holder in held], None
    finally:
        for holder in held:
            holder.close()


if __name__ == "__main__":
    main()
