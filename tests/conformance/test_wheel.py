"""The package as a user installs it: a wheel in an environment of its own, run from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `bin` folder of an environment that holds the wheel, and this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # From a copy: a build leaves files in its folder.
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "tf_largebatch", "launchers", "configs"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    # TensorFlow and the rest are seen through a .pth file, so that the test takes seconds.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(str(Path(pytest.__file__).parents[1]))
    install = [environment / "bin" / "pip", "install", "--no-deps", "--force-reinstall", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return environment / "bin"


def run(command, *flags, cwd, timeout=200):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TF_CONFIG")}
    return subprocess.run(
        [str(command), *flags],
        cwd=cwd,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_the_package_in_use_is_the_wheel(installed, tmp_path):
    done = run(installed / "python", "-c", "import tf_largebatch; print(tf_largebatch.__file__)", cwd=tmp_path)
    assert str(installed.parent) in done.stdout


def test_commands_find_shipped_configs_by_name(installed, tmp_path):
    done = run(installed / "tflb-train", "--config=fashion_mnist_sgd_b1k", "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: fashion_mnist_sgd_b1k" in done.stdout


@pytest.mark.parametrize(
    ("command", "flag"), [("tflb-train", "--cpu_devices"), ("tflb-gpu-cluster", "--local_workers")]
)
def test_help_lists_the_flags(installed, tmp_path, command, flag):
    done = run(installed / command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout and "--config" in done.stdout


def test_two_workers_train_from_an_empty_folder(installed, tmp_path):
    flags = ["--set", "epochs=1", "--set", "schedule.warmup_epochs=0", "--local_workers=2", "--workdir=here"]
    # A folder of the same name in the current folder must not shadow the installed package.
    (tmp_path / "tf_largebatch").mkdir()
    done = run(installed / "tflb-gpu-cluster", "--config=fashion_mnist_lars_b1k", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "[worker 0] test accuracy" in done.stdout
    assert (tmp_path / "here" / "result.json").exists()
    assert list((tmp_path / "here" / "logs").glob("*/attempt_0/worker_00001.log"))


def test_the_licence_of_the_images_is_in_the_wheel(installed):
    assert list(installed.parent.glob("lib/python*/site-packages/tf_largebatch/datasets/fashion_mnist_LICENSE.txt"))
