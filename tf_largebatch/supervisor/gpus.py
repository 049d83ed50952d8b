"""Which GPUs a job on this machine may use, without loading TensorFlow (which would claim them)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from absl import logging

_TIMEOUT_SECS = 30


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them: numbers, or UUIDs where the user gave those.

    CUDA_VISIBLE_DEVICES decides if it is set; otherwise all that `nvidia-smi` lists are visible.

    Args:
      environment: such as `os.environ`.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return _installed(environment)
    gpus: list[str] = []
    for entry in chosen.split(","):
        # CUDA itself stops at the first entry that names no device; -1 and NoDevFiles are the
        # usual ways to say "none".
        if entry.strip() in ("", "-1", "NoDevFiles"):
            break
        gpus.append(entry.strip())
    return tuple(gpus)


def _installed(environment: Mapping[str, str]) -> tuple[str, ...]:
    program = shutil.which("nvidia-smi", path=environment.get("PATH", ""))
    if program is None:
        return ()
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_SECS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as failure:
        # A host with the tool but without a working driver: TensorFlow will find no GPU either.
        logging.warning("nvidia-smi does not work here, so no GPU is used: %s", failure)
        return ()
    return tuple(re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE))
