"""The launcher of several local processes, as its users start it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tf_largebatch.distribution import cluster

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = """
name: tiny
network: my_parts:build
dataset: my_parts:load
global_batch_size: 12
epochs: 1
optimizer: {name: sgd}
schedule: {peak_learning_rate: 0.1}
"""
# Lies in the user's current folder only.
MY_PARTS = """
def build(input_shape, num_classes, width: int = 1, batch_norm_group_size: int | None = None): ...
def load(folder: str = "."): ...
"""
# Stands in for train.py: tells what it was started with, then does what BEHAVIOUR says.
STUB_TRAIN = """
import json, os, sys, time
import my_parts, tf_largebatch
names = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")
print("ready " + json.dumps({
    "pid": os.getpid(),
    "argv": sys.argv[1:],
    "input": sys.stdin.read(),
    "variables": {name: os.environ.get(name) for name in names},
    "package": tf_largebatch.__file__,
    "path": sys.path,
}))
exec(os.environ.get("BEHAVIOUR", ""))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's current folder, with a recipe and its parts; the environment of a plain shell."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "tiny.yaml").write_text(RECIPE)
    (here / "my_parts.py").write_text(MY_PARTS)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return here


@pytest.fixture
def stubbed(tmp_path, folder):
    """The launcher beside a stub of train.py, as a command."""
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(REPOSITORY / "launchers" / "gpu_cluster.py", programs)
    (programs / "train.py").write_text(STUB_TRAIN)
    return [sys.executable, str(programs / "gpu_cluster.py")]


@pytest.fixture
def real():
    return [sys.executable, "-m", "launchers.gpu_cluster"]


