"""Trains one recipe with several processes of this machine, which share its GPUs or its CPU.

    tflb-gpu-cluster --config=fashion_mnist_lars_b1k --local_workers=2
    tflb-gpu-cluster --config=my_recipe.yaml --local_workers=2 --set epochs=3 --dry_run

Every process runs `train.py` with the same flags; the first that fails ends the job, and its exit
code is that of this program. Ctrl-C asks all processes to end, a second one kills them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import flags

import tf_largebatch
from tf_largebatch import command_line, preflight
from tf_largebatch.supervisor import gpus, job, local_ports, local_processes, supervise

FLAGS = flags.FLAGS
# allow_override: launchers share these names, and tests import several into one process.
flags.DEFINE_string("config", None, "Recipe: a YAML file, or the name of a shipped config.", allow_override=True)
flags.DEFINE_multi_string("set", [], "Override, as key.subkey=value; may be repeated.", allow_override=True)
flags.DEFINE_string("workdir", None, "Folder for results; by default runs/NAME-OF-RECIPE.", allow_override=True)
flags.DEFINE_bool("overwrite", False, "Replace the run in --workdir, finished or not.", allow_override=True)
flags.DEFINE_bool("dry_run", False, "Print what would be started; start and write nothing.", allow_override=True)
flags.DEFINE_integer(
    "local_workers", 1, "How many processes train together on this machine.", lower_bound=1, allow_override=True
)
flags.DEFINE_integer(
    "port",
    0,
    "Port of the first worker, the others following it, busy ones passed over; 0: any free ports.",
    lower_bound=0,
    upper_bound=65535,
    allow_override=True,
)
flags.DEFINE_integer(
    "max_per_replica_batch_size",
    0,
    "Largest number of examples one device takes at once; more are taken in micro-batches. 0: no limit.",
    lower_bound=0,
    allow_override=True,
)


def main(argv: list[str]) -> int:
    recipe = command_line.recipe(argv, FLAGS)
    workdir = Path(FLAGS.workdir or f"runs/{recipe.name}")
    visible = gpus.visible_gpus(os.environ)
    replicas_per_worker = len(job.gpu_shares(visible, FLAGS.local_workers)[0]) or 1
    preflight.check(recipe)
    limit = FLAGS.max_per_replica_batch_size or None
    split = preflight.split(recipe, FLAGS.local_workers, replicas_per_worker, limit)
    preflight.check_workdir(workdir, FLAGS.overwrite)
    this_job = job.local_job(
        _train_command(workdir),
        local_ports.free_addresses(FLAGS.local_workers, FLAGS.port),
        visible,
        {"PYTHONPATH": _python_path()},
    )
    logs = workdir / "logs"
    if FLAGS.dry_run:
        print(f"{recipe.to_yaml()}\nglobal batch: {split}\nworkdir: {workdir}\nlogs: {logs}\n")
        print(job.describe(this_job))
        return 0
    print(f"global batch: {split}\nlogs: {logs}", flush=True)
    return supervise.run(lambda attempt: this_job, local_processes.LocalProcess, logs)


def _train_command(workdir: Path) -> list[str]:
    # By file path: a checkout in the current folder would shadow an installed package under -m.
    # -P: or else the folder of train.py would come before everything else in sys.path.
    command = [sys.executable, "-P", str(Path(__file__).resolve().with_name("train.py")), f"--config={FLAGS.config}"]
    command += [f"--set={override}" for override in FLAGS.set]
    limit = FLAGS.max_per_replica_batch_size
    command += [f"--max_per_replica_batch_size={limit}"] if limit else []
    return [*command, f"--workdir={workdir}", *(["--overwrite"] if FLAGS.overwrite else [])]


def _python_path() -> str:
    package_folder = Path(tf_largebatch.__file__).resolve().parents[1]
    return job.worker_python_path(str(package_folder), os.environ.get("PYTHONPATH", ""), os.getcwd())


def run() -> None:
    """The console command tflb-gpu-cluster."""
    command_line.run(main, FLAGS, sys.modules[__name__])


if __name__ == "__main__":
    run()
