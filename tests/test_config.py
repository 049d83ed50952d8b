"""Recipes: what is read, what is refused, and with which sentence."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from one_sentence import refusal

from tf_largebatch import config

# No value is a default, so that a field that is lost on the way shows.
GOOD = {
    "name": "trial",
    "network": "small_cnn",
    "dataset": "synthetic",
    "global_batch_size": 96,
    "epochs": 7,
    "optimizer": {
        "name": "lars",
        "preset": "timm",
        "trust_coefficient": 0.002,
        "momentum": 0.8,
        "nesterov": True,
        "weight_decay": 0.0003,
        "epsilon": 1e-9,
        "exclude_from_weight_decay": ["bias", "gamma"],
        "exclude_from_layer_adaptation": [],
        "excluded_lr_multiplier": 0.5,
        "momentum_order": "post_trust",
        "norm_rule": "vector",
        "zero_norm": "zero",
        "clip": "larc",
        "trust_min": 0.25,
        "trust_max": 4.0,
        "adapt_without_decay": False,
        "decay_in_update": False,
        "gradient_clip": 5.0,
        "momentum_correction": True,
        "sparse": "error",
    },
    "schedule": {
        "peak_learning_rate": 3.5,
        "warmup_epochs": 1.5,
        "warmup_steps": 0,
        "warmup_examples": 0,
        "warmup_start_rate": 0.25,
        "warmup_shape": "quadratic",
        "decay": "polynomial",
        "decay_power": 1.0,
        "decay_plus_one": True,
        "decay_from": "start",
        "end_learning_rate": 0.125,
    },
    "network_options": {"width": 4},
    "dataset_options": {"num_train": 960},
    "augmentation": "flip_and_shift",
    "seed": 3,
    "precision": "float64",
    "evaluate_every_epochs": 2,
    "log_every_steps": 5,
    "collectives": {
        "implementation": "ring",
        "pack_megabytes": 16.5,
        "timeout_seconds": 90.0,
        "wire_dtype": "bfloat16",
    },
}
UNPRINTABLE = bytes(range(256))


def changed(key: str, *value: Any) -> dict[str, Any]:
    """GOOD with one dotted key set to a value, or taken away if none is given."""
    tree = copy.deepcopy(GOOD)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node.pop(last, None)
    if value:
        (node[last],) = value
    return tree


def value_of(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[part] if isinstance(recipe, dict) else getattr(recipe, part)
    return recipe


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    return path


def test_every_value_arrives(file):
    recipe = config.load(str(file))
    for key, value in GOOD.items():
        nested = value if key in ("optimizer", "schedule", "collectives") else {}
        for subkey, subvalue in nested.items():
            # A list becomes a tuple, because recipes are frozen.
            expected = tuple(subvalue) if isinstance(subvalue, list) else subvalue
            assert value_of(recipe, f"{key}.{subkey}") == expected
        assert nested or value_of(recipe, key) == value
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.epochs = 8


@pytest.mark.parametrize("tree", [GOOD, changed("optimizer", {"name": "sgd", "momentum": 0.5}), changed("seed")])
def test_a_recipe_written_as_yaml_reads_back_as_itself(tree, tmp_path):
    recipe = config.from_dict(tree)
    path = tmp_path / "again.yaml"
    path.write_text(recipe.to_yaml())
    assert config.load(str(path)) == recipe
    # Every value in force is written, defaults too, in the order of the class.
    assert list(yaml.safe_load(recipe.to_yaml())) == [field.name for field in dataclasses.fields(config.Recipe)]


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        # PyYAML has all of these as text: its floats need a point and a sign in the exponent.
        ("optimizer.weight_decay", "1e-3", 0.001),
        ("schedule.peak_learning_rate", "1e1", 10.0),
        ("global_batch_size", "32e3", 32000),
        ("epochs", 20.0, 20),
        ("schedule.warmup_epochs", 5, 5.0),
        ("seed", 2**32 - 1, 2**32 - 1),
        ("optimizer.exclude_from_weight_decay", None, None),
        ("evaluate_every_epochs", 0, 0),
        ("collectives.pack_megabytes", "5e-1", 0.5),
        ("collectives.pack_megabytes", None, None),
    ],
)
def test_values_are_read_by_the_type_of_their_field(key, value, read):
    got = value_of(config.from_dict(changed(key, value)), key)
    assert got == read and type(got) is type(read)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epochs", 0, "epochs is 0, but must be greater than 0"),
        ("epochs", True, "epochs is True, but must be a whole number"),
        ("epochs", 1.5, "epochs is 1.5, but must be a whole number"),
        ("epochs", "many", "epochs is 'many', but must be a whole number"),
        ("epochs", None, "epochs is None, but must be a whole number"),
        ("global_batch_size", float("inf"), "global_batch_size is inf, but must be a finite number"),
        ("seed", -1, "seed is -1, but must be at least 0"),
        # NumPy's legacy generators, which Keras seeds, take 32 bits.
        ("seed", 2**32, "seed is 4294967296, but must be less than 4294967296"),
        ("name", 3, "name is 3, but must be text"),
        ("name", "", "name is '', but must be the name of a folder"),
        ("name", "../up", "name is '../up', but must be the name of a folder"),
        ("name", "..", "name is '..', but must be the name of a folder"),
        (
            "precision",
            "float16",
            "precision is 'float16', but must be 'float32', 'float64', 'mixed_bfloat16' or 'mixed_float16'",
        ),
        ("precision", "float-64", "(did you mean 'float64'?)"),
        ("augmentation", "flip", "augmentation is 'flip', but must be 'none' or 'flip_and_shift' (did you mean"),
        ("augmentation", None, "augmentation is None, but must be 'none' or 'flip_and_shift'"),
        ("optimizer.momentum", 1.0, "optimizer.momentum is 1.0, but must be less than 1"),
        ("optimizer.momentum", True, "optimizer.momentum is True, but must be a number"),
        ("optimizer.momentum", float("nan"), "optimizer.momentum is nan, but must be a finite number"),
        ("optimizer.nesterov", "maybe", "optimizer.nesterov is 'maybe', but must be true or false"),
        ("optimizer.exclude_from_weight_decay", "bias", "is 'bias', but must be a list"),
        ("optimizer.exclude_from_weight_decay", ["bias", 3], "exclude_from_weight_decay.1 is 3, but must be text"),
        ("optimizer.name", "larz", "unknown optimizer 'larz' (did you mean 'lars'?); allowed are lars, lamb, sgd"),
        ("optimizer.momentm", 0.9, "unknown key 'optimizer.momentm' (did you mean 'momentum'?); allowed are name,"),
        ("optimizer", "lars", "optimizer is 'lars', but must be a mapping"),
        ("schedule", [], "schedule is [], but must be a mapping"),
        ("schedule.peak", 8, "unknown key 'schedule.peak' (did you mean 'peak_learning_rate'?)"),
        ("schedule.decay_from", "begin", "schedule.decay_from is 'begin', but must be 'start' or 'warmup_end'"),
        ("network_options", [], "network_options is [], but must be a mapping"),
        ("network_options", {1: 2}, "network_options has the key 1, but every key must be text"),
        ("batch_size", 5, "unknown key 'batch_size' (did you mean 'global_batch_size'?); allowed are name, network"),
        ("zzzz", 5, "unknown key 'zzzz'; allowed are name, network"),
        ("self", 5, "unknown key 'self'"),
        ("collectives", "ring", "collectives is 'ring', but must be a mapping"),
        ("collectives.implementation", "rings", "implementation is 'rings', but must be 'auto', 'ring' or 'nccl' (did"),
        ("collectives.wire_dtype", "float16", "but must be 'float32' or 'bfloat16' (did you mean 'bfloat16'?)"),
        ("collectives.pack_megabytes", -1, "collectives.pack_megabytes is -1, but must be at least 0"),
        ("collectives.timeout_seconds", 0, "collectives.timeout_seconds is 0, but must be greater than 0"),
        ("collectives.pack", 8, "unknown key 'collectives.pack' (did you mean 'pack_megabytes'?); allowed are impl"),
        # Across fields.
        ("schedule.warmup_epochs", 7, "schedule.warmup_epochs is 7.0, but must be less than epochs (7)"),
        ("schedule.warmup_start_rate", 4, "warmup_start_rate is 4.0, but must be at most schedule.peak_learning_rate"),
        ("schedule.end_learning_rate", 4, "end_learning_rate is 4.0, but must be at most schedule.peak_learning_rate"),
    ],
)
def test_a_wrong_value_is_refused(key, value, said):
    sentence = refusal(config.from_dict, changed(key, value), where="trial.yaml")
    assert sentence.startswith("trial.yaml: ") and said in sentence


@pytest.mark.parametrize("key", ["name", "epochs", "optimizer", "optimizer.name", "schedule.peak_learning_rate"])
def test_a_missing_key_is_named(key):
    assert f"the key {key!r} is missing" in refusal(config.from_dict, changed(key))


def test_of_a_misspelt_key_not_the_missing_one_is_told_but_the_misspelt():
    tree = changed("epochs")
    tree["epohcs"] = 7
    assert "unknown key 'epohcs' (did you mean 'epochs'?)" in refusal(config.from_dict, tree)


@pytest.mark.parametrize(
    ("key", "limit"),
    [("warmup_epochs", 6.99), ("warmup_start_rate", 3.5), ("end_learning_rate", 3.5)],
)
def test_fields_may_go_as_far_as_another_lets_them(key, limit):
    assert getattr(config.from_dict(changed(f"schedule.{key}", limit)).schedule, key) == limit


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a\n- b\n", "a recipe is a YAML mapping of keys to values, not ['a', 'b']"),
        (b"", "a recipe is a YAML mapping of keys to values, not None"),
        (UNPRINTABLE, "this is not YAML"),
        ("name: café\n".encode("latin-1"), "this is not YAML"),
        (b"name: [\n", "this is not YAML: line 2, column 1"),
        (b"name: a\n---\nname: b\n", "this is not YAML"),
        (b"name: 2020-99-99\n", "this is not YAML"),
        (b"name: " + b"[" * 500, "nested too deeply"),
        (b"name: !!python/object:os.system {}\n", "this is not YAML: line 1, column 7"),
        # Silence would train the second.
        (b"name: a\nepochs: 3\nepochs: 4\n", "line 3, column 1: the key 'epochs' stands twice"),
        (b"schedule:\n  decay_power: 1\n  decay_power: 2\n", "line 3, column 3: the key 'decay_power' stands twice"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content, said, file):
    file.write_bytes(content)
    sentence = refusal(config.load, str(file))
    assert sentence.startswith(f"{file}: ") and said in sentence


def test_the_same_key_in_two_mappings_is_not_twice(file):
    # GOOD has `name` in the recipe and in the optimizer; a merge may be overridden.
    merged = "optimizer:\n  <<: {name: sgd, momentum: 0.1}\n  momentum: 0.2\n"
    file.write_text(yaml.safe_dump(changed("optimizer")) + merged)
    assert config.load(str(file)).optimizer.momentum == 0.2


def test_a_file_that_cannot_be_opened_is_refused(file, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert refusal(config.load, str(file)) == f"{file}: cannot be read: Permission denied."


@pytest.mark.parametrize("source", ["", "a\0b", "a" * 5000, ".", "fashion_mnist_lars_b1"])
def test_what_is_neither_file_nor_shipped_is_refused_with_what_is_shipped(source):
    sentence = refusal(config.load, source)
    assert "is neither a file nor a shipped config" in sentence and "fashion_mnist_lars_b1k" in sentence