def call(command: list[str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*command, "--tee=all", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        input="not for workers",
        check=False,
    )


def starts(shown: str) -> list[dict]:
    """What each stub told, in rank order."""
    told = dict(re.findall(r"^\[worker (\d+)\] ready (.*)$", shown, flags=re.MULTILINE))
    return [json.loads(told[str(rank)]) for rank in range(len(told))]


def test_a_dry_run_shows_everything_and_writes_nothing(real, folder):
    before = sorted(folder.rglob("*"))
    done = call(real, "--config=tiny.yaml", "--local_workers=2", "--set", "epochs=7", "--dry_run", "--port=23450")
    assert done.returncode == 0, done.stderr
    assert "epochs: 7\n" in done.stdout
    assert "12 = 2 replicas (2 workers x 1) x 1 micro-batches x 6 examples" in done.stdout
    tf_configs = [json.loads(text) for text in re.findall(r"TF_CONFIG='(.*)'", done.stdout)]
    assert [tf_config["task"] for tf_config in tf_configs] == [{"type": "worker", "index": i} for i in (0, 1)]
    assert tf_configs[0]["cluster"] == tf_configs[1]["cluster"] and len(set(tf_configs[0]["cluster"]["worker"])) == 2
    assert done.stdout.count("launchers/train.py --config=tiny.yaml --set=epochs=7 --workdir=runs/tiny\n") == 2
    assert sorted(file for file in folder.rglob("*") if "__pycache__" not in str(file)) == before


def test_the_shown_command_is_one_that_train_accepts(real, folder):
    shown = call(real, "--config=tiny.yaml", "--local_workers=3", "--set", "epochs=7", "--overwrite", "--dry_run")
    of_last_worker = "env " + shown.stdout.rpartition("\nenv ")[2].strip()
    done = subprocess.run(
        ["sh", "-c", of_last_worker + " --dry_run"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "epochs: 7\n" in done.stdout
    assert '"index": 2' in done.stdout


def test_a_limit_cuts_into_micro_batches_and_reaches_the_workers(real, folder):
    done = call(real, "--config=tiny.yaml", "--local_workers=2", "--max_per_replica_batch_size=4", "--dry_run")
    assert done.returncode == 0, done.stderr
    cut = "global batch: 12 = 2 replicas (2 workers x 1) x 2 micro-batches x 3 examples\n"
    assert cut in done.stdout
    of_last_worker = "env " + done.stdout.rpartition("\nenv ")[2].strip()
    assert "--max_per_replica_batch_size=4" in of_last_worker
    worker = subprocess.run(
        ["sh", "-c", of_last_worker + " --dry_run"], capture_output=True, text=True, timeout=60, check=False
    )
    assert worker.returncode == 0, worker.stderr
    assert cut in worker.stdout


def test_workers_share_the_gpus_and_replicas_count_them(stubbed, folder, monkeypatch):
    # No GPU exists where these tests run, and nothing here opens one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    done = call(stubbed, "--config=tiny.yaml", "--local_workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 = 4 replicas (2 workers x 2)" in done.stdout
    assert [start["variables"]["CUDA_VISIBLE_DEVICES"] for start in starts(done.stdout)] == ["0,1", "2,3"]


def test_workers_get_the_flags_the_package_and_the_users_folder(stubbed, folder, monkeypatch, tmp_path):
    # A package of the same name in the current folder must not come between launcher and worker.
    (folder / "tf_largebatch.py").write_text("raise RuntimeError('the wrong package')")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')
    arguments = ["--config=tiny.yaml", "--set=epochs=2", "--set", "seed=3", "--workdir=out here", "--overwrite"]
    done = call(stubbed, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (start,) = starts(done.stdout)
    assert start["argv"] == [
        "--config=tiny.yaml",
        "--set=epochs=2",
        "--set=seed=3",
        "--workdir=out here",
        "--overwrite",
    ]
    assert start["variables"]["TF_CONFIG"] is None and start["input"] == ""
    assert start["package"] == str(REPOSITORY / "tf_largebatch" / "__init__.py")
    assert str(tmp_path / "programs") not in start["path"]
    assert start["path"].index(str(REPOSITORY)) < start["path"].index(str(folder))
    (logs,) = (folder / "out here" / "logs").iterdir()
    assert sorted(str(file.relative_to(logs)) for file in logs.rglob("*.*")) == [
        "attempt_0/worker_00000.log",
        "job.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--config is missing"),
        (["--config=nope.yaml"], "'nope.yaml' is neither a file nor a shipped config"),
        (["--config=tiny.yaml", "--set=epoch=3"], "unknown key 'epoch' (did you mean 'epochs'?)"),
        (["--config=tiny.yaml", "--local_workers=5"], "5 replicas (5 workers x 1) cannot share evenly"),
        (["--config=tiny.yaml", "--local_workers=0"], "--local_workers=0"),
        (["--config=tiny.yaml", "--max_per_replica_batch_size=-1"], "--max_per_replica_batch_size=-1"),
        (
            ["--config=tiny.yaml", "--max_per_replica_batch_size=2", "--set=network_options.batch_norm_group_size=3"],
            "max_per_replica_batch_size is 2, but a batch-norm group takes 3 examples at once; use 3 or more.",
        ),
        (["--config=tiny.yaml", "--port=65536"], "--port=65536"),
        (["--config=tiny.yaml", "--port=65535", "--local_workers=2"], "--port is 65535"),
        (["--config=tiny.yaml", "--set=network=my_parts:biuld"], "has no function 'biuld' (did you mean 'build'?)"),
        (["--config=tiny.yaml", "--set=network_options.depth=3"], "unknown key 'network_options.depth'"),
        (["--config=tiny.yaml", "--workdir=my_parts.py"], "is a file, not a folder"),
        (["--config=tiny.yaml", "--workdir=finished"], "holds a finished run"),
        (["--config=tiny.yaml", "--locl_workers=2"], "Unknown command line flag 'locl_workers'"),
        (["--config=tiny.yaml", "--hosts=a", "--slurm"], "--hosts and --slurm are both given; leave one out"),
        (["--config=tiny.yaml", "--hosts=a,a"], "--hosts names a twice; write a:2 for two workers there"),
        (["--config=tiny.yaml", "--hostfile=none.txt"], "none.txt"),
        (["--config=tiny.yaml", "--env=NAME"], "--env is 'NAME', but must be NAME=VALUE"),
        (["--config=tiny.yaml", "--kubernetes"], "image"),
        (["--config=tiny.yaml", "--kubernetes", "--image=i", "--pods=5"], "5 replicas (5 workers x 1) cannot share"),
        (["--config=tiny.yaml", "--slurm", "--nodes=5"], "5 replicas (5 workers x 1) cannot share evenly"),
        (["--config=tiny.yaml", "--slurm", "--gpus_per_node=many"], "--gpus_per_node is 'many'"),
        (["--config=tiny.yaml", "--slurm", "--sbatch=account"], "'account' is no option of sbatch"),
        (["--config=tiny.yaml", "--tee=some"], "--tee=some"),
        (["--config=tiny.yaml", "--nodes=4"], "--nodes is for --slurm; leave it out"),
        (["--config=tiny.yaml", "--apply"], "--apply is for --kubernetes; leave it out"),
        (["--config=tiny.yaml", "--hosts=a", "--local_workers=2"], "--local_workers and --hosts are both given"),
        (["--config=tiny.yaml", "--hosts="], "--hosts is empty; give a value, or leave it out"),
        (["--workdir=", "--config=tiny.yaml"], "--workdir is empty; give a value, or leave it out"),
        (["--set=epochs=3", "--", "mine.py"], "--set is for --config, not for a program of your own"),
        (["--config=tiny.yaml", "tiny.yaml"], "--config and the program 'tiny.yaml' are both given; leave one out"),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry_run"]])
def test_bad_input_is_one_sentence_and_starts_nothing(arguments, sentence, dry_run, stubbed, folder):
    (folder / "finished").mkdir()
    (folder / "finished" / "result.json").write_text("{}")
    done = call(stubbed, *arguments, *dry_run)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_cluster: ") and sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "runs").exists() and not (folder / "finished" / "logs").exists()


def test_gpus_that_cannot_be_shared_are_bad_input(stubbed, folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    done = call(stubbed, "--config=tiny.yaml", "--local_workers=2")
    assert done.returncode == 2
    assert "3 visible GPUs (0, 1, 2) cannot be shared evenly; use 1 or 3 workers" in done.stderr


@pytest.mark.parametrize("started_as", ["module", "file", "console command"])
def test_help_lists_the_flags(started_as, folder, tmp_path):
    command = tmp_path / "tflb-gpu-cluster"
    command.write_text("import sys\nfrom launchers.gpu_cluster import run\nsys.exit(run())\n")
    arguments = {
        "module": ["-m", "launchers.gpu_cluster"],
        "file": [str(REPOSITORY / "launchers" / "gpu_cluster.py")],
        "console command": [str(command)],
    }
    shown = call([sys.executable, *arguments[started_as]], "--help").stdout
    flags = ("config", "set", "workdir", "local_workers", "port", "max_per_replica_batch_size")
    for flag in (*flags, "[no]dry_run", "[no]overwrite"):
        assert f"  --{flag}:" in shown


def test_launchers_can_be_imported_into_one_process_and_load_no_tensorflow(folder):
    program = """
import runpy, sys
import launchers.gpu_cluster, launchers.train
runpy.run_path(launchers.gpu_cluster.__file__)
assert not [name for name in sys.modules if name.partition(".")[0] in ("tensorflow", "keras")]
"""
    done = call([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def tf_configs_of(shown: str) -> list[dict]:
    return [json.loads(text) for text in re.findall(r"TF_CONFIG='(.*)'", shown)]


def test_a_dry_run_for_ssh_hosts_connects_to_none(real, folder, tmp_path, monkeypatch):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# both in rack 1\nnode9 slots=2\n\nroot@node10\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OF_MINE", "seen")
    arguments = [f"--hostfile={hosts}", "--forward_env=OF_MINE", "--env=A=b c", "--nccl_socket_ifname=eth7"]
    done = call(real, "--config=tiny.yaml", *arguments, "--dry_run", "--remote_python=/there/python")
    assert done.returncode == 0, done.stderr
    assert "12 = 3 replicas (3 workers x 1)" in done.stdout
    clusters = [tf_config["cluster"]["worker"] for tf_config in tf_configs_of(done.stdout)]
    assert clusters == [["node9:2222", "node9:2223", "node10:2222"]] * 3
    for variable in ("NCCL_DEBUG=INFO", "OF_MINE=seen", "A='b c'", "NCCL_SOCKET_IFNAME=eth7"):
        assert done.stdout.count(f"    {variable} \\\n") == 3
    assert done.stdout.count("/there/python -P ") == 3
    assert "Not yet known: the GPUs of these hosts" in done.stdout


def test_slurm_gets_this_same_command_in_a_batch_file(real, folder):
    arguments = ["--config=tiny.yaml", "--slurm", "--nodes=2", "--workers_per_node=2", "--time=5", "--set=epochs=7"]
    done = call(real, *arguments, "--sbatch=--account=mine", "--partition=fast", "--dry_run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("#!")
    for line in ("--nodes=2", "--time=5", "--account=mine", "--partition=fast", "--signal=B:USR1@120", "--requeue"):
        assert f"#SBATCH {line}" in lines
    (command,) = [line for line in lines if line.startswith("exec ")]
    assert "--dry_run" not in command and "--set=epochs=7" in command and "--slurm" in command
    assert "# global batch: 12 = 4 replicas (4 workers x 1) x 1 micro-batches x 3 examples" in lines


def test_without_slurm_there_is_one_sentence(real, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    done = call(real, "--config=tiny.yaml", "--slurm")
    assert done.returncode == 2 and "sbatch" in done.stderr and done.stderr.count("\n") == 1


def test_kubernetes_gets_a_job_of_pods_that_train(real, folder):
    where = ["--kubernetes", "--image=registry/image:1", "--pods=3", "--claim=shared", "--max_restarts=2"]
    done = call(real, "--config=tiny.yaml", *where, "--overwrite", "--save_every_steps=50")
    assert done.returncode == 0, done.stderr
    service, job = yaml.safe_load_all(done.stdout)
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["backoffLimitPerIndex"]) == (3, 2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [
        "tflb-train",
        "--config=tiny.yaml",
        "--save_every_steps=50",
        "--workdir=/work/runs/tiny",
        "--overwrite",
    ]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    # A pod that is made anew goes on with what the job has saved, whatever --overwrite says.
    assert variables["TFLB_JOB"].startswith("tiny_")
    assert variables["TFLB_START_TIMEOUT"] == "600"
    for index in range(3):
        seen = cluster.from_environment({**variables, "JOB_COMPLETION_INDEX": str(index)})
        assert (seen.num_workers, seen.rank, seen.start_timeout_secs) == (3, index, 600.0)


def test_a_program_of_the_users_own_runs_in_place_of_train(real, folder):
    (folder / "mine.py").write_text(
        "import json, os, sys\n"
        "print('ready', json.dumps([sys.argv[1:], os.environ.get('TF_CONFIG'), os.environ['A']]))\n"
        "sys.exit(9 if sys.argv[-1] == '--fail' else 0)\n"
    )
    done = call(real, "--local_workers=2", "--env=A=b", "--", "mine.py", "--its_flag=1", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    told = starts(done.stdout)
    assert [arguments for arguments, _, _ in told] == [["--its_flag=1", "plain"]] * 2
    assert [json.loads(tf_config)["task"]["index"] for _, tf_config, _ in told] == [0, 1]
    assert (folder / "runs" / "mine" / "logs").is_dir()
    assert call(real, "--env=A=b", "--workdir=elsewhere", "--", "mine.py", "--fail").returncode == 9
    assert (folder / "elsewhere" / "logs").is_dir()
    absent = call(real, "--workdir=elsewhere", "--", "./absent")
    assert absent.returncode == 2 and absent.stderr == "gpu_cluster: ./absent: No such file or directory.\n"
    shown = call(real, "--local_workers=2", "--dry_run", "--", "mine.py", "--its_flag=1")
    assert shown.returncode == 0 and shown.stdout.count(" mine.py --its_flag=1\n") == 2


def test_flags_for_training_reach_the_workers_only_if_given(stubbed, folder):
    done = call(stubbed, "--config=tiny.yaml", "--save_every_minutes=2.5", "--save_every_steps=7")
    (start,) = starts(done.stdout)
    assert start["argv"][1:3] == ["--save_every_steps=7", "--save_every_minutes=2.5"]
    (start,) = starts(call(stubbed, "--config=tiny.yaml").stdout)
    assert start["argv"] == ["--config=tiny.yaml", "--workdir=runs/tiny"]


def test_a_failed_worker_is_started_again(stubbed, folder, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", "sys.exit(7 if os.environ['TFLB_ATTEMPT'] == '0' else 0)")
    done = call(stubbed, "--config=tiny.yaml", "--max_restarts=1")
    assert done.returncode == 0, done.stdout
    (record,) = folder.glob("runs/tiny/logs/*/job.json")
    assert [attempt["exit_code"] for attempt in json.loads(record.read_text())["attempts"]] == [7, 0]


def test_the_exit_code_is_that_of_the_worker_that_failed_first(stubbed, folder, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", "sys.exit(7) if '\"index\": 1' in os.environ['TF_CONFIG'] else time.sleep(90)")
    done = call(stubbed, "--config=tiny.yaml", "--local_workers=2")
    assert done.returncode == 7
    assert "worker 1 failed first: exit code 7" in done.stdout
    (record,) = folder.glob("runs/tiny/logs/*/job.json")
    assert json.loads(record.read_text())["attempts"][0]["exit_code"] == 7


def test_ctrl_c_ends_all_workers(stubbed, folder, monkeypatch):
    monkeypatch.setenv("BEHAVIOUR", "time.sleep(90)")
    process = subprocess.Popen(
        [*stubbed, "--config=tiny.yaml", "--local_workers=2", "--tee=all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while sum("ready" in log.read_text() for log in folder.glob("runs/tiny/logs/*/*/worker_*.log")) < 2:
            assert time.monotonic() < deadline and process.poll() is None, "the workers did not start"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
    assert process.returncode == 130, errors
    assert shown.rstrip().endswith("stopped by SIGINT; the job ends with exit code 130.")
    for start in starts(shown):
        with pytest.raises(ProcessLookupError):
            os.kill(start["pid"], 0)
