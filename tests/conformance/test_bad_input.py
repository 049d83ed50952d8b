"""Bad input gets one sentence and exit code 2, on every worker, before anybody waits for anybody."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import time

import pytest
from conftest import free_ports, launcher, python, tf_configs

RECIPE = ["--config=fashion_mnist_lars_b1k"]


def truncated_folder(folder):
    for stem in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        axes = int(stem[-1])
        header = bytes([0, 0, 8, axes]) + b"".join(size.to_bytes(4, "big") for size in (5, 28, 28)[:axes])
        (folder / f"{stem}-ubyte.gz").write_bytes(gzip.compress(header + bytes(3)))
    return folder


CASES = {
    "unknown key": (["--set", "epoch=3"], {}, "unknown key 'epoch' (did you mean 'epochs'?)"),
    "unknown option": (["--set", "network_options.widht=3"], {}, "network_options.widht' (did you mean 'width'?)"),
    "wrong type": (["--set", "epochs=many"], {}, "epochs is 'many', but must be a whole number"),
    "out of range": (["--set", "optimizer.momentum=1.5"], {}, "optimizer.momentum is 1.5, but must be less than 1"),
    "does not divide": (["--set", "global_batch_size=1023"], {"workers": 2}, "global_batch_size is 1023"),
    "group beyond limit": (
        ["--max_per_replica_batch_size=64", "--set", "network_options.batch_norm_group_size=128"],
        {},
        "max_per_replica_batch_size is 64, but a batch-norm group takes 128 examples at once; use 128 or more.",
    ),
    "batch beyond data": (["--set", "global_batch_size=20000"], {}, "the data set has 10000 training examples"),
    "missing folder": (["--set", "dataset_options.folder=/no/such/folder"], {}, "there is no folder"),
    "truncated file": (["--set", "dataset_options.folder={truncated}"], {}, "truncated"),
    "no such config": (["--config=fashon_mnist_lars_b1k"], {}, "did you mean 'fashion_mnist_lars_b1k'?"),
    "unknown flag": (["--epochs=3"], {}, "nknown command line flag 'epochs'"),
    "no JSON": ([], {"TF_CONFIG": "{worker"}, "TF_CONFIG is not JSON"),
    "task not in cluster": (
        [],
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 2}})},
        "task worker 2 is not in the cluster",
    ),
    "unknown module": (["--set", "network=no_such_pkg.models:build"], {}, "no_such_pkg"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_started_by_hand(case, tmp_path):
    flags, setting, sentence = CASES[case]
    flags = [flag.replace("{truncated}", str(truncated_folder(tmp_path))) for flag in flags]
    environment = {key: value for key, value in setting.items() if key == "TF_CONFIG"}
    if "workers" in setting:
        # Its peer is never started: the sentence must come all the same.
        environment["TF_CONFIG"] = tf_configs(setting["workers"])[1]
    done = python(launcher("train"), *RECIPE, *flags, timeout=60, cwd=tmp_path, **environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("train: ") and sentence in line
    assert not (tmp_path / "runs").exists()
    # Said before TensorFlow was imported, which has a lot to say itself.
    assert "tensorflow" not in done.stderr.lower() or case == "unknown module"


@pytest.mark.parametrize("case", [case for case in CASES if "TF_CONFIG" not in CASES[case][1]])
def test_gpu_cluster_starts_nothing(case, tmp_path):
    flags, _, sentence = CASES[case]
    flags = [flag.replace("{truncated}", str(truncated_folder(tmp_path))) for flag in flags]
    done = python(launcher("gpu_cluster"), *RECIPE, *flags, "--local_workers=2", timeout=60, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("gpu_cluster: ") and sentence in line
    assert "[worker" not in done.stdout and not (tmp_path / "runs").exists()


def test_a_taken_port_is_told_at_once_though_the_peers_wait(tmp_path):
    mine, other = free_ports(2)
    config = {
        "cluster": {"worker": [f"127.0.0.1:{mine}", f"127.0.0.1:{other}"]},
        "task": {"type": "worker", "index": 0},
    }
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", mine))
        holder.listen()
        done = python(launcher("train"), *RECIPE, timeout=60, cwd=tmp_path, TF_CONFIG=json.dumps(config))
    # Not bad input: another time, or on another port, the same job can run.
    assert done.returncode == 1
    assert f"train: TF_CONFIG: port {mine} of this worker (worker 0) is not free" in done.stderr


def test_workers_with_different_recipes_are_told_so(workers, tmp_path):
    processes = [
        workers.start(launcher("train"), *RECIPE, "--set", f"epochs={10 + rank}", cwd=tmp_path, TF_CONFIG=config)
        for rank, config in enumerate(tf_configs(2))
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output[-2000:]
        assert "train: the workers were started with different recipes" in output


def test_a_worker_that_waits_says_so_and_can_be_interrupted(workers, tmp_path):
    process = workers.start(launcher("train"), *RECIPE, cwd=tmp_path, TF_CONFIG=tf_configs(2)[0])
    for line in process.stdout:
        if "waiting until all 2 workers have started" in line:
            break
    # It is inside TensorFlow a moment later.
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
