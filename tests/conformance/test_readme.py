"""What the README shows exists and runs."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib

import pytest
import yaml
from conftest import ROOT, launcher, python

from tf_largebatch import config

README = (ROOT / "README.md").read_text()
LAUNCHERS = {"tflb-train": "train", "tflb-gpu-cluster": "gpu_cluster"}


OWN_STRATEGY = """
import tensorflow as tf
from tf_largebatch.distribution import keras3_repairs
keras3_repairs.apply()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("tflb-")])
def test_launcher_commands_run(command, tmp_path):
    program, *flags = shlex.split(command)
    done = python(launcher(LAUNCHERS[program]), *flags, "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (source,) = [flag.partition("=")[2] for flag in flags if flag.startswith("--config=")]
    assert f"global batch: {config.load(source).global_batch_size} = " in done.stdout
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


@pytest.mark.smoke
@pytest.mark.parametrize("program", blocks("python"))
def test_python_programs_run(program, tmp_path):
    (tmp_path / "program.py").write_text(program)
    done = python("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The first is the one that trains.
    assert (tmp_path / "model.keras").exists() == (program == blocks("python")[0])


@pytest.fixture(scope="module")
def own_program():
    """The program for several devices, and what it prints on one."""
    (program,) = [program for program in blocks("python") if "tf_largebatch.strategy()" in program]
    return program, python("-c", program).stdout.splitlines()[-1]


@pytest.mark.parametrize("own_strategy", [False, True])
def test_own_program_prints_the_same_on_two_workers(own_program, own_strategy, workers):
    program, alone = own_program
    if own_strategy:
        given = "strategy = tf_largebatch.strategy()"
        assert given in program
        program = program.replace(given, OWN_STRATEGY)
    for output in workers.run(2, "-c", program):
        # Behind it a TensorFlow 2.15 that misses its peer may write.
        numbers = ast.literal_eval([line for line in output.splitlines() if line.startswith("{'")][-1])
        assert numbers == {name: pytest.approx(values, abs=2e-5) for name, values in ast.literal_eval(alone).items()}


def test_the_explanation_shown_is_the_explanation_given(tmp_path):
    shown, _ = blocks("text")
    (program,) = [program for program in blocks("python") if "explain()" in program]
    (tmp_path / "program.py").write_text(program)
    given = [line.split() for line in python("program.py", cwd=tmp_path).stdout.splitlines()]
    *equation_and_head, row, _ = [line.split() for line in shown.splitlines()]
    assert all(line in given for line in equation_and_head)
    # Weights are drawn anew each time, so a row's two numbers differ; on Keras 2 the path does.
    assert row[1:4] in [line[1:4] for line in given]


def test_the_error_shown_is_the_error_given():
    _, shown = blocks("text")
    done = python(launcher("train"), "--config=configs/fashion_mnist_lars_b1k.yaml", "--set", "epoch=3", cwd=ROOT)
    assert done.stderr.startswith(shown.strip().removesuffix("..."))


def test_recipe_lines_are_a_recipe(tmp_path):
    lines = "".join(blocks("yaml"))
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "models.py").write_text("def build(input_shape, num_classes, units: int = 8):\n    ...\n")
    (package / "data.py").write_text("def load():\n    ...\n")
    recipe = yaml.safe_load((ROOT / "configs" / "fashion_mnist_lars_b1k.yaml").read_text())
    recipe["dataset_options"] = {}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**recipe, **yaml.safe_load(lines)}))
    done = python(launcher("train"), "--config=mine.yaml", "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_tox_environments_exist():
    tox = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tox"]
    named = re.findall(r"tox run -e (\w+)", README)
    assert named and set(named) <= set(tox["env"])
    # CI runs what the README tells a developer to run.
    (test_command,) = [line for line in COMMANDS if line.endswith("tox run")]
    assert test_command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_installed_extras_exist():
    setup = (ROOT / "setup.cfg").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", README):
        assert f"\n{extra} =\n" in setup


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:tf_largebatch|configs|launchers)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
