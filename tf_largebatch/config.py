"""The recipe: what a training run computes, read from YAML, checked before TensorFlow loads.

A recipe says nothing about machines: how its global batch is cut up is the cluster's business
(`distribution/batch_split.py`).
"""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from tf_largebatch import schedule_config
from tf_largebatch.collectives_config import Collectives
from tf_largebatch.optimizer_config import OPTIMIZERS, AnyOptimizer
from tf_largebatch.schedule_config import DECAYS, AnySchedule
from tf_largebatch.validation import (
    STRICT,
    FolderName,
    InputError,
    NonNegativeInt,
    PositiveInt,
    Seed,
    fault_of_value,
    nearest,
    unknown,
)

# Parts of a recipe of which there are several kinds: what they are called, the key that names one, the kinds.
_UNIONS = {"optimizer": ("optimizer", "name", OPTIMIZERS), "schedule": ("decay", "decay", DECAYS)}


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """One training run, complete: the same run on any cluster.

    `network` and `dataset` name a module of this package (`small_cnn`, `fashion_mnist`) or a
    function of yours (`my_pkg.models:build`, `my_pkg.data:load`); `network_options` and
    `dataset_options` are that function's keyword arguments. `augmentation` is what training does to
    each image (`datasets/augmentation.py`). The results of a run go to runs/NAME.
    `collectives` is how gradients travel.
    """

    name: FolderName
    network: str
    dataset: str
    global_batch_size: PositiveInt
    epochs: PositiveInt
    optimizer: AnyOptimizer
    schedule: AnySchedule
    network_options: dict[str, Any] = Field(default_factory=dict)
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    augmentation: Literal["none", "flip_and_shift"] = "none"
    seed: Seed = 0
    precision: Literal["float32", "float64", "mixed_bfloat16", "mixed_float16"] = "float32"
    evaluate_every_epochs: NonNegativeInt = 1
    log_every_steps: PositiveInt = 1
    keep_best_model: bool = False
    collectives: Collectives = Field(default_factory=Collectives)

    def to_yaml(self) -> str:
        """This recipe with every value in force, as YAML that `load` reads back."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


def load(source: str, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Reads a recipe and applies dotted overrides.

    Args:
      source: path of a YAML file, or the name of a shipped config.
      overrides: such as `["epochs=3", "optimizer.momentum=0.95"]`, in order; each value is YAML.
        Another `network` or `dataset` begins without options.

    Raises:
      InputError: the file is missing or no YAML mapping; a key, type or range is wrong.
    """
    path = find(source)
    try:
        # As bytes: PyYAML then tells UTF-8 from UTF-16, and refuses what is neither.
        tree = _parse(path.read_bytes(), str(path))
    except OSError as failure:
        raise InputError(f"{path}: cannot be read: {failure.strerror}.") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a recipe is a YAML mapping of keys to values, not {tree!r:.60}.")
    for override in overrides:
        _override(tree, override)
    return from_dict(tree, where=str(path))


def from_dict(tree: dict[str, Any], where: str = "recipe") -> Recipe:
    """Checks a mapping and freezes it into a `Recipe`; `where` opens every error message."""
    try:
        recipe = Recipe(**{str(key): value for key, value in tree.items()})
    except ValidationError as failure:
        faults = failure.errors(include_url=False)
        # A misspelt key is also a missing one; its own fault says more.
        faults.sort(key=lambda fault: fault["type"] != "unexpected_keyword_argument")
        raise InputError(f"{where}: {_sentence(faults[0])}.") from None
    fault = schedule_config.fault(recipe.schedule, recipe.epochs)
    if fault:
        raise InputError(f"{where}: {fault}.")
    if recipe.keep_best_model and not recipe.evaluate_every_epochs:
        raise InputError(f"{where}: keep_best_model needs evaluate_every_epochs to be 1 or more.")
    return recipe


