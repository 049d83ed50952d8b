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
