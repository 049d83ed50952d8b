"""The quick-start as the README has it: two workers, LARS, batch 1,024, at least 0.80 on the test images."""

from __future__ import annotations

import json
import tomllib

from conftest import ROOT, launcher, python


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
