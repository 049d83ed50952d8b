"""Runs of the launcher that train a small recipe with real workers, for tests to disturb."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from conftest import child_environment, launcher

FOLDER = Path(__file__).resolve().parent
RECIPE = """
name: faults
network: faulty:build
dataset: synthetic
dataset_options: {num_train: 270, num_test: 50}
global_batch_size: 32
epochs: 4
augmentation: flip_and_shift
optimizer: {name: lars}
schedule: {peak_learning_rate: 2.0, warmup_epochs: 1}
"""
# 8 steps an epoch.
STEPS = 32
# A run that hangs is a fault of its own.
LIMIT_SECS = 240


@dataclass(frozen=True)
class Done:
    """How a launcher ended.

    Attributes:
      code: its exit code.
      output: what it has shown.
      secs: how long it ran.
      workdir: of the run.
    """

    code: int
    output: str
    secs: float
    workdir: Path

    @property
    def record(self) -> dict:
        """job.json of its last launch."""
        return json.loads(max(self.workdir.glob("logs/20*/job.json")).read_text())


def command(workdir: Path, *flags: str) -> list[str]:
    """The launcher's command; flags may choose other workers than two local ones."""
    recipe = workdir.parent / f"{workdir.name}.yaml"
    recipe.write_text(RECIPE)
    where = (
        []
        if any(flag.startswith(("--local_workers", "--hosts", "--slurm")) for flag in flags)
        else ["--local_workers=2"]
    )
    fixed = ["--save_every_steps=5", "--heartbeat_timeout=5", "--tee=all"]
    return [
        sys.executable,
        launcher("gpu_cluster"),
        f"--config={recipe}",
        f"--workdir={workdir}",
        *where,
        *fixed,
        *flags,
    ]


def own_command(workdir: Path, program: str, *flags: str) -> list[str]:
    """The command that starts a program of the user's own, with its arguments, on two workers."""
    fixed = ["--heartbeat_timeout=5", "--tee=all", "--local_workers=2", f"--workdir={workdir}"]
    return [sys.executable, launcher("gpu_cluster"), *fixed, *flags, "--", *program.split()]


def environment(fault: str = "") -> dict[str, str]:
    variables = child_environment(FAULT=fault)
    return {**variables, "PYTHONPATH": f"{variables['PYTHONPATH']}{os.pathsep}{FOLDER}"}


@contextlib.contextmanager
def started(workdir: Path, *flags: str, fault: str = "", program: str = "") -> Iterator[subprocess.Popen]:
    """A launcher that runs meanwhile; it is killed at the end if it still runs."""
    process = subprocess.Popen(
        own_command(workdir, program, *flags) if program else command(workdir, *flags),
        env=environment(fault),
        cwd=workdir.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()


def run(workdir: Path, *flags: str, fault: str = "", program: str = "") -> Done:
    """A launcher from its start to its end."""
    began = time.monotonic()
    with started(workdir, *flags, fault=fault, program=program) as process:
        return ended(process, workdir, began)


def ended(process: subprocess.Popen, workdir: Path, began: float | None = None) -> Done:
    began = time.monotonic() if began is None else began
    output = process.communicate(timeout=LIMIT_SECS)[0]
    return Done(process.returncode, output, time.monotonic() - began, workdir)


def wait_for(file: Path, secs: float = 120) -> None:
    until = time.monotonic() + secs
    while not file.exists():
        assert time.monotonic() < until, f"no {file} after {secs} s"
        time.sleep(0.05)


def weights(workdir: Path) -> list[np.ndarray]:
    """Of the model that the run has saved."""
    from tf_largebatch._keras import keras

    sys.path.insert(0, str(FOLDER))
    try:
        import faulty  # noqa: F401 (its layer)
    finally:
        sys.path.remove(str(FOLDER))
    return keras.models.load_model(str(workdir / "model.keras"), compile=False).get_weights()


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(*pair) for pair in zip(one, other))


def left_over(workdir: Path) -> list[int]:
    """Processes of a run that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"--workdir={workdir}".encode() in (entry / "cmdline").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found
