"""Trains one recipe, or runs a program of your own, with several processes: of this machine, on ssh hosts, in Slurm.

    tflb-gpu-cluster --config=fashion_mnist_lars_b1k --local_workers=2
    tflb-gpu-cluster --config=my_recipe.yaml --hosts=node1,node2 --workdir=/shared/runs/first --max_restarts=3
    tflb-gpu-cluster --config=my_recipe.yaml --slurm --nodes=4 --gpus_per_node=8 --time=12:00:00
    tflb-gpu-cluster --config=my_recipe --kubernetes --pods=4 --image=registry/image --gpus_per_pod=8 --claim=shared
    tflb-gpu-cluster --local_workers=2 -- my_program.py --its_flag=1

All processes run the same command; without a program of yours it is train.py with these flags. The first that
fails ends them all. Ctrl-C, SIGTERM and SIGUSR1 ask them to save and end, a second one kills them. The same
command, started again, goes on from the last checkpoint. --dry_run shows every command and starts nothing.

Exit codes: 0 done; 1 failed, or the code of the process that failed first; 2 bad input; 3 diverged; 75 told to stop,
and saved; 124 a process had not started in time; 130, 143 stopped by ctrl-C, SIGTERM; 255 a connection failed.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

from absl import flags

import tf_largebatch
from tf_largebatch import command_line, preflight
from tf_largebatch.config import Recipe
from tf_largebatch.distribution import cluster
from tf_largebatch.supervisor import (
    job,
    kubernetes_job,
    kubernetes_settings,
    places,
    slurm_batch,
    ssh_hosts,
    ssh_job,
    supervise,
)
from tf_largebatch.supervisor.watch import STOPPED_AND_SAVED, Limits
from tf_largebatch.validation import InputError

FLAGS = flags.FLAGS
# allow_override: launchers share these names, and tests import several into one process.
_text = functools.partial(flags.DEFINE_string, allow_override=True)
_list = functools.partial(flags.DEFINE_multi_string, allow_override=True)
_switch = functools.partial(flags.DEFINE_bool, allow_override=True)
_count = functools.partial(flags.DEFINE_integer, lower_bound=0, allow_override=True)
_number = functools.partial(flags.DEFINE_float, lower_bound=0.0, allow_override=True)

# What is trained; train.py has these flags too.
_text("config", None, "Recipe: a YAML file, or the name of a shipped config.")
_list("set", [], "Override, as key.subkey=value; may be repeated.")
_text("workdir", None, "Folder for results, seen by all workers; by default runs/NAME-OF-RECIPE.")
_switch("overwrite", False, "Replace the run in --workdir, finished or not.")
_count("max_per_replica_batch_size", 0, "Largest number of examples one device takes at once; 0: no limit.")
_count("save_every_steps", 0, "Global steps between checkpoints, beside the clock; 0: by the clock alone.")
_number("save_every_minutes", 10.0, "About so many minutes between checkpoints; 0: by --save_every_steps alone.")
# Where.
_count("local_workers", 1, "How many processes train together on this machine.", lower_bound=1)
_text("hosts", None, "ssh hosts, in rank order, as host1,user@host2:WORKERS.")
_text("hostfile", None, "File of ssh hosts, one a line, as host or host slots=WORKERS.")
_switch("slurm", False, "Submit a Slurm job; inside of an allocation, train there.")
_switch("kubernetes", False, "Print the manifest of a Kubernetes Job; with --apply, create it.")
# How they are supervised.
_switch("dry_run", False, "Print what would be started; start and write nothing.")
flags.DEFINE_enum("tee", "chief", ["chief", "all", "none"], "Whose output is shown here.", allow_override=True)
_count("max_restarts", 0, "Restarts of all workers after a failure, counted anew after each progress.")
_number("start_timeout", 600.0, "Seconds until all workers must have met; 0: no limit.")
_number("grace", 15.0, "Seconds for the workers to save and end when told to stop.")
_number("exit_grace", 60.0, "Seconds for the others to end after a worker has ended well.")
_number("heartbeat_timeout", 60.0, "Seconds of silence after which a worker counts as lost; 0: TensorFlow's 10.")
_count("port", 0, "Port of a host's first worker, the others following it; 0: any free ones.", upper_bound=65535)
_list("env", [], "Variable for every worker, as NAME=VALUE; may be repeated.")
_list("forward_env", [], "Variable of this shell that workers elsewhere get too, beside NCCL_*, TF_* and the like.")
_text("nccl_socket_ifname", None, "Network interface for NCCL, such as eth0: sets NCCL_SOCKET_IFNAME.")
# ssh.
_text("ssh_config", None, "ssh: configuration file, in place of ~/.ssh/config.")
_text("ssh_identity", None, "ssh: file of the private key.")
_count("ssh_port", 0, "ssh: port of the ssh servers.", upper_bound=65535)
_list("ssh_option", [], "ssh: option as for ssh -o, such as ProxyJump=gate; may be repeated.")
_text("remote_python", None, "ssh: Python on the hosts; by default that of this launcher.")
# Slurm.
_count("nodes", 1, "Slurm: nodes.", lower_bound=1)
_count("workers_per_node", 1, "Slurm: workers on each node, which share its GPUs.", lower_bound=1)
_text("gpus_per_node", None, "Slurm: GPUs of each node, such as 8 or a100:8.")
_count("cpus_per_node", 0, "Slurm: CPUs of each node; 0: as the site has it.")
_text("memory_per_node", None, "Slurm: memory of each node, such as 64G.")
_text("partition", None, "Slurm: partition.")
_text(
    "time", None, "Slurm: time limit, such as 12:00:00; before it the run saves and puts itself into the queue again."
)
_count("stop_secs", 120, "Slurm: so many seconds before the time limit.")
_switch("requeue", True, "Slurm: go on in another turn when the time was too short.")
_list("sbatch", [], "Slurm: any other option, as --account=NAME; may be repeated.")
# Kubernetes.
_count("pods", 1, "Kubernetes: workers, one a pod.", lower_bound=1)
_text("image", None, "Kubernetes: container image that has this package installed.")
_count("gpus_per_pod", 0, "Kubernetes: NVIDIA GPUs of each pod.")
_text("cpus_per_pod", None, "Kubernetes: CPU cores of each pod, such as 8.")
_text("memory_per_pod", None, "Kubernetes: memory of each pod, such as 64Gi.")
_text("claim", None, "Kubernetes: PersistentVolumeClaim for --workdir, mounted by all pods.")
_text("mount_path", "/work", "Kubernetes: where they mount it.")
_text("namespace", None, "Kubernetes: namespace.")
_switch("apply", False, "Kubernetes: kubectl apply the manifest.")

# Flags that only one place, or only a recipe, heeds.
_ONLY_FOR = {
    "hosts": ("ssh_config", "ssh_identity", "ssh_port", "ssh_option", "remote_python", "forward_env"),
    "slurm": (
        *("nodes", "workers_per_node", "gpus_per_node", "cpus_per_node", "memory_per_node", "partition", "time"),
        *("stop_secs", "requeue", "sbatch"),
    ),
    "kubernetes": (
        *("pods", "image", "gpus_per_pod", "cpus_per_pod", "memory_per_pod", "claim", "mount_path"),
        *("namespace", "apply"),
    ),
    "config": ("set", "overwrite", "max_per_replica_batch_size", "save_every_steps", "save_every_minutes"),
}


def main(argv: list[str]) -> int:
    program = argv[1:]
    if program and FLAGS.config:
        raise InputError(f"--config and the program {program[0]!r} are both given; leave one out.")
    recipe = None if program else command_line.recipe(argv, FLAGS)
    name = Path(program[0]).stem if program else recipe.name
    workdir = Path(FLAGS.workdir or f"runs/{name}")
    if recipe:
        preflight.check(recipe)
        preflight.check_workdir(workdir, FLAGS.overwrite)
    _check_place(bool(program))
    given = ssh_job.forwarded({}, [], FLAGS.env)
    if FLAGS.nccl_socket_ifname:
        given["NCCL_SOCKET_IFNAME"] = FLAGS.nccl_socket_ifname
    if FLAGS.heartbeat_timeout:
        given[cluster.HEARTBEAT_TIMEOUT] = f"{FLAGS.heartbeat_timeout:g}"
    if FLAGS.kubernetes:
        return _kubernetes(name, recipe, program, given)
    if FLAGS.slurm and "SLURM_JOB_ID" not in os.environ:
        return _submit(name, recipe, workdir)

    environment = {**given, "PYTHONPATH": _python_path()}
    place = _place(environment)
    command = [*_own_program(program, FLAGS.remote_python or sys.executable)] if program else _train_command(workdir)
    first = place.job(command, environment, 0)
    logs = workdir / "logs"
    about = f"{_cut(recipe, place.num_workers, place.gpus_per_worker)}workdir: {workdir}\nlogs: {logs}"
    if FLAGS.dry_run:
        print((f"{recipe.to_yaml()}\n" if recipe else "") + about)
        if FLAGS.hosts or FLAGS.hostfile:
            print("# Not yet known: the GPUs of these hosts, and which of their ports are free.")
        print(f"\n{job.describe(first)}")
        return 0
    print(about, flush=True)

    def plan(attempt: int) -> job.Job:
        planned = place.job(command, environment, attempt) if attempt else first
        return job.told_when_ready(planned) if recipe else planned

    limits = Limits(FLAGS.start_timeout or None, FLAGS.grace, exit_grace=FLAGS.exit_grace)
    slurm_id = f"slurm_{place.job_id}" if FLAGS.slurm else ""
    options = supervise.Options(limits, FLAGS.max_restarts, FLAGS.tee, slurm_id)
    try:
        code = supervise.run(plan, place.start, logs, options)
    except OSError as failure:
        # The log folder, or a program that does not exist.
        raise InputError(f"{failure.filename or logs}: {failure.strerror or failure}.") from None
    if FLAGS.slurm and FLAGS.requeue and code == STOPPED_AND_SAVED:
        slurm_batch.requeue(place.job_id, os.environ)
    return code


def _check_place(has_program: bool) -> None:
    """Refuses two places, an empty one, and flags that the chosen one would not heed."""
    places_ = ("local_workers", "hosts", "hostfile", "slurm", "kubernetes")
    chosen = [name for name in places_ if FLAGS[name].present and FLAGS[name].value is not False]
    if len(chosen) > 1:
        raise InputError(f"--{chosen[0]} and --{chosen[1]} are both given; leave one out.")
    for name in ("hosts", "hostfile", "workdir"):
        if FLAGS[name].value == "":
            raise InputError(f"--{name} is empty; give a value, or leave it out.")
    place = {"hostfile": "hosts"}.get(chosen[0], chosen[0]) if chosen else "local_workers"
    for owner, names in _ONLY_FOR.items():
        given = [name for name in names if FLAGS[name].present]
        if given and owner != place and not (owner == "config" and not has_program):
            what = "--config, not for a program of your own" if owner == "config" else f"--{owner}"
            raise InputError(f"--{given[0]} is for {what}; leave it out.")


def _cut(recipe: Recipe | None, workers: int, gpus_per_worker: int) -> str:
    """The line that tells how the global batch is cut up; raises where it cannot be."""
    if recipe is None:
        return ""
    limit = FLAGS.max_per_replica_batch_size or None
    return f"global batch: {preflight.split(recipe, workers, gpus_per_worker or 1, limit)}\n"


def _place(environment: dict[str, str]) -> places.Place:
    if FLAGS.slurm:
        return places.SlurmAllocation(FLAGS.workers_per_node, FLAGS.port)
    if not (FLAGS.hosts or FLAGS.hostfile):
        return places.ThisMachine(FLAGS.local_workers, FLAGS.port)
    hosts = ssh_hosts.parse_hosts(FLAGS.hosts) if FLAGS.hosts else ssh_hosts.parse_hostfile(FLAGS.hostfile)
    options = ssh_hosts.SshOptions(
        FLAGS.ssh_config, FLAGS.ssh_port or None, FLAGS.ssh_identity, tuple(FLAGS.ssh_option)
    )
    # Workers elsewhere inherit nothing from this shell.
    along = ssh_job.forwarded(os.environ, FLAGS.forward_env, FLAGS.env)
    environment.update({**along, **environment})
    python = FLAGS.remote_python or sys.executable
    return places.SshHosts(hosts, options, python, FLAGS.port, environment, connects=not FLAGS.dry_run)


def _train_command(workdir: Path) -> list[str]:
    # By file path: a checkout in the current folder would shadow an installed package under -m.
    # -P: or else the folder of train.py would come before everything else in sys.path.
    python = FLAGS.remote_python or sys.executable
    return [python, "-P", str(Path(__file__).resolve().with_name("train.py")), *_train_flags(workdir)]


def _train_flags(workdir: Path) -> list[str]:
    chosen = [f"--config={FLAGS.config}", *(f"--set={override}" for override in FLAGS.set)]
    for name in ("max_per_replica_batch_size", "save_every_steps", "save_every_minutes"):
        if not FLAGS[name].using_default_value:
            chosen.append(f"--{name}={FLAGS[name].value:g}")
    return [*chosen, f"--workdir={workdir}", *(["--overwrite"] if FLAGS.overwrite else [])]


def _own_program(program: list[str], python: str) -> list[str]:
    return [python, *program] if program[0].endswith(".py") else program


def _python_path() -> str:
    package_folder = Path(tf_largebatch.__file__).resolve().parents[1]
    return job.worker_python_path(str(package_folder), os.environ.get("PYTHONPATH", ""), os.getcwd())


def _submit(name: str, recipe: Recipe | None, workdir: Path) -> int:
    """Writes a batch file that runs this same command inside of the Slurm job, and submits it."""
    gpus = (FLAGS.gpus_per_node or "0").rpartition(":")[2]
    if not gpus.isdigit():
        raise InputError(f"--gpus_per_node is {FLAGS.gpus_per_node!r}, but must be a number, as 8, or TYPE:NUMBER.")
    cut = _cut(recipe, FLAGS.nodes * FLAGS.workers_per_node, int(gpus) // FLAGS.workers_per_node)
    logs = (workdir / "logs").absolute()
    request = slurm_batch.BatchRequest(
        name,
        FLAGS.nodes,
        FLAGS.gpus_per_node or 0,
        FLAGS.cpus_per_node or None,
        FLAGS.memory_per_node,
        FLAGS.partition,
        FLAGS.time,
        FLAGS.stop_secs,
        str(logs / "slurm-%j.out"),
        FLAGS.sbatch,
    )
    own_flags = [argument for argument in sys.argv[1:] if argument != "--dry_run"]
    command = [sys.executable, "-P", str(Path(__file__).resolve()), *own_flags]
    text = slurm_batch.sbatch_text(command, request, os.getcwd(), {"PYTHONPATH": _python_path()})
    if FLAGS.dry_run:
        print(f"{text}\n# {cut}" if cut else text)
        return 0
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / f"{name}.sbatch"
    file.write_text(text, encoding="utf-8")
    number = slurm_batch.submit(file, os.environ)
    print(f"{cut}Slurm job {number}, submitted with {file}\noutput: {logs}/slurm-{number}.out")
    return 0


def _kubernetes(name: str, recipe: Recipe | None, program: list[str], environment: dict[str, str]) -> int:
    """Prints or creates a job whose pods each run one worker; Kubernetes itself restarts them."""
    cut = _cut(recipe, FLAGS.pods, FLAGS.gpus_per_pod)
    if FLAGS.start_timeout:
        environment[cluster.START_TIMEOUT] = f"{FLAGS.start_timeout:g}"
    # For --overwrite: pods that are made anew belong to the job that was started now.
    environment["TFLB_JOB"] = f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    workdir = Path(FLAGS.workdir or f"{FLAGS.mount_path}/runs/{name}")
    command = _own_program(program, "python") if program else ["tflb-train", *_train_flags(workdir)]
    settings = kubernetes_settings.KubernetesJob(
        name,
        command,
        FLAGS.pods,
        FLAGS.image or "",
        environment=environment,
        max_restarts=FLAGS.max_restarts,
        grace=FLAGS.grace,
        port=FLAGS.port or 2222,
        gpus=FLAGS.gpus_per_pod,
        cpu=FLAGS.cpus_per_pod,
        memory=FLAGS.memory_per_pod,
        claim=FLAGS.claim,
        mount_path=FLAGS.mount_path,
        namespace=FLAGS.namespace,
    )
    text = kubernetes_job.manifest(settings)
    print(f"# {cut}" * bool(cut), end="")
    print(kubernetes_job.apply(text) if FLAGS.apply and not FLAGS.dry_run else text)
    return 0


def run() -> None:
    """The console command tflb-gpu-cluster."""
    command_line.run(main, FLAGS, sys.modules[__name__])


if __name__ == "__main__":
    run()
