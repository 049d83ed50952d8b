"""Training images per second, without what is not training."""

from __future__ import annotations

import statistics
import time

from tf_largebatch._keras import keras


class Throughput(keras.callbacks.Callback):
    """Times the training part of each epoch: evaluation, tracing and compilation do not count.

    Keras fetches an epoch's metrics before it evaluates, so the clock stops after the device has
    finished the last step.

    Args:
      global_batch_size: examples in a step, over all replicas.
    """

    def __init__(self, global_batch_size: int):
        super().__init__()
        self.global_batch_size = global_batch_size
        self._rates: list[float] = []
        self._started = self._stopped = 0.0
        self._steps = 0

    @property
    def images_per_second(self) -> float | None:
        """Median over epochs, of all workers together; None before the first epoch's end.

        The first epoch's first step, which traces and compiles, is left out, and so is the whole
        first epoch where there are others.
        """
        return statistics.median(self._rates[1:] or self._rates) if self._rates else None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._started, self._stopped, self._steps = time.perf_counter(), 0.0, 0
        self._traces = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        first = self._steps == 0
        if first and batch:
            # A resumed run reports the last step of the former once more, in no time.
            self._traces = batch + 1
        if not self._rates and (first or batch == self._traces) and self.params.get("steps", 0) != 1:
            # Restart after the step that traced; a one-step epoch has no other to time.
            self._started, self._steps = time.perf_counter(), -(batch + 1)
        self._steps_at_end = batch + 1

    def on_test_begin(self, logs: dict | None = None) -> None:
        self._stopped = self._stopped or time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        seconds = (self._stopped or time.perf_counter()) - self._started
        steps = self._steps_at_end + self._steps
        if steps > 0:
            self._rates.append(steps * self.global_batch_size / seconds)
