"""Scalars for TensorBoard by global step, as two runs, `train` and `test`, over the same tags."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tf_largebatch._keras import keras, tf


class ScalarLog(keras.callbacks.Callback):
    """Writes loss, accuracy, learning rate and images per second. Give it to the chief alone.

    Loss and metrics are what Keras reports: means since the start of the epoch. The learning rate
    is that of the update just made. The first rate of images per second of a run is left out: it
    is the time to trace and compile.

    Args:
      folder: where the runs `train` and `test` go.
      learning_rate: global step, from 0, to rate.
      global_batch_size: examples in a step, over all replicas.
      steps_per_epoch: global steps in an epoch.
      log_every_steps: how many steps apart the training scalars are.
    """

    def __init__(
        self,
        folder: Path,
        learning_rate: Callable[[int], float],
        global_batch_size: int,
        steps_per_epoch: int,
        log_every_steps: int = 1,
    ):
        super().__init__()
        self.folder = folder
        self.learning_rate = learning_rate
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = steps_per_epoch
        self.log_every_steps = log_every_steps
        self._epoch = 0
        self._last: tuple[int, float] | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._train = tf.summary.create_file_writer(str(self.folder / "train"))
        self._test = tf.summary.create_file_writer(str(self.folder / "test"))

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        step = self._epoch * self.steps_per_epoch + batch + 1
        if step % self.log_every_steps:
            return
        scalars = {name: float(value) for name, value in (logs or {}).items()}
        scalars["learning_rate"] = float(self.learning_rate(step - 1))
        now = time.perf_counter()
        if self._last is not None:
            last_step, then = self._last
            scalars["images_per_second"] = (step - last_step) * self.global_batch_size / (now - then)
        self._last = (step, now)
        _write(self._train, scalars, step)

    def on_test_end(self, logs: dict | None = None) -> None:
        # The time spent on evaluation is no part of a training step.
        self._last = None

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        tested = {name.removeprefix("val_"): float(value) for name, value in (logs or {}).items() if "val_" in name}
        _write(self._test, tested, (epoch + 1) * self.steps_per_epoch)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._train.close()
        self._test.close()


def _write(writer: tf.summary.SummaryWriter, scalars: dict[str, float], step: int) -> None:
    with writer.as_default():
        for name, value in scalars.items():
            tf.summary.scalar(name, value, step=step)
    writer.flush()
