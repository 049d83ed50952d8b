"""Overrides of recipes (`--set`), and the recipes that come with the package."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest
import yaml
from one_sentence import refusal

from tf_largebatch import config, named_functions, optimizer_config
from tf_largebatch.collectives_config import Collectives

SHIPPED = sorted(config.shipped_configs().glob("*.yaml"))
RECIPE = """
name: trial
network: small_cnn
network_options: {width: 4}
dataset: synthetic
dataset_options: {num_train: 960}
global_batch_size: 96
epochs: 7
optimizer: {name: lars, momentum: 0.8, exclude_from_weight_decay: [bias]}
schedule: {peak_learning_rate: 3.5}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trial.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["epochs=3"], "epochs", 3),
        # PyYAML alone would give the text "1e-3".
        (["optimizer.weight_decay=1e-3"], "optimizer.weight_decay", 0.001),
        (["optimizer.weight_decay=5e-4"], "optimizer.weight_decay", 0.0005),
        (["schedule.peak_learning_rate=1e1"], "schedule.peak_learning_rate", 10.0),
        (
            ["optimizer.exclude_from_weight_decay=[beta, gamma]"],
            "optimizer.exclude_from_weight_decay",
            ("beta", "gamma"),
        ),
        (["optimizer.exclude_from_weight_decay=null"], "optimizer.exclude_from_weight_decay", None),
        (["optimizer={name: sgd}"], "optimizer", optimizer_config.Sgd("sgd")),
        (["collectives.implementation=ring"], "collectives", Collectives(implementation="ring")),
        (
            ["collectives={pack_megabytes: 8}", "collectives.timeout_seconds=9"],
            "collectives",
            Collectives(pack_megabytes=8.0, timeout_seconds=9.0),
        ),
        (["network_options.depth=2"], "network_options", {"width": 4, "depth": 2}),
        (["network_options.deep.er=2"], "network_options", {"width": 4, "deep": {"er": 2}}),
        # The first equals sign ends the key.
        (["name=a=b"], "name", "a=b"),
        # In order: the last one holds.
        (["epochs=3", "epochs=4"], "epochs", 4),
        # A null on the way is an empty mapping.
        (["network_options=null", "network_options.width=5"], "network_options", {"width": 5}),
        # Another function begins without the options of the first, and takes its own from then on.
        (["dataset=fashion_mnist"], "dataset_options", {}),
        (["dataset=fashion_mnist"], "network_options", {"width": 4}),
        (["network=my.own:build"], "network_options", {}),
        (["dataset=fashion_mnist", "dataset_options.source=keras"], "dataset_options", {"source": "keras"}),
        (["dataset_options.num_test=96", "dataset=fashion_mnist"], "dataset_options", {}),
        # The same is not another.
        (["dataset=synthetic"], "dataset_options", {"num_train": 960}),
    ],
)
def test_overrides_arrive(overrides, key, value, file):
    recipe = config.load(file, overrides)
    for part in key.split("."):
        recipe = getattr(recipe, part)
    assert recipe == value and type(recipe) is type(value)


def test_overrides_leave_the_rest_alone(file):
    before, after = config.load(file), config.load(file, ["optimizer.momentum=0.5"])
    assert after == dataclasses.replace(before, optimizer=dataclasses.replace(before.optimizer, momentum=0.5))
    assert after != before


@pytest.mark.parametrize("override", ["", "epochs", "=3", "a..b=3", ".epochs=3", "optimizer.=3"])
def test_an_override_without_key_or_value_is_refused(override, file):
    assert refusal(config.load, file, [override]) == (
        f"--set {override!r} must have the form key=value or key.subkey=value."
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("epochs.x=3", "--set 'epochs.x=3': epochs is 7 and has no keys"),
        ("optimizer.momentum.x=3", "optimizer.momentum is 0.8 and has no keys"),
        ("optimizer.exclude_from_weight_decay.0=x", "exclude_from_weight_decay is ['bias'] and has no keys"),
        ("epochs=[", "--set 'epochs=[': this is not YAML"),
        ("network_options={width: 1, width: 2}", "the key 'width' stands twice"),
        ("epochs=", "epochs is None, but must be a whole number"),
        ("epohcs=3", "unknown key 'epohcs' (did you mean 'epochs'?)"),
        (" epochs=3", "unknown key ' epochs' (did you mean 'epochs'?)"),
        ("optimizer.momentm=0.5", "unknown key 'optimizer.momentm' (did you mean 'momentum'?)"),
        ("collectives.implementation=mpi", "collectives.implementation is 'mpi', but must be 'auto', 'ring' or 'nccl'"),
        ("collectives.pack_megabyte=8", "unknown key 'collectives.pack_megabyte' (did you mean 'pack_megabytes'?)"),
        ("collectives=null", "collectives is None, but must be a mapping"),
        ("schedule=null", "schedule is None, but must be a mapping"),
        ("schedule.warmup_epochs=7", "schedule.warmup_epochs is 7.0, but must be less than epochs (7)"),
    ],
)
def test_a_wrong_override_is_refused(override, said, file):
    assert said in refusal(config.load, file, ["seed=1", override])


def test_recipes_come_with_the_package():
    assert SHIPPED
    for path in SHIPPED:
        assert config.find(path.stem) == config.find(path.name) == path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_states_every_value(path):
    recipe = config.load(path.stem)
    # Results go to runs/NAME: two recipes must not share it.
    assert recipe.name == path.stem
    written = yaml.safe_load(path.read_text("utf-8"))
    for place, node in (
        (written, recipe),
        *((written[key], getattr(recipe, key)) for key in ("optimizer", "schedule", "collectives")),
    ):
        assert set(place) == {field.name for field in dataclasses.fields(node)}
    for key, (package, function) in named_functions.SHIPPED.items():
        assert set(written[f"{key}_options"]) == options_of(f"{package}.{written[key]}", function)


def options_of(module: str, function: str) -> set[str]:
    """Names of the parameters that have defaults, read from the source: importing would load TensorFlow."""
    source = Path(importlib.util.find_spec(module).origin).read_text("utf-8")
    definition = next(node for node in ast.parse(source).body if getattr(node, "name", None) == function)
    return {argument.arg for argument in definition.args.args[-len(definition.args.defaults) :]}