def shipped_configs() -> Path:
    """The folder of the configs that come with this package."""
    package = Path(__file__).resolve().parent
    # Installed, the folder is mapped into the package (setup.cfg); in a checkout it lies beside it.
    installed, checkout = package / "configs", package.parent / "configs"
    return installed if installed.is_dir() else checkout


def find(source: str) -> Path:
    """The file that `source` means: a path as it stands, else the name of a shipped config."""
    # Unlike Path.is_file, False for a name that is too long.
    if os.path.isfile(source):
        return Path(source)
    shipped = {file.stem: file for file in sorted(shipped_configs().glob("*.yaml"))}
    name = source.removesuffix(".yaml")
    if name in shipped:
        return shipped[name]
    raise InputError(
        f"--config: {source!r} is neither a file nor a shipped config{nearest(name, shipped)}; "
        f"shipped are {', '.join(shipped)}."
    )


class _UniqueKeys(yaml.SafeLoader):
    """YAML forbids a key to stand twice in one mapping; PyYAML silently takes the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return node


def _parse(text: str | bytes, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = ", ".join(part for part in (failure.context, failure.problem) if part)
        raise InputError(f"{where}: this is not YAML: {place}{problem}.") from None
    except (yaml.YAMLError, ValueError) as failure:
        # A ValueError: something that looks like a date, but is none.
        raise InputError(f"{where}: this is not YAML: {' '.join(str(failure).split())}.") from None
    except RecursionError:
        raise InputError(f"{where}: this is nested too deeply for a recipe.") from None


def _override(tree: dict[str, Any], override: str) -> None:
    keys, equals, value = override.partition("=")
    *parents, last = keys.split(".")
    if not equals or not all([*parents, last]):
        raise InputError(f"--set {override!r} must have the form key=value or key.subkey=value.")
    value = _parse(value, f"--set {override!r}")
    if keys in ("network", "dataset") and value != tree.get(keys):
        # Options belong to the function they were written for.
        tree[f"{keys}_options"] = {}
    for depth, key in enumerate(parents, start=1):
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            raise InputError(f"--set {override!r}: {'.'.join(parents[:depth])} is {tree!r} and has no keys.")
    if keys == "schedule.decay":
        schedule_config.drop_keys_of_others(tree, value)
    tree[last] = value


def _sentence(fault: dict[str, Any]) -> str:
    place = [str(part) for part in fault["loc"]]
    owner: type = Recipe
    union, tag, kinds = _UNIONS.get(place[0], ("", "", {}))
    if len(place) > 1 and union:
        # pydantic puts the union's tag ("lars") into the place; it is not a key of the file.
        owner = kinds[place.pop(1)]
    elif len(place) > 1 and place[0] == "collectives":
        owner = Collectives
    key = ".".join(place)
    if fault["type"] == "unexpected_keyword_argument":
        names = [field.name for field in fields(owner)]
        decays = schedule_config.owners(place[-1]) if place[0] == "schedule" else []
        if decays:
            return f"{key!r} is a key of decay {' and '.join(decays)}, but schedule.decay is {owner.decay}"
        return f"unknown key {key!r}{nearest(place[-1], names)}; allowed are {', '.join(names)}"
    if fault["type"] == "union_tag_not_found" and not isinstance(fault["input"], dict):
        return f"{key} is {fault['input']!r}, but must be a mapping of keys to values"
    if fault["type"] in ("missing", "union_tag_not_found"):
        return f"the key {key + ('.name' if fault['type'] != 'missing' else '')!r} is missing"
    if fault["type"] == "union_tag_invalid":
        return unknown(union, fault["input"][tag], kinds)
    if fault["type"] == "model_attributes_type":
        return f"{key} is {fault['input']!r}, but must be a mapping of keys to values"
    if place[-1] == "[key]":
        return f"{place[0]} has the key {fault['input']!r}, but every key must be text"
    return fault_of_value(key, fault)
