"""Repairs of Keras 3's callbacks under several workers; applied by `keras3_repairs.py`.

Every worker runs every callback, and Keras 3 lets all of them write the same files: "BlockingIOError",
or half of one file in another. Here the chief writes; the others write to a folder of their
own that goes with the process, because reading some variables needs all workers.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from tf_largebatch.distribution import worker_sums
from tf_largebatch.validation import InputError

Original = Callable[..., Any]


@functools.cache
def _scratch() -> str:
    folder = tempfile.mkdtemp(prefix="not_chief_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _writes(model: Any) -> bool:
    return worker_sums.is_chief(model.distribute_strategy)


def own_file_off_chief(original: Original) -> Original:
    """`ModelCheckpoint._get_file_path`."""

    def _get_file_path(self: Any, epoch: int, batch: int | None, logs: dict) -> str:
        path = original(self, epoch, batch, logs)
        return path if _writes(self.model) else os.path.join(_scratch(), os.path.basename(path))

    return _get_file_path


def own_backup_off_chief(original: Original) -> Original:
    """`BackupAndRestore._save_model`."""

    def _save_model(self: Any) -> None:
        if _writes(self.model):
            original(self)
        else:
            self.model.save_weights(os.path.join(_scratch(), "backup.weights.h5"), overwrite=True)

    return _save_model


def restore_the_same(original: Original) -> Original:
    """`BackupAndRestore.on_train_begin`: workers that begin in different epochs would wait for ever."""

    def on_train_begin(self: Any, logs: dict | None = None) -> None:
        original(self, logs)
        strategy, epoch = self.model.distribute_strategy, self.model._initial_epoch or 0
        if worker_sums.total(strategy, [epoch])[0] != epoch * worker_sums.num_workers(strategy):
            raise InputError(
                f"BackupAndRestore: the backup in {self.backup_dir!r} is not the same on all workers; "
                "put it on a file system that they share."
            )

    return on_train_begin


def delete_on_chief(original: Original) -> Original:
    """`BackupAndRestore.on_train_end`."""

    def on_train_end(self: Any, logs: dict | None = None) -> None:
        if _writes(self.model):
            original(self, logs)
        # A next fit must not find on some worker what the chief is about to delete.
        worker_sums.total(self.model.distribute_strategy, [0])

    return on_train_end


def own_logs_off_chief(original: Original) -> Original:
    """`TensorBoard.set_model`."""

    def set_model(self: Any, model: Any) -> None:
        if not _writes(model):
            self.log_dir = os.path.join(_scratch(), "logs")
        original(self, model)

    return set_model


def no_csv_off_chief(original: Original) -> Original:
    """`CSVLogger.on_train_begin`."""

    def on_train_begin(self: Any, logs: dict | None = None) -> None:
        if not _writes(self.model):
            self.filename = os.path.join(_scratch(), "log.csv")
        original(self, logs)

    return on_train_begin
