"""Everything about a run that can be known to be wrong before TensorFlow loads or a process starts."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_largebatch import named_functions, scaling
from tf_largebatch.config import Recipe
from tf_largebatch.distribution import batch_split
from tf_largebatch.distribution.batch_split import BatchSplit
from tf_largebatch.named_functions import NamedFunction
from tf_largebatch.optimizer_config import Addons, Lars, given
from tf_largebatch.optimizers import addons
from tf_largebatch.optimizers.lars_presets import PRESETS
from tf_largebatch.validation import InputError

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Functions:
    """What a recipe names: `network.resolve()(input_shape, num_classes, **network.options)`, and
    `dataset.resolve()(**dataset.options)`."""

    network: NamedFunction
    dataset: NamedFunction


def check(recipe: Recipe) -> Functions:
    """Checks the recipe's names and options, its data files, and its batch against the data.

    A data set of the user's is found but not read, nor is an optimizer of tensorflow-addons imported.

    Raises:
      InputError: with one sentence that says what to mend.
    """
    _check_optimizer(recipe.optimizer)
    network = named_functions.find("network", recipe.network, recipe.network_options, positional=2)
    dataset = named_functions.find("dataset", recipe.dataset, recipe.dataset_options)
    if ":" not in recipe.dataset:
        # Shipped data sets need NumPy alone.
        count = importlib.import_module(dataset.module).num_examples(**dataset.options)
        if count is not None:
            scaling.steps_per_epoch(count, recipe.global_batch_size)
    return Functions(network, dataset)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, Addons):
        addons.check(optimizer.name, optimizer.options)
        return
    options = given(optimizer)
    if isinstance(optimizer, Lars):
        # What the optimizer itself would find only when all workers have met.
        options = {**PRESETS.get(optimizer.preset, {}), **options}
        order = options.get("momentum_order", "classic")
        if order == "post_trust" and options.get("norm_rule") != "vector":
            raise InputError(
                "optimizer.momentum_order is 'post_trust', which needs optimizer.norm_rule to be 'vector'."
            )
        if order != "classic" and options.get("momentum_correction"):
            raise InputError(f"optimizer.momentum_correction needs momentum_order 'classic', but that is {order!r}.")
    low, high = options.get("trust_min", 0.0), options.get("trust_max", float("inf"))
    if low > high:
        raise InputError(f"optimizer.trust_min is {low}, but must be at most optimizer.trust_max ({high}).")


def split(
    recipe: Recipe, num_workers: int, replicas_per_worker: int, max_per_replica_batch_size: int | None = None
) -> BatchSplit:
    """How a cluster cuts the recipe's global batch up, with the network's batch-norm groups whole.

    A network says how large they are by the option `batch_norm_group_size`; of any other type than a
    positive number, the option is the network's own affair.

    Raises:
      InputError: there is no such split, or the network's options are wrong; one sentence that says what
        to mend.
    """
    # As the network will get it: "8" of a --set may be 8.
    options = named_functions.find("network", recipe.network, recipe.network_options, positional=2).options
    group = options.get("batch_norm_group_size")
    if not isinstance(group, int) or isinstance(group, bool) or group < 1:
        group = None
    return batch_split.split(
        recipe.global_batch_size, num_workers, replicas_per_worker, max_per_replica_batch_size, group
    )


def check_workdir(workdir: Path, overwrite: bool) -> None:
    """Refuses a folder that holds a finished run, and a path that cannot be a folder or not be written.

    Raises:
      InputError: with one sentence that says what to mend.
    """
    if (workdir / RESULT_FILE).exists() and not overwrite:
        raise InputError(
            f"--workdir: {str(workdir)!r} holds a finished run ({RESULT_FILE}); "
            "choose another folder, or give --overwrite to replace it."
        )
    for path in (workdir, *workdir.parents):
        if path.exists():
            if not path.is_dir():
                raise InputError(f"--workdir: {str(path)!r} is a file, not a folder.")
            if not os.access(path, os.W_OK | os.X_OK):
                raise InputError(f"--workdir: {str(path)!r} cannot be written by this user.")
            break
