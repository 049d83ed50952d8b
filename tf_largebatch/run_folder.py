"""The folder of a training run: who may use it, and what is written into it.

recipe.yaml  every value in force        tensorboard/  curves         checkpoints/  until the run has finished
result.json  once all is done            model.keras   final weights  best_model.keras, if asked for
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tf_largebatch import preflight
from tf_largebatch._keras import keras, keras_version, tf
from tf_largebatch.distribution import worker_sums
from tf_largebatch.validation import InputError

CHECKPOINTS = "checkpoints"
MODEL, BEST_MODEL = "model.keras", "best_model.keras"
_BEST, _JOB, _LOCK = "best_model.json", "job", ".lock"
# A lock lasts as long as its file is open.
_locks: dict[Path, Any] = {}
# A network file system may show a new file late.
_SHARED_SECS = 10.0


def claim(workdir: Path, strategy: tf.distribute.Strategy, overwrite: bool, job: str) -> None:
    """Makes the folder this run's, on all workers: looks that they share it, and removes what is to be replaced.

    Args:
      workdir: on every worker the same path.
      strategy: of all workers.
      overwrite: whether what an earlier job has left, finished or not, is removed.
      job: name of the job; a later attempt of the same job goes on with what the former has left. Empty:
        a job of its own.

    Raises:
      InputError: some workers do not see the chief's folder at that path, or another job uses it.
    """
    chief = worker_sums.is_chief(strategy)
    if worker_sums.of_chief(strategy, int(chief and not _locked(workdir))):
        raise InputError(f"--workdir: {str(workdir)!r} is used by another job that runs now; choose another folder.")
    # Below 2**53, whatever it travels through.
    token = worker_sums.of_chief(strategy, uuid.uuid4().int >> 76)
    mark = workdir / f".shared_{token}"
    if chief:
        # By another launch, not by an earlier attempt of this one.
        if overwrite and not (job and _read(workdir / _JOB) == job):
            for name in (preflight.RESULT_FILE, MODEL, BEST_MODEL, _BEST):
                (workdir / name).unlink(missing_ok=True)
            shutil.rmtree(workdir / CHECKPOINTS, ignore_errors=True)
        (workdir / _JOB).write_text(job)
        mark.touch()
    # All begin to look when the chief's file is there.
    worker_sums.total(strategy, [0])
    rank, workers = worker_sums.rank(strategy), worker_sums.num_workers(strategy)
    sees = _appears(mark)
    blind = worker_sums.total(strategy, [int(rank == other and not sees) for other in range(workers)])
    if chief:
        mark.unlink(missing_ok=True)
    if any(blind):
        names = " and ".join(f"worker {other}" for other, is_blind in enumerate(blind) if is_blind)
        raise InputError(
            f"--workdir: {str(workdir)!r} of worker 0 is not seen by {names}; put it on a file system that all workers "
            "share, at the same path."
        )


def _locked(workdir: Path) -> bool:
    """Takes the folder for this process until it ends; False if another one has it."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / _LOCK, "w")  # noqa: SIM115 (open as long as the lock)
    except OSError as failure:
        raise InputError(f"--workdir: {str(workdir)!r} cannot be written: {failure.strerror}.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return workdir in _locks
    except OSError:
        # A file system that has no locks.
        pass
    _locks[workdir] = file
    return True


def _appears(mark: Path) -> bool:
    until = time.monotonic() + _SHARED_SECS
    while not mark.exists():
        if time.monotonic() > until:
            return False
        # A listing makes an NFS client look again.
        if mark.parent.is_dir():
            os.listdir(mark.parent)
        time.sleep(0.1)
    return True


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def finish(workdir: Path, result: dict[str, Any]) -> None:
    """Writes the result; checkpoints of a finished run are of no more use."""
    write_json(workdir / preflight.RESULT_FILE, result)
    shutil.rmtree(workdir / CHECKPOINTS, ignore_errors=True)
    (workdir / _JOB).unlink(missing_ok=True)
    (workdir / _LOCK).unlink(missing_ok=True)
    if workdir in _locks:
        _locks.pop(workdir).close()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes in one step, so that a reader never sees half a file."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(path)


def environment() -> dict[str, str | int]:
    """Versions and hardware that a measured number belongs to."""
    return {
        "tensorflow": tf.__version__,
        "keras": keras_version(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count() or 0,
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def save_model(model: keras.Model, is_chief: bool, path: Path) -> bool:
    """Saves a model, whole or not at all; every worker calls it and the chief's file is kept.

    Returns:
      Whether it could be saved; the log says why not.
    """
    # Reading variables that are kept per replica is a collective act, so every worker saves.
    with tempfile.TemporaryDirectory() as scratch:
        draft = (path.parent if is_chief else Path(scratch)) / f"draft_{path.name}"
        try:
            model.save(str(draft))
            if is_chief:
                draft.replace(path)
        except Exception as failure:  # whatever a user's layers raise
            draft.unlink(missing_ok=True)
            reason = " ".join(str(failure).split())
            logging.error("The model was trained but could not be saved as %s: %s", path, reason)
            return False
    return True


class KeepBestModel(keras.callbacks.Callback):
    """Keeps the model of the epoch with the highest test accuracy; give it to every worker."""

    def __init__(self, workdir: Path, is_chief: bool):
        super().__init__()
        self.workdir = workdir
        self.is_chief = is_chief
        self.best: dict[str, float] | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        # Of this run before it was interrupted.
        text = _read(self.workdir / _BEST)
        self.best = json.loads(text) if text else None

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        accuracy = (logs or {}).get("val_accuracy")
        if accuracy is None or (self.best is not None and accuracy <= self.best["test_accuracy"]):
            return
        self.best = {"epoch": epoch + 1, "test_accuracy": float(accuracy)}
        if save_model(self.model, self.is_chief, self.workdir / BEST_MODEL) and self.is_chief:
            write_json(self.workdir / _BEST, self.best)
