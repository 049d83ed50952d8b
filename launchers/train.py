"""Trains one recipe in this process: one worker of the cluster that TF_CONFIG describes, or alone.

tflb-train --config=fashion_mnist_lars_b1k --workdir=runs/first
tflb-train --config=my_recipe.yaml --set epochs=3 --set optimizer.momentum=0.95 --dry_run

An interrupted run goes on from its last checkpoint when the same command is started again. SIGTERM and
SIGUSR1 make it save and end with exit code 75.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from absl import flags

from tf_largebatch import command_line, preflight
from tf_largebatch.distribution import cluster
from tf_largebatch.supervisor.gpus import visible_gpus

FLAGS = flags.FLAGS
# allow_override: launchers share these names, and tests import several into one process.
flags.DEFINE_string("config", None, "Recipe: a YAML file, or the name of a shipped config.", allow_override=True)
flags.DEFINE_multi_string("set", [], "Override, as key.subkey=value; may be repeated.", allow_override=True)
flags.DEFINE_string("workdir", None, "Folder for results; by default runs/NAME-OF-RECIPE.", allow_override=True)
flags.DEFINE_bool("overwrite", False, "Replace the run in --workdir, finished or not.", allow_override=True)
flags.DEFINE_bool(
    "dry_run", False, "Print the resolved recipe and the batch split; train nothing.", allow_override=True
)
flags.DEFINE_integer(
    "cpu_devices",
    1,
    "Logical CPU devices, one replica each: tries a split without GPUs.",
    lower_bound=1,
    allow_override=True,
)
flags.DEFINE_integer(
    "max_per_replica_batch_size",
    0,
    "Largest number of examples one device takes at once; more are taken in micro-batches. 0: no limit.",
    lower_bound=0,
    allow_override=True,
)
flags.DEFINE_integer(
    "save_every_steps", None, "Global steps between checkpoints, beside the clock.", lower_bound=1, allow_override=True
)
flags.DEFINE_float(
    "save_every_minutes",
    10.0,
    "About so many minutes between checkpoints; 0: by --save_every_steps alone.",
    lower_bound=0.0,
    allow_override=True,
)


def main(argv: list[str]) -> int:
    recipe = command_line.recipe(argv, FLAGS)
    this_cluster = cluster.from_environment(os.environ)
    cluster.take_own_gpus(os.environ)
    workdir = Path(FLAGS.workdir or f"runs/{recipe.name}")
    preflight.check(recipe)
    preflight.check_workdir(workdir, FLAGS.overwrite)
    devices = len(visible_gpus(os.environ)) or (FLAGS.cpu_devices if this_cluster.num_workers == 1 else 1)
    limit = FLAGS.max_per_replica_batch_size or None
    split = preflight.split(recipe, this_cluster.num_workers, devices, limit)
    if FLAGS.dry_run:
        print(recipe.to_yaml() + f"\nglobal batch: {split}\nworkdir: {workdir}")
        print(f"TF_CONFIG: {this_cluster.tf_config() or 'none, one process'}")
        return 0

    # TensorFlow's own chatter: errors alone from its runtime, warnings from its Python code.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tf_largebatch import training
    from tf_largebatch.distribution import strategies

    if FLAGS.verbosity < 0:
        strategies.quiet()
    if FLAGS.cpu_devices > 1:
        strategies.set_logical_cpus(FLAGS.cpu_devices)
    saving = training.Saving(FLAGS.save_every_steps, FLAGS.save_every_minutes or None, os.environ.get("TFLB_JOB", ""))
    try:
        result = training.run(recipe, this_cluster, workdir, FLAGS.overwrite, limit, saving)
    except training.TrainingDiverged as failure:
        print(f"train: {failure}", file=sys.stderr)
        return command_line.DIVERGED
    if this_cluster.is_chief:
        speed = result["images_per_second"]
        # A run that was resumed at its very end has no step to time.
        timed = f"; {speed:.0f} images per second over {split.replicas} replicas" if speed else ""
        print(
            f"test accuracy {result['test_accuracy']:.4f}, loss {result['test_loss']:.4f}{timed}\n"
            f"results: {workdir}/{preflight.RESULT_FILE}\n"
            f"curves:  {_tensorboard()} --logdir {workdir}/tensorboard"
        )
    return 0 if result["model_saved"] else 1


def _tensorboard() -> str:
    """How to start TensorBoard: by name, or by path where this environment is not the active one."""
    return "tensorboard" if shutil.which("tensorboard") else str(Path(sys.executable).with_name("tensorboard"))


def run() -> None:
    """The console command tflb-train."""
    command_line.run(main, FLAGS, sys.modules[__name__])


if __name__ == "__main__":
    run()
