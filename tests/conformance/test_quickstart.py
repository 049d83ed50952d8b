"""The quick-start as the README has it: two workers, LARS, batch 1,024, at least 0.80 on the test images."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import tomllib
import urllib.request

from conftest import ROOT, free_ports, launcher, python


def test_quickstart(tmp_path):
    tox = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tox"]
    ((command, *flags),) = [
        [part for part in line if isinstance(part, str)] for line in tox["env"]["quickstart"]["commands"]
    ]
    assert command == "tflb-gpu-cluster"
    done = python(launcher("gpu_cluster"), *flags, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]
    with open(tmp_path / "runs" / "quickstart" / "result.json") as file:
        result = json.load(file)
    assert result["test_accuracy"] >= 0.80
    assert result["split"]["num_workers"] == 2 and result["recipe"]["global_batch_size"] == 1024
    assert f"test accuracy {result['test_accuracy']:.4f}" in done.stdout
    assert "images per second" in done.stdout
    assert "tensorboard --logdir runs/quickstart/tensorboard" in done.stdout
    # The chief alone writes events and reports; the other worker's lines would carry its name.
    assert "[worker 1] test accuracy" not in done.stdout
    assert len(list((tmp_path / "runs" / "quickstart" / "tensorboard" / "train").iterdir())) == 1
    tags = served_tags(tmp_path / "runs" / "quickstart" / "tensorboard")
    assert set(tags) == {"train", "test"}
    assert {"loss", "accuracy", "learning_rate", "images_per_second"} <= set(tags["train"])


def served_tags(folder):
    """{run: tags} as a real TensorBoard, started as the quick-start's last line says, serves them."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError):
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=10)
                # Runs appear one by one while it reads them.
                if len(tags := json.load(answer)) == 2:
                    return tags
            time.sleep(0.5)
        raise AssertionError("TensorBoard does not show both runs")
    finally:
        server.kill()
        server.wait()
