"""Visible GPUs without TensorFlow. There is no GPU here: nvidia-smi is a script of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_largebatch.supervisor import gpus


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2, 3", ("2", "3")),
        ("0,-1,1", ("0",)),
        ("GPU-8932f937,MIG-1", ("GPU-8932f937", "MIG-1")),
    ],
)
def test_cuda_visible_devices_decides(value, expected, tmp_path):
    _fake_nvidia_smi(tmp_path, "echo 'GPU 0: A (UUID: GPU-1)'")
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": value, "PATH": str(tmp_path)}) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: Tesla V100 (UUID: GPU-1)'; echo 'GPU 1: Tesla V100 (UUID: GPU-2)'", ("0", "1")),
        ("echo 'GPU 0: A100 (UUID: GPU-1)'; echo '  MIG 1g.5gb Device 0: (UUID: MIG-1)'", ("0",)),
        ("echo 'No devices found.'", ()),
        ("echo 'cannot talk to the driver'; exit 9", ()),
    ],
)
def test_nvidia_smi_is_asked_otherwise(script, expected, tmp_path):
    # No GPU exists where these tests run: the program on the PATH is a fake.
    _fake_nvidia_smi(tmp_path, script)
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == expected


def test_an_nvidia_smi_that_hangs_means_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_TIMEOUT_SECS", 0.3)
    _fake_nvidia_smi(tmp_path, "exec /bin/sleep 30")
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == ()


def test_without_nvidia_smi_there_is_no_gpu(tmp_path):
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == ()


def _fake_nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 7\n{script}\n')
    program.chmod(0o755)
