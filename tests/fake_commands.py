"""Commands such as scontrol that are not there, or must not run, as shell scripts on a PATH of their own."""

from __future__ import annotations

from pathlib import Path


def fake(folder: Path, name: str, script: str) -> str:
    """A PATH on which the command does what the script says."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"
