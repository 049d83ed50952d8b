"""What is found to be wrong before TensorFlow loads: names, options, data, batch, the folder for results."""

from __future__ import annotations

import os
import re
import sys

import pytest
from one_sentence import refusal

from tf_largebatch import config, preflight
from tf_largebatch.distribution.batch_split import BatchSplit

SHIPPED = "fashion_mnist_lars_b1k"


def recipe(*overrides: str) -> config.Recipe:
    return config.load(SHIPPED, overrides)


def test_a_shipped_recipe_passes_and_its_functions_are_found():
    functions = preflight.check(recipe())
    assert (functions.network.module, functions.network.function) == ("tf_largebatch.networks.small_cnn", "build")
    assert functions.dataset.resolve()(**functions.dataset.options)[0][0].shape == (10_000, 28, 28, 1)


def test_options_come_out_as_the_function_wants_them():
    functions = preflight.check(recipe("network_options.batch_norm_momentum=5e-1", "network_options.width='8'"))
    stated = {"batch_norm": True, "batch_norm_group_size": 32, "dropout": 0.0}
    assert functions.network.options == {"width": 8, "batch_norm_momentum": 0.5, **stated}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("network=smal_cnn", "unknown network 'smal_cnn' (did you mean 'small_cnn'?)"),
        ("dataset=fashion_mnits", "unknown dataset 'fashion_mnits' (did you mean 'fashion_mnist'?)"),
        ("network_options.widht=8", "unknown key 'network_options.widht' (did you mean 'width'?)"),
        ("network_options.width=-8", "network_options.width is -8, but must be greater than 0"),
        # What `training` itself gives to a network.
        ("network_options.num_classes=10", "unknown key 'network_options.num_classes'"),
        ("dataset_options.source=kears", "dataset_options.source is 'kears', but must be 'packaged' or 'keras'"),
        ("dataset_options.folder=/no/such/folder", "there is no folder '/no/such/folder'"),
        ("network=no_such_package.models:build", "there is no module 'no_such_package.models'"),
        ("global_batch_size=10001", "global_batch_size is 10001, but the data set has 10000 training examples"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(override, said):
    assert said in refusal(preflight.check, recipe(override))


@pytest.mark.parametrize(
    "overrides",
    [
        ["global_batch_size=10000"],
        ["dataset=synthetic", "dataset_options.num_train=20000", "global_batch_size=20000"],
        # Only the fetch could tell how many images there are.
        ["dataset_options.source=keras", "global_batch_size=1000000"],
    ],
)
def test_a_batch_may_be_as_large_as_the_data(overrides):
    preflight.check(recipe(*overrides))


def test_a_data_set_of_the_users_is_found_but_not_read(tmp_path, monkeypatch):
    (tmp_path / "unread_data.py").write_text("raise SystemExit('imported')\ndef load(folder: str): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ("dataset=unread_data:load", "global_batch_size=1000000")
    assert "the key 'dataset_options.folder' is missing" in refusal(preflight.check, recipe(*own))
    functions = preflight.check(recipe(*own, "dataset_options.folder=/no/such/folder"))
    assert functions.dataset.options == {"folder": "/no/such/folder"}
    assert "unread_data" not in sys.modules


@pytest.mark.parametrize("depth", [".", "new", "new/er"])
def test_a_folder_for_results_may_be_new_or_empty_or_hold_an_unfinished_run(depth, tmp_path):
    (tmp_path / "recipe.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    preflight.check_workdir(tmp_path / depth, overwrite=False)
    # It only looks: workers that fail later leave nothing behind.
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_is_replaced_only_when_told(tmp_path):
    (tmp_path / preflight.RESULT_FILE).touch()
    sentence = refusal(preflight.check_workdir, tmp_path, overwrite=False)
    assert f"--workdir: {str(tmp_path)!r} holds a finished run" in sentence and "--overwrite" in sentence
    preflight.check_workdir(tmp_path, overwrite=True)


@pytest.mark.parametrize("below", ["", "run", "run/1"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_at_or_below_a_file_is_refused(below, overwrite, tmp_path):
    file = tmp_path / "file"
    file.touch()
    said = f"--workdir: {str(file)!r} is a file, not a folder."
    assert refusal(preflight.check_workdir, file / below, overwrite) == said


def test_only_the_nearest_folder_must_be_writable(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    preflight.check_workdir(tmp_path / "mine" / "run", overwrite=False)


@pytest.mark.parametrize("below", ["", "run"])
def test_a_folder_that_cannot_be_written_is_refused(below, tmp_path, monkeypatch):
    # Only the chief makes the folder, after all have met: the others would wait for it.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    said = f"--workdir: {str(tmp_path)!r} cannot be written by this user."
    assert refusal(preflight.check_workdir, tmp_path / below, overwrite=False) == said


@pytest.mark.parametrize(
    ("group", "limit", "per_replica"),
    [
        # A replica's share is 512 of 1,024.
        (None, None, 512),
        (None, 200, 128),
        ("96e0", 500, 0),
        (64, 200, 128),
        ("'64'", 100, 64),
        (1024, None, 512),
        (1024, 256, 0),
        (128, 100, 0),
    ],
)
def test_a_split_keeps_the_groups_of_the_network_whole(group, limit, per_replica):
    overrides = [] if group is None else [f"network_options.batch_norm_group_size={group}"]
    call = (recipe(*overrides), 2, 1, limit)
    if per_replica:
        assert preflight.split(*call) == BatchSplit(1024, 2, 1, per_replica, 512 // per_replica)
    else:
        assert re.search("(batch_norm_group|max_per_replica_batch)_size is ", refusal(preflight.split, *call))


@pytest.mark.parametrize("value", ["true", "false", "0", "-3", "big", "1.5", "null", "[3]"])
def test_what_is_no_group_size_is_the_networks_own_affair(value, tmp_path, monkeypatch):
    (tmp_path / "grouped.py").write_text("def build(shape, classes, batch_norm_group_size=None): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = recipe("network=grouped:build", f"network_options.batch_norm_group_size={value}")
    assert preflight.split(own, 2, 2, 100) == BatchSplit(1024, 2, 2, 64, 4)
