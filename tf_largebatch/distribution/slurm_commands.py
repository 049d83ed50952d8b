"""Slurm's own commands, whose failures become one sentence with their words."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from tf_largebatch.validation import InputError

_TIMEOUT_SECS = 60


def hostnames(nodes: str, environment: Mapping[str, str]) -> list[str]:
    """The names in a list of nodes such as `rack[0-1]n[8-10]`, in Slurm's order.

    Args:
      nodes: the list.
      environment: with the PATH to scontrol.

    Raises:
      InputError: there is no scontrol, or no such list.
    """
    return output_of("scontrol", "show", "hostnames", nodes, environment=environment).split()


def output_of(program: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """What a command of Slurm prints to stdout; its warnings go to stderr.

    Args:
      program: such as "scontrol".
      *arguments: its command line.
      environment: its environment, with the PATH to it.

    Raises:
      InputError: it is not there, or it failed.
    """
    found = shutil.which(program, path=environment.get("PATH", ""))
    if found is None:
        raise InputError(f"{program}, a command of Slurm, is not on PATH here; add it, or work without Slurm.")
    what = " ".join([program, *arguments])
    try:
        done = subprocess.run(
            [found, *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECS,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise InputError(f"'{what}' failed: {failure}.") from None
    if done.returncode:
        raise InputError(f"'{what}' failed with exit code {done.returncode}: {_part_of_sentence(done.stderr)}.")
    sys.stderr.write(done.stderr)
    return done.stdout


def _part_of_sentence(stderr: str) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()).rstrip(".!?") for line in stderr.splitlines()]
    return re.sub(r"[.!?]+ +(?=[A-Z])", ", ", "; ".join(filter(None, lines))) or "it did not say why"
