"""What a training run in Keras's `fit` consists of, and how `fit` begins where another one ended, on both Kerases."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from absl import logging

from tf_largebatch._keras import KERAS_3, keras, sublayers, tf, tf_variable, variable_path
from tf_largebatch.validation import InputError

ReadAgain = Literal["all", "epoch", "nothing"]
# A batch that is read again, or None, -> what the last step made reports.
Report = Callable[[Any], dict[str, float]]


@dataclass(frozen=True)
class Position:
    """How far a `fit` has come.

    Attributes:
      step: global steps made.
      epoch: the running epoch.
      batch: steps of it that are made; 0 before its first.
      last_batch: the first step of the last call of the training function, which makes several with
        `steps_per_execution`.
      first_epoch: where the first `fit` of the run began.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    last_batch: int = 0
    first_epoch: int = 0


def training_variables(model: keras.Model) -> list[tuple[str, tf.Variable]]:
    """All that training changes: weights, moving statistics, random states, and the optimizer's variables.

    Raises:
      InputError: the model has no weights yet.
    """
    if not model.built:
        raise InputError(f"{model.name} has no weights yet; give it an Input, or call it once, to save and resume it.")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise InputError(f"{model.name} is not compiled; compile it to save and resume its training.")
    with model.distribute_strategy.scope():
        if hasattr(optimizer, "build"):
            optimizer.build(model.trainable_variables)
        else:
            # Optimizers of tensorflow-addons are of Keras's older kind.
            optimizer._create_all_weights(model.trainable_variables)
    of_optimizer = optimizer.variables
    found = [*model.variables, *_random_states(model), *(of_optimizer() if callable(of_optimizer) else of_optimizer)]
    metrics = {id(variable) for _, variable in metric_variables(model)}
    return [(name, variable) for name, variable in _named(found) if id(variable) not in metrics]


def metric_variables(model: keras.Model) -> list[tuple[str, tf.Variable]]:
    """Those of the loss and the metrics of the running epoch; Keras 2 makes them at the first step."""
    return _named(variable for metric in model.metrics for variable in metric.variables)


def _named(variables: Any) -> list[tuple[str, tf.Variable]]:
    unique = {id(tf_variable(variable)): variable for variable in variables}
    return [(variable_path(variable), tf_variable(variable)) for variable in unique.values()]


def _random_states(model: keras.Model) -> list[tf.Variable]:
    """Keras 2's, of layers such as Dropout. Keras 3 counts them among the model's variables."""
    if KERAS_3:
        return []
    states, lost = [], []
    for layer in sublayers(model):
        random = getattr(layer, "_random_generator", None)
        if random is None:
            continue
        # Of several replicas each has a state of its own.
        if getattr(random, "_generator", None) is not None and model.distribute_strategy.num_replicas_in_sync == 1:
            states.append(random._generator.state)
        elif getattr(layer, "rate", getattr(layer, "stddev", 1)):
            lost.append(layer.name)
    if lost:
        logging.warning(
            "Keras 2 keeps the random state of %s where it cannot be saved, so that a resumed run draws others: use "
            "GlobalBatchDropout, or on one replica call tf.keras.backend.experimental.enable_tf_random_generator() "
            "before you make the model.",
            ", ".join(lost),
        )
    return states


def begin_at(model: keras.Model, position: Position, report: Report, read_again: ReadAgain) -> None:
    """Makes the `fit` that is about to begin go on from `position`; for use in `on_train_begin`.

    The last step made is reported again, as `report` tells, to the callbacks, as is all that follows it. The
    data of steps made is read again without training: of all epochs ("all"), of the running one ("epoch"), or
    none ("nothing": the data begins at the position by itself).
    """
    (_begin_keras_3 if KERAS_3 else _begin_keras_2)(model, position, report, read_again)


def _begin_keras_3(model: keras.Model, position: Position, report: Report, read_again: ReadAgain) -> None:
    from keras.src.backend.tensorflow.trainer import TFEpochIterator as Epochs

    original = Epochs.__iter__ if "__iter__" in vars(Epochs) else None
    model._initial_epoch = position.epoch

    def begin(epochs: Any) -> Any:
        # Only the first loop over batches, which is that of the first epoch.
        if original is None:
            del Epochs.__iter__
        else:
            Epochs.__iter__ = original
        model._initial_epoch = None
        if read_again == "all":
            for _ in range(position.first_epoch, position.epoch):
                with epochs.catch_stop_iteration():
                    for first, last, iterator in epochs:
                        _read(iterator, last - first + 1)
        iter(epochs)
        if position.batch:
            for first, last, iterator in epochs._epoch_iterator:
                if first >= position.last_batch:
                    # To be met again by `fit`.
                    epochs._epoch_iterator = itertools.chain([(first, last, iterator)], epochs._epoch_iterator)
                    break
                if read_again != "nothing":
                    _read(iterator, last - first + 1)
            # As many batches as Keras 3 counts in that call, which can be more than the epoch had left.
            _report_again(model, last - first + 1, report, read_again)
        return epochs

    Epochs.__iter__ = begin


def _begin_keras_2(model: keras.Model, position: Position, report: Report, read_again: ReadAgain) -> None:
    # keras or tf_keras.
    data_adapter = sys.modules[keras.Model.__module__.rpartition(".")[0] + ".data_adapter"]
    handler = data_adapter.DataHandler
    original = handler.enumerate_epochs

    def enumerate_epochs(self: Any) -> Iterator[tuple[int, Any]]:
        handler.enumerate_epochs = original
        self._initial_epoch = position.first_epoch if read_again == "all" else position.epoch
        for epoch, iterator in original(self):
            if epoch < position.epoch:
                with self.catch_stop_iteration():
                    for _ in self.steps():
                        _read(iterator, self.step_increment + 1)
                continue
            if epoch == position.epoch and position.batch:
                if read_again != "nothing":
                    _read(iterator, position.last_batch)
                self._initial_step = position.last_batch
                _report_again(model, position.batch - position.last_batch, report, read_again)
            yield epoch, iterator

    handler.enumerate_epochs = enumerate_epochs


def _report_again(model: keras.Model, batches: int, report: Report, read_again: ReadAgain) -> None:
    train_function: Callable[[Any], Any] = model.train_function

    def report_only(iterator: Any) -> dict[str, float]:
        model.train_function = train_function
        return report(_read(iterator, 0 if read_again == "nothing" else batches))

    model.train_function = report_only


def _read(iterator: Any, batches: int) -> Any:
    """Reads the batches of one call of the training function, and gives the first."""
    if not batches:
        return None
    first = next(iterator)
    # Only where there is none at all does such a call end the epoch; the last one can have fewer.
    with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
        for _ in range(batches - 1):
            next(iterator)
    return first


def build_metrics(model: keras.Model, batch: Any) -> None:
    """Makes the variables of loss and metrics where Keras 3 otherwise makes them in its first step."""
    if KERAS_3 and batch is not None and not isinstance(batch, tf.distribute.DistributedValues):
        leaves = tf.nest.flatten(batch)
        if all(leaf is None or tf.is_tensor(leaf) for leaf in leaves):
            model._symbolic_build(data_batch=batch)
