"""What a run leaves in its folder, and who may go on with it."""

from __future__ import annotations

import json
import os
import signal

import pytest
from conftest import python
from test_training import BATCH, EPOCHS, STEPS, recipe, scalars

from tf_largebatch import run_folder, training
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution.cluster import Cluster
from tf_largebatch.training import Saving
from tf_largebatch.validation import InputError

pytestmark = pytest.mark.smoke
KEPT = ("result.json", "model.keras", "recipe.yaml", "tensorboard")


class Interrupted(Exception):
    pass


def interrupted(workdir, step, *overrides, monkeypatch, **options):
    """Trains until step `step` is made, and no further; saves every 2 steps."""
    from tf_largebatch.monitoring.tensorboard import ScalarLog

    original, made = ScalarLog.on_train_batch_end, []

    def stops(self, batch, logs=None):
        original(self, batch, logs)
        made.append(batch)
        if len(made) == step + 1:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(ScalarLog, "on_train_batch_end", stops)
        with pytest.raises(Interrupted):
            training.run(recipe(*overrides), Cluster(), workdir, saving=Saving(2, None), **options)


def test_an_interrupted_run_goes_on_and_ends_alike(tmp_path, monkeypatch):
    whole = training.run(recipe(), Cluster(), tmp_path / "a")
    interrupted(tmp_path / "b", 6, monkeypatch=monkeypatch)
    assert not (tmp_path / "b" / "result.json").exists()
    resumed = training.run(recipe(), Cluster(), tmp_path / "b")
    assert (whole["resumed_at_step"], resumed["resumed_at_step"]) == (0, 6)
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "steps"):
        assert resumed[name] == pytest.approx(whole[name], rel=1e-6), name
    assert sorted(os.listdir(tmp_path / "b")) == sorted(KEPT)
    # One curve, with every step.
    curve = dict(scalars(tmp_path / "b" / "tensorboard" / "train")["loss"])
    other = dict(scalars(tmp_path / "a" / "tensorboard" / "train")["loss"])
    assert sorted(curve) == list(range(1, STEPS * EPOCHS + 1))
    if not hasattr(keras, "ops"):
        # Keras 2 makes the metrics in the first step after a restart, which shows its own loss alone.
        curve.pop(7), other.pop(7)
    assert curve == pytest.approx(other, rel=1e-6)


def test_of_another_recipe_it_is_refused_and_overwrite_replaces_it(tmp_path, monkeypatch):
    interrupted(tmp_path, 6, monkeypatch=monkeypatch)
    other = recipe("seed=5")
    with pytest.raises(InputError, match="are of another recipe; choose another folder"):
        training.run(other, Cluster(), tmp_path)
    assert training.run(other, Cluster(), tmp_path, overwrite=True)["resumed_at_step"] == 0


def test_overwrite_replaces_what_other_jobs_left_and_not_what_this_one_saved(tmp_path, monkeypatch):
    interrupted(tmp_path, 6, monkeypatch=monkeypatch)
    # Another launch, in its first attempt.
    with pytest.raises(Interrupted):
        raise_at_six(tmp_path, monkeypatch, Saving(2, None, job="second"))
    # The same launch, in its second attempt.
    result = training.run(recipe(), Cluster(), tmp_path, True, saving=Saving(2, None, job="second"))
    assert result["resumed_at_step"] == 4
    # A third launch.
    assert training.run(recipe(), Cluster(), tmp_path, True, saving=Saving(job="third"))["resumed_at_step"] == 0


def raise_at_six(workdir, monkeypatch, saving):
    from tf_largebatch.monitoring.tensorboard import ScalarLog

    made = []

    def stops(self, batch, logs=None):
        made.append(batch)
        if len(made) == 5:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(ScalarLog, "on_train_batch_end", stops)
        result = training.run(recipe(), Cluster(), workdir, True, saving=saving)
        raise AssertionError(result)


def test_sigterm_ends_with_75_and_the_same_call_goes_on(tmp_path, monkeypatch):
    from tf_largebatch.monitoring.throughput import Throughput

    original = Throughput.on_train_batch_end
    made = []

    def asks(self, batch, logs=None):
        original(self, batch, logs)
        made.append(batch)
        if len(made) == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Throughput, "on_train_batch_end", asks)
        with pytest.raises(SystemExit) as stopped:
            training.run(recipe(), Cluster(), tmp_path)
    assert stopped.value.code == 75
    assert training.run(recipe(), Cluster(), tmp_path)["resumed_at_step"] == 5


def test_the_best_model_is_that_of_the_best_epoch(tmp_path, monkeypatch):
    given = ["keep_best_model=true", "epochs=6", "schedule.peak_learning_rate=12.0"]
    whole = training.run(recipe(*given), Cluster(), tmp_path / "a")
    tested = dict(scalars(tmp_path / "a" / "tensorboard" / "test")["accuracy"])
    best = max(tested.values())
    # Of equals the first.
    epoch = min(step for step, accuracy in tested.items() if accuracy == best) // STEPS
    assert whole["best"] == {"epoch": epoch, "test_accuracy": pytest.approx(best)}
    model = keras.models.load_model(str(tmp_path / "a" / "best_model.keras"), compile=False)
    from tf_largebatch.datasets import synthetic

    _, (images, labels) = synthetic.load(num_train=BATCH * STEPS + 5, num_test=50)
    found = tf.argmax(model(images), axis=1).numpy()
    assert (found == labels).mean() == pytest.approx(best)
    # Interrupted after the first epoch, it still knows that epoch's.
    interrupted(tmp_path / "b", 5, *given, monkeypatch=monkeypatch)
    resumed = training.run(recipe(*given), Cluster(), tmp_path / "b")
    assert resumed["best"] == whole["best"]


def test_a_best_model_needs_evaluation():
    with pytest.raises(InputError, match="keep_best_model needs evaluate_every_epochs to be 1 or more"):
        recipe("keep_best_model=true", "evaluate_every_epochs=0")


def test_one_job_at_a_time(tmp_path):
    # Several workers, and a folder that they do not share: tests/conformance/faults/test_ended.py.
    run_folder.claim(tmp_path / "new", tf.distribute.get_strategy(), overwrite=False, job="")
    assert sorted(os.listdir(tmp_path / "new")) == [".lock", "job"]
    claims = f"""
import pathlib, tensorflow as tf
from tf_largebatch import run_folder
run_folder.claim(pathlib.Path({str(tmp_path / "new")!r}), tf.distribute.get_strategy(), False, "")
"""
    refused = python("-c", claims)
    assert refused.returncode == 1 and "is used by another job that runs now" in refused.stderr
    # A job that goes on in this process, or whose process has ended, is in nobody's way.
    run_folder.claim(tmp_path / "new", tf.distribute.get_strategy(), overwrite=False, job="")
    run_folder.finish(tmp_path / "new", {})
    assert python("-c", claims).returncode == 0
    assert python("-c", claims).returncode == 0


def test_a_signal_after_training_does_not_keep_the_result_from_being_written(tmp_path, monkeypatch):
    original = run_folder.save_model

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(run_folder, "save_model", signalled)
    before = signal.getsignal(signal.SIGTERM)
    training.run(recipe(), Cluster(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(KEPT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_json_is_written_whole(tmp_path):
    run_folder.write_json(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]
