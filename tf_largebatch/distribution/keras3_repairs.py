"""Keras 3 under tf.distribute, made right: `apply()` for this process, `undo()` to put Keras's own back.

    from tf_largebatch.distribution import keras3_repairs
    keras3_repairs.apply()

`strategies.strategy()` applies them. Stock Keras 3 raises, or computes something else than one
replica would with the whole batch, in the ways listed in `_repairs`; each entry replaces one function
of Keras and has a test with the right value in tests/conformance. Two are felt without a strategy as well: with
`gradient_accumulation_steps` schedules and averages count updates, and sparse gradients are clipped by their norm.
Public reports: keras-team/keras#20585 (fit under MultiWorkerMirroredStrategy), #20582 (gradient
accumulation), tensorflow/tensorflow#72388 (steps_per_execution); open since 2024.

`tests/conformance/test_keras3_canary.py` tells when Keras no longer needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absl import logging

from tf_largebatch._keras import KERAS_3, keras, keras_version

TESTED_VERSIONS = ("3.15.0", "3.15.1")

# What was replaced: (owner, attribute, original).
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def apply() -> None:
    """Repairs Keras 3 in this process; does nothing on Keras 2 or when already applied."""
    if not KERAS_3 or _originals:
        return
    if keras_version() not in TESTED_VERSIONS:
        logging.warning(
            "tf_largebatch repairs Keras %s as it does %s, but was not tested with it.",
            keras_version(),
            " and ".join(TESTED_VERSIONS),
        )
    for owner, attribute, repair in _repairs():
        original = getattr(owner, attribute)
        setattr(owner, attribute, repair(original))
        _originals.append((owner, attribute, original))


def undo() -> None:
    """Puts Keras's own functions back; not while a model trains in micro-batches, which builds on the repairs."""
    while _originals:
        setattr(*_originals.pop())


def _repairs() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(owner, attribute, repair: what was there -> what shall be there)."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
    from keras.src.losses import loss
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    from tf_largebatch.distribution import keras3_callbacks as callbacks
    from tf_largebatch.distribution import keras3_optimizer as optimizer
    from tf_largebatch.distribution import keras3_trainer as trainer

    scaler, saver = keras.optimizers.LossScaleOptimizer, keras.callbacks.ModelCheckpoint
    backup = keras.callbacks.BackupAndRestore
    return [
        # fit, evaluate: nested and uneven batches; exact metrics; steps_per_execution; batch-norm statistics.
        (TensorFlowTrainer, "_maybe_symbolic_build", trainer.build_from_first_replica),
        (TensorFlowTrainer, "_make_function", trainer.step_over_replicas),
        (loss, "scale_loss_for_distribution", trainer.scale_by_share),
        (loss, "unscale_loss_for_distribution", trainer.unscale_by_share),
        (loss, "reduce_values", trainer.scale_single_numbers),
        # Dropout and other random layers: another mask on each replica.
        (keras.random.SeedGenerator, "next", trainer.another_seed_on_each_replica),
        # Optimizers: clip after the reduce; accumulation and EMA on replicas; variable paths.
        (BaseOptimizer, "_clip_gradients", optimizer.clip_nothing_yet),
        (TFOptimizer, "_all_reduce_sum_gradients", optimizer.reduce_then_clip),
        (BaseOptimizer, "_backend_apply_gradients", optimizer.accumulate_outside_of_conditions),
        (BaseOptimizer, "_get_current_learning_rate", optimizer.rate_of_real_updates),
        (BaseOptimizer, "build", optimizer.paths_on_replicas),
        # Loss scaling: replicas and workers agree.
        (scaler, "_tf_apply", optimizer.reduce_before_finite_check),
        (scaler, "_stateful_handle_finite_grads", optimizer.take_as_reduced),
        # Callbacks: the chief writes.
        (saver, "_get_file_path", callbacks.own_file_off_chief),
        (backup, "_save_model", callbacks.own_backup_off_chief),
        (backup, "on_train_begin", callbacks.restore_the_same),
        (backup, "on_train_end", callbacks.delete_on_chief),
        (keras.callbacks.TensorBoard, "set_model", callbacks.own_logs_off_chief),
        (keras.callbacks.CSVLogger, "on_train_begin", callbacks.no_csv_off_chief),
    ]
