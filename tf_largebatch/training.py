"""A training run, read from top to bottom: `run(recipe, cluster, workdir)`."""

from __future__ import annotations

import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import logging

from tf_largebatch import preflight, recipe_objects, run_folder, scaling
from tf_largebatch._keras import keras, keras_version, set_precision, tf, warn_if_regularized
from tf_largebatch.config import Recipe
from tf_largebatch.datasets import arrays, augmentation, batches
from tf_largebatch.distribution import micro_batch_checks, stop_request, strategies
from tf_largebatch.distribution.cluster import Cluster
from tf_largebatch.distribution.save_and_resume import SaveAndResume
from tf_largebatch.monitoring.tensorboard import ScalarLog
from tf_largebatch.monitoring.throughput import Throughput
from tf_largebatch.validation import InputError


def run(
    recipe: Recipe,
    cluster: Cluster,
    workdir: Path,
    overwrite: bool = False,
    max_per_replica_batch_size: int | None = None,
    saving: Saving | None = None,
) -> dict[str, Any]:
    """Trains a recipe on a cluster; every worker of the cluster calls this.

    The chief writes into `workdir` what `run_folder.py` lists. A run that was interrupted goes on from its last
    checkpoint there, also on a cluster that cuts the global batch up in another way.

    Args:
      recipe: what to compute.
      cluster: where; of this process's own view.
      workdir: folder for the results, made if missing.
      overwrite: whether a run in `workdir`, finished or not, is replaced.
      max_per_replica_batch_size: examples that one device can take at once; more are taken in micro-batches.
        None: any number.
      saving: how often checkpoints are written, and for which job; default `Saving()`.

    Returns:
      What `result.json` holds, and whether the model was saved ("model_saved").

    Raises:
      InputError: something in the recipe, the data, the cluster or `workdir` is wrong; where one worker can
        tell, raised before it waits for any other.
      TrainingDiverged: the loss became infinite or NaN.
      Stopped: a SystemExit with code 75; a signal told some worker to stop, and all have saved.
    """
    saving = saving or Saving()
    # Whatever can be wrong is found before the strategy, which waits for all workers.
    functions = preflight.check(recipe)
    preflight.check_workdir(workdir, overwrite)
    replicas_per_worker = strategies.replicas_per_worker(cluster)
    split = preflight.split(recipe, cluster.num_workers, replicas_per_worker, max_per_replica_batch_size)
    # A user's module that cannot be imported.
    functions.network.resolve()
    loaded = functions.dataset.resolve()(**functions.dataset.options)
    train, test, num_classes = arrays.checked(loaded, recipe.dataset)
    augmentation.check(recipe.augmentation, train[0].shape[1:])
    steps_per_epoch = scaling.steps_per_epoch(len(train[0]), recipe.global_batch_size)
    schedule = recipe_objects.learning_rate_schedule(recipe, steps_per_epoch)

    set_precision(recipe.precision)
    keras.utils.set_random_seed(recipe.seed)
    if cluster.num_workers > 1:
        print(f"worker {cluster.rank}: waiting until all {cluster.num_workers} workers have started", flush=True)
    strategy = strategies.strategy(cluster, recipe.collectives)
    if strategy.num_replicas_in_sync != split.replicas:
        raise InputError(
            f"the strategy has {strategy.num_replicas_in_sync} replicas, not {split.replicas}: every worker "
            f"needs as many devices as this one, {replicas_per_worker}."
        )
    strategies.check_same_on_all_workers(strategy, recipe.to_yaml())
    run_folder.claim(workdir, strategy, overwrite, saving.job)
    if cluster.is_chief:
        # TensorFlow's own class has an older name.
        name = "MultiWorkerMirroredStrategy" if cluster.num_workers > 1 else type(strategy).__name__
        kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
        print(f"global batch: {split}", flush=True)
        print(f"on {kind}s, {name}, TensorFlow {tf.__version__}, Keras {keras_version()}", flush=True)

    test_data = strategy.distribute_datasets_from_function(
        lambda _: batches.evaluation_batches(*test, split, cluster.rank)
    )
    test_steps = batches.evaluation_steps(len(test[0]), split)

    with strategy.scope():
        model = recipe_objects.model(recipe, split, schedule, train[0].shape[1:], num_classes)

    known = micro_batch_checks.layers_that_know_the_cluster(model)
    if known and cluster.is_chief:
        logging.warning(
            "The result depends on how this cluster cuts the batch up, because of the layers %s: give them as "
            "GhostBatchNormalization with a group_size, and as GlobalBatchDropout.",
            ", ".join(known),
        )
    warn_if_regularized(model, getattr(recipe.optimizer, "weight_decay", 0.0))
    # The data begins at the position that is restored.
    resume = SaveAndResume(
        str(workdir / run_folder.CHECKPOINTS), saving.every_steps, saving.every_minutes, read_again="nothing"
    )
    resumed_at = resume.restore(model, {"recipe": recipe.to_yaml()}).step
    training_data = strategy.distribute_datasets_from_function(
        lambda _: batches.training_batches(
            *train, split, cluster.rank, recipe.epochs, recipe.seed, recipe.augmentation, resumed_at
        )
    )
    throughput = Throughput(recipe.global_batch_size)
    callbacks = [throughput, _StopWhenNotFinite()]
    if cluster.is_chief:
        (workdir / "recipe.yaml").write_text(recipe.to_yaml())
        log_folder = workdir / "tensorboard"
        if not resumed_at:
            # Curves of an earlier run would be drawn as part of this one.
            shutil.rmtree(log_folder, ignore_errors=True)
        callbacks.append(
            ScalarLog(log_folder, schedule, recipe.global_batch_size, steps_per_epoch, recipe.log_every_steps)
        )
    best = run_folder.KeepBestModel(workdir, cluster.is_chief)
    # A checkpoint is of a step that the callbacks before it have seen.
    callbacks += [*([best] if recipe.keep_best_model else []), resume]
    with stop_request.finishing_when_asked():
        started = time.perf_counter()
        history = model.fit(
            training_data,
            epochs=recipe.epochs,
            steps_per_epoch=steps_per_epoch,
            validation_data=test_data if recipe.evaluate_every_epochs else None,
            validation_steps=test_steps if recipe.evaluate_every_epochs else None,
            validation_freq=recipe.evaluate_every_epochs or 1,
            callbacks=callbacks,
            # The pipeline shuffles; Keras warns about its own default.
            shuffle=False,
            verbose=_verbosity(cluster),
        ).history
        train_seconds = time.perf_counter() - started
        tested = model.evaluate(test_data, steps=test_steps, verbose=0, return_dict=True)
        result = {
            "recipe": asdict(recipe),
            "split": asdict(split),
            "steps": recipe.epochs * steps_per_epoch,
            "train_loss": history["loss"][-1],
            "train_accuracy": history["accuracy"][-1],
            "test_loss": tested["loss"],
            "test_accuracy": tested["accuracy"],
            "images_per_second": throughput.images_per_second,
            "train_seconds": train_seconds,
            "resumed_at_step": resumed_at,
            "best": best.best,
            "environment": run_folder.environment(),
        }
        model_saved = run_folder.save_model(model, cluster.is_chief, workdir / run_folder.MODEL)
        if cluster.is_chief:
            # Last: before it the run counts as interrupted. A model that cannot be saved costs the model alone.
            run_folder.finish(workdir, result)
    return {**result, "model_saved": model_saved}


@dataclass(frozen=True)
class Saving:
    """How a run survives.

    Attributes:
      every_steps: global steps between checkpoints; None: by the clock alone.
      every_minutes: about so long between checkpoints; None: by steps alone.
      job: name of the job, of which this process may be a later attempt; empty: none.
    """

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    job: str = ""


class TrainingDiverged(RuntimeError):
    """The loss became infinite or NaN; the message is one sentence that says when."""


class _StopWhenNotFinite(keras.callbacks.Callback):
    """Stops all workers at the end of the epoch: Keras reports the same loss to each of them."""

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        loss = float((logs or {})["loss"])
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the loss became {loss} in epoch {epoch + 1}: lower schedule.peak_learning_rate, or lengthen "
                "the warm-up."
            )


def _verbosity(cluster: Cluster) -> int:
    """Keras's `verbose`: a bar on a terminal, a line an epoch in a log, silence off the chief."""
    if not cluster.is_chief:
        return 0
    return 1 if sys.stdout.isatty() else 2
