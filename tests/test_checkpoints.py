"""Checkpoints in one process: whole or not there, and passed over where they are damaged."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from one_sentence import assert_one_sentence

from tf_largebatch._keras import tf
from tf_largebatch.distribution.checkpoints import Checkpoints
from tf_largebatch.validation import InputError

pytestmark = pytest.mark.smoke


def variables(value: float, shape=(3, 100)):
    kinds = {"float": tf.float32, "double": tf.float64, "half": tf.bfloat16, "whole": tf.int64}
    return [(name, tf.Variable(tf.cast(tf.fill(shape, value), dtype))) for name, dtype in kinds.items()]


def values(named):
    return [np.asarray(tf.cast(variable, tf.float64)) for _, variable in named]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(str(tmp_path / "here"), tf.distribute.get_strategy())


def saved(checkpoints, *steps):
    for step in steps:
        path = checkpoints.save(step, variables(step), variables(step / 2), {"epoch": step * 10})
        assert path == checkpoints.path(step)
    return checkpoints


def test_what_is_restored_is_what_was_saved(checkpoints):
    saved(checkpoints, 7)
    fresh = variables(0)
    about = checkpoints.restore(fresh)
    assert (about["step"], about["epoch"], about["path"]) == (7, 70, checkpoints.path(7))
    assert all((value == 7).all() for value in values(fresh))
    assert [float(np.ravel(value)[0]) for value in checkpoints.metrics(about["path"], 2)] == [3.5, 3.5]


def test_only_so_many_are_kept_and_nothing_else_lies_about(checkpoints):
    saved(checkpoints, 1, 20, 300, 4_000_000_000)
    assert checkpoints.steps() == [300, 4_000_000_000]
    assert sorted(os.listdir(checkpoints.folder)) == ["step_00000300", "step_4000000000"]


def test_the_same_step_can_be_saved_again(checkpoints):
    saved(checkpoints, 5, 5)
    assert checkpoints.restore(variables(0))["step"] == 5


def test_an_empty_or_missing_folder_holds_none(checkpoints):
    assert checkpoints.restore(variables(0)) is None
    os.makedirs(checkpoints.folder)
    assert checkpoints.restore(variables(0)) is None


def data_file(path):
    (name,) = [name for name in os.listdir(path) if ".data" in name]
    return os.path.join(path, name)


def flip(file, place):
    with open(file, "r+b") as stream:
        stream.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x10]))


DAMAGES = {
    "a bit of a weight": lambda path: flip(data_file(path), os.path.getsize(data_file(path)) // 2),
    "the last bit": lambda path: flip(data_file(path), -1),
    "half of the data": lambda path: os.truncate(data_file(path), os.path.getsize(data_file(path)) // 2),
    "no data": lambda path: os.truncate(data_file(path), 0),
    "data gone": lambda path: os.remove(data_file(path)),
    "a bit of the index": lambda path: flip(f"{path}/variables.index", 30),
    "no index": lambda path: os.truncate(f"{path}/variables.index", 0),
    "index gone": lambda path: os.remove(f"{path}/variables.index"),
    "half of about.json": lambda path: os.truncate(f"{path}/about.json", 20),
    "no about.json": lambda path: os.truncate(f"{path}/about.json", 0),
    "about.json gone": lambda path: os.remove(f"{path}/about.json"),
    "about.json a list": lambda path: Path(path, "about.json").write_text("[]"),
    "nothing left": lambda path: (shutil.rmtree(path), os.mkdir(path)),
    "a file instead": lambda path: (shutil.rmtree(path), Path(path).touch()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_with_a_warning(damage, checkpoints, caplog):
    saved(checkpoints, 1, 2)
    DAMAGES[damage](checkpoints.path(2))
    fresh = variables(0)
    with caplog.at_level(logging.WARNING):
        about = checkpoints.restore(fresh)
    assert about["step"] == 1 and all((value == 1).all() for value in values(fresh))
    assert any("step_00000002 is damaged" in record.getMessage() for record in caplog.records)
    # And is no hindrance to what is saved next.
    saved(checkpoints, 2, 3)
    assert checkpoints.restore(variables(0))["step"] == 3


def test_damaged_ones_of_later_steps_do_not_push_out_what_is_saved(checkpoints):
    saved(checkpoints, 90, 100)
    for step in (90, 100):
        os.remove(data_file(checkpoints.path(step)))
    assert checkpoints.restore(variables(0)) is None
    saved(checkpoints, 4, 8)
    assert checkpoints.steps() == [4, 8]


def test_one_without_a_needed_fact_is_not_whole(checkpoints):
    saved(checkpoints, 1)
    assert checkpoints.restore(variables(0), ["epoch"])["step"] == 1
    assert checkpoints.restore(variables(0), ["epoch", "position"]) is None


def test_if_all_are_damaged_there_is_none(checkpoints):
    saved(checkpoints, 1, 2)
    for step in (1, 2):
        os.remove(data_file(checkpoints.path(step)))
    assert checkpoints.restore(variables(0)) is None


def test_what_a_killed_process_left_of_a_save_is_no_checkpoint(checkpoints):
    saved(checkpoints, 1)
    draft = f"{checkpoints.folder}/draft"
    shutil.copytree(checkpoints.path(1), draft)
    assert checkpoints.steps() == [1]
    saved(checkpoints, 2)
    assert not os.path.exists(draft)


def test_a_save_that_fails_leaves_those_before_it(checkpoints, caplog):
    saved(checkpoints, 1)
    # What a full disk does: no file may become larger than this. Python would be killed by the signal.
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1][1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert checkpoints.save(2, variables(2), [], {}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[1])
        signal.signal(signal.SIGXFSZ, before[0])
    assert any("Step 2 could not be saved in" in record.getMessage() for record in caplog.records)
    assert os.listdir(checkpoints.folder) == ["step_00000001"]
    assert checkpoints.restore(variables(0))["step"] == 1
    saved(checkpoints, 3)


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(str(tmp_path / "file" / "here"), tf.distribute.get_strategy())
    with caplog.at_level(logging.WARNING):
        assert checkpoints.save(1, variables(1), [], {}) is None
    assert "could not be saved" in caplog.text


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (lambda: variables(0)[:-1], "it holds 4 variables, and here are 3"),
        (lambda: variables(0, (3, 99)), r"float is float32 of shape [3, 100] there, and float is float32 of shape"),
        (lambda: variables(0)[::-1], "float is float32 of shape [3, 100] there, and whole is int64"),
    ],
)
def test_of_another_model_is_an_error_and_changes_nothing(others, words, checkpoints):
    saved(checkpoints, 1)
    fresh = others()
    with pytest.raises(InputError) as refused:
        checkpoints.restore(fresh)
    assert words in str(refused.value)
    assert_one_sentence(str(refused.value))
    assert all((value == 0).all() for value in values(fresh))
