"""A Keras callback that lets `fit` survive: it saves, goes on where it was, and stops when asked to."""

from __future__ import annotations

import time
from typing import Any

from tf_largebatch import worker_events
from tf_largebatch._keras import keras
from tf_largebatch.distribution import keras_fit_state, worker_sums
from tf_largebatch.distribution.checkpoints import Checkpoints
from tf_largebatch.distribution.keras_fit_state import Position, ReadAgain
from tf_largebatch.distribution.stop_request import StopRequest
from tf_largebatch.validation import InputError, PositiveFloat, PositiveInt, checked

# sysexits' "temporary failure": the same command, started again, goes on.
STOPPED_AND_SAVED = 75
# What is saved beside the variables.
_NEEDED = ("position", "logs", "steps_per_epoch", "ended_at_epochs", "about")
# Folders of trainings that this process has finished: another fit there would find nothing to do.
_finished: set[str] = set()
# Steps until the time of one is known well enough to save by the clock.
_TIMED_STEPS = 10


class Stopped(SystemExit):
    """All workers have saved after the same step and end, with exit code 75, because one was asked to."""

    def __init__(self) -> None:
        super().__init__(STOPPED_AND_SAVED)


class SaveAndResume(keras.callbacks.Callback):
    """Saves the state of training, and makes a later `fit` of the same program go on from there.

    Saved are weights, optimizer, random states, the running epoch's metrics, and the position in epoch and
    data; the first `fit` with this callback goes on from the newest whole checkpoint in `folder`, if there is
    one. With deterministic data the weights it ends with are bit for bit those of a run that was never stopped,
    on as many workers; on another number they differ by rounding, as do moving statistics that Keras 2 keeps
    per replica. At SIGTERM, SIGUSR1, or a maintenance notice of Google Cloud to any worker, all workers save
    after the same step and raise `Stopped`, a SystemExit with code 75. A save that fails, on a full disk for
    example, costs a warning.

    Give it on every worker, last in `callbacks`, with a folder of its own for every `fit`; the chief writes.
    What the other callbacks remember, such as EarlyStopping's patience, is not saved: they see the last step
    made once more, then what follows. A `fit` that has ended, early or not, makes no further step. It holds for
    functional, sequential and built subclassed models, on Keras 3 and Keras 2, with and without a strategy.

    Args:
      folder: for the checkpoints, seen by all workers. To train anew, give another one, or remove it.
      every_steps: saves after so many steps; None: by `every_minutes` alone.
      every_minutes: saves about that often, by the chief's clock; None: by `every_steps` alone. The last step of
        `fit` is always saved.
      keep: how many checkpoints are kept. 2 let a run go on whose newest one is damaged.
      read_again: how the data gets to its position: "all" reads the data of all steps made again without
        training, which is right for any data that is the same in every run of the program; "epoch" that of the
        running epoch alone, if every epoch has the same order or data of its own; "nothing", if the data begins
        at `restore(model).step` by itself.

    Raises:
      InputError: an argument is wrong; or, from `fit`, the checkpoint is of another model, or the model has no
        weights yet.
    """

    def __init__(
        self,
        folder: str,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep: int = 2,
        read_again: ReadAgain = "all",
    ):
        super().__init__()
        where = type(self).__name__
        self.folder = str(folder)
        self.every_steps = checked(f"{where}: every_steps", every_steps, PositiveInt | None)
        self.every_minutes = checked(f"{where}: every_minutes", every_minutes, PositiveFloat | None)
        self.keep = checked(f"{where}: keep", keep, PositiveInt)
        self.read_again = checked(f"{where}: read_again", read_again, ReadAgain)
        self._position: Position | None = None
        self._is_restored = False
        self._logs: dict[str, float] = {}

    def restore(self, model: keras.Model, about: dict[str, Any] | None = None) -> Position:
        """Gives a compiled model the newest checkpoint's state; `fit` calls it if it was not called before.

        Args:
          about: facts of the run, JSON, that must be those of the checkpoint; such as {"recipe": text}.

        Returns:
          Where training goes on; all 0 if there is no checkpoint.
        """
        self._checkpoints = Checkpoints(self.folder, model.distribute_strategy, self.keep)
        if self.folder in _finished and self._checkpoints.steps():
            raise InputError(
                f"SaveAndResume: this process has finished a training with the folder {self.folder!r}; give every fit "
                "a folder of its own."
            )
        self._about = about or {}
        self._variables = keras_fit_state.training_variables(model)
        saved = self._checkpoints.restore(self._variables, _NEEDED)
        self._saved_step = saved["step"] if saved else None
        self._position = Position(**saved["position"]) if saved else Position()
        self._saved_steps = saved["steps_per_epoch"] if saved else None
        self._ended_at_epochs = saved["ended_at_epochs"] if saved else None
        self._is_restored = True
        if saved:
            for name, fact in self._about.items():
                if saved["about"].get(name) != fact:
                    raise InputError(
                        f"the checkpoints in {self.folder} are of another {name}; choose another folder, or "
                        "remove them to train anew (launchers: --overwrite)."
                    )
            self._logs = saved["logs"]
            self._restored = saved["path"]
            worker_events.tell("resumed", step=self._position.step)
            if worker_sums.is_chief(model.distribute_strategy):
                place = f"epoch {self._position.epoch + 1}, step {self._position.batch}"
                print(f"going on from {saved['path']}: {place}", flush=True)
        return self._position

    def on_train_begin(self, logs: dict | None = None) -> None:
        # A former fit of this callback may have raised in its middle.
        if not self._is_restored:
            self.restore(self.model)
        self._is_restored = False
        resumed = self._position.step > 0
        self._check_steps()
        if resumed:
            keras_fit_state.begin_at(self.model, self._position, self._last_step, self.read_again)
        self._reported_again = resumed and self._position.batch > 0
        self._adds_metrics = False
        self._epoch = self._begun = 0
        self._strategy = self.model.distribute_strategy
        self._steps_here = 0
        self._next_by_clock = _TIMED_STEPS if self.every_minutes else None
        self._clock = time.monotonic()
        self._stop = StopRequest(self._strategy)
        self._stop.open()
        worker_events.tell("stoppable")

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if self._position.step == 0:
            self._position = Position(epoch=epoch, first_epoch=epoch)
        self._epoch = epoch
        # Of the epoch before, if that had no further step.
        self._adds_metrics = False

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._begun = batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._reported_again:
            self._reported_again = False
            if self._ended_at_epochs is not None and self.params["epochs"] <= self._ended_at_epochs:
                # By EarlyStopping, for example.
                self.model.stop_training = True
            return
        if self._adds_metrics:
            # Keras 2 makes them in the first step. They are sums.
            self._adds_metrics = not self._set_metrics(added=True)
        # Keras 3 counts a last execution as whole, though the data ends in it.
        end = min(batch + 1, self.params.get("steps") or batch + 1)
        made = end - self._begun
        self._steps_here += made
        step = self._position.step + made
        self._position = Position(step, self._epoch, end, self._begun, self._position.first_epoch)
        self._logs = logs or {}
        if self._stop.is_due(self._steps_here):
            self._stop_here()
        due = self.every_steps is not None and step // self.every_steps > (step - made) // self.every_steps
        if due:
            self._save()
        if self._next_by_clock is not None and self._steps_here >= self._next_by_clock:
            if self._steps_here > _TIMED_STEPS and not due:
                self._save()
            self._next_by_clock = self._steps_here + self._steps_in_period()

    def on_test_begin(self, logs: dict | None = None) -> None:
        # Of the last epoch, before validation takes the metrics for itself.
        if self._position is not None and self._epoch + 1 == self.params["epochs"]:
            self._save_last()

    def on_train_end(self, logs: dict | None = None) -> None:
        if self.model.stop_training and self._epoch + 1 < self.params["epochs"]:
            # Before its last epoch; the weights may be those of an earlier one.
            self._ended_at_epochs = self.params["epochs"]
            self._save()
        self._save_last()
        self._stop.close()
        self._position = None
        _finished.add(self.folder)

    def _check_steps(self) -> None:
        steps = self.params.get("steps")
        if None not in (steps, self._saved_steps) and steps != self._saved_steps:
            raise InputError(
                f"SaveAndResume: an epoch has {steps} steps, but had {self._saved_steps} when {self.folder!r} was "
                "written; keep batch size and data as they were, or choose another folder."
            )

    def _stop_here(self) -> None:
        chief = worker_sums.is_chief(self._strategy)
        self._save()
        self._stop.close()
        if chief:
            where = "nothing could be saved" if self._saved_step is None else f"step {self._saved_step} is saved"
            print(f"asked to stop{f' by {self._stop.reason}' * bool(self._stop.reason)}: {where}", flush=True)
        raise Stopped

    def _save_last(self) -> None:
        if self._saved_step != self._position.step:
            self._save()

    def _save(self) -> None:
        position = self._position
        metrics = keras_fit_state.metric_variables(self.model)
        logs = {name: float(value) for name, value in self._logs.items()}
        about = {
            "position": vars(position),
            "logs": logs,
            "steps_per_epoch": self.params.get("steps"),
            "ended_at_epochs": self._ended_at_epochs,
            "about": self._about,
        }
        started = time.monotonic()
        path = self._checkpoints.save(position.step, self._variables, metrics, about)
        if path is not None:
            self._saved_step = position.step
            if worker_sums.is_chief(self._strategy):
                worker_events.tell("saved", step=position.step)
        # What a save takes is no part of a step.
        self._clock += time.monotonic() - started

    def _steps_in_period(self) -> int:
        """How many steps the chief makes in `every_minutes`, as it has made them so far."""
        secs_per_step = (time.monotonic() - self._clock) / self._steps_here
        return worker_sums.of_chief(self._strategy, max(int(self.every_minutes * 60 / secs_per_step), 1))

    def _last_step(self, batch: Any) -> dict[str, float]:
        """What the last step made has reported; the metrics go on from there."""
        keras_fit_state.build_metrics(self.model, batch)
        self._adds_metrics = not self._set_metrics(added=False)
        return dict(self._logs)

    def _set_metrics(self, added: bool) -> bool:
        """Gives the metrics their saved values, or adds these; False where they have no variables yet."""
        metrics = keras_fit_state.metric_variables(self.model)
        for (_, variable), saved in zip(metrics, self._checkpoints.metrics(self._restored, len(metrics))):
            variable.assign(variable + saved if added else saved)
        return bool(metrics)
