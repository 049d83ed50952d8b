"""`fit` that was interrupted ends as one that was not: weights bit for bit, and the losses that it reports."""

from __future__ import annotations

import json
import os
import signal
import time

import numpy as np
import pytest
from conftest import ROOT, python
from interrupted_fit import parser, train

from tf_largebatch import LARS, SaveAndResume
from tf_largebatch._keras import keras, tf
from tf_largebatch.distribution import save_and_resume
from tf_largebatch.validation import InputError

PROGRAM = str(ROOT / "tests" / "interrupted_fit.py")
KERAS_2 = not hasattr(keras, "ops")
pytestmark = pytest.mark.smoke


def run(folder, *options, callbacks=()):
    """One `fit` in this process, without a strategy, as if it were a new one."""
    save_and_resume._finished.clear()
    return train(parser().parse_args([str(folder), *options]), tf.distribute.get_strategy(), callbacks)


def interrupted(folder, step, *options):
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        run(folder, *options, f"--stop_at={step}", "--how=raise")


def steps(folder) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir() if path.name.startswith("step_"))


@pytest.mark.parametrize(
    "options",
    [
        ["--data=arrays"],
        ["--data=dataset"],
        ["--data=endless"],
        ["--data=unknown"],
        ["--data=generator"],
        ["--data=arrays", "--steps_per_execution=2", "--every_steps=2"],
        ["--data=dataset", "--steps_per_execution=3", "--every_steps=1"],
        ["--data=endless", "--steps_per_execution=2", "--every_steps=1"],
        ["--data=dataset", "--optimizer=adam"],
        ["--data=dataset", "--optimizer=ema"],
        ["--data=dataset", "--precision=mixed_float16"],
        ["--data=dataset", "--precision=mixed_bfloat16"],
        ["--data=dataset", "--micro_batches=2"],
    ],
    ids=" ".join,
)
def test_weights_and_losses_are_those_of_an_undisturbed_run(options, tmp_path):
    undisturbed = run(tmp_path / "a", *options)
    # Of several steps at once there are fewer. A second time, after a restart.
    for after in (4, 2) if "execution" in " ".join(options) else (8, 3):
        interrupted(tmp_path / "b", after, *options)
    resumed = run(tmp_path / "b", *options)
    assert resumed["weights"] == undisturbed["weights"]
    assert resumed["steps"] == undisturbed["steps"]
    assert 0 < resumed["epochs"][0] <= 3 and resumed["epochs"][-1] == 3
    # Keras 2 adds what the metrics held to the sums after the restart, in another order.
    expected = undisturbed["losses"][-len(resumed["losses"]) :]
    assert resumed["losses"] == (pytest.approx(expected, rel=1e-6) if KERAS_2 else expected)


@pytest.mark.parametrize("step", [1, 4, 5, 6, 19, 20])
def test_any_step_can_be_the_last(step, tmp_path):
    options = ["--data=dataset", "--every_steps=1"]
    undisturbed = run(tmp_path / "a", *options)
    # 5 steps an epoch: interrupted after the save of `step`, in its epoch's middle or at its end.
    if step < 20:
        interrupted(tmp_path / "b", step + 1, *options)
        assert steps(tmp_path / "b")[-1] == step
    else:
        run(tmp_path / "b", *options)
    resumed = run(tmp_path / "b", *options)
    assert (resumed["weights"], resumed["steps"]) == (undisturbed["weights"], 20)


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events = []

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.events.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.events.append("validated" if "val_loss" in logs else "ended")


def test_other_callbacks_see_the_last_step_again_and_then_what_follows(tmp_path):
    interrupted(tmp_path, 8, "--data=dataset", "--epochs=3", "--every_steps=1")
    seen = Seen()
    run(tmp_path, "--data=dataset", "--epochs=3", "--every_steps=1", callbacks=[seen])
    # 7 steps were saved: 5 of epoch 0 and 2 of epoch 1.
    assert seen.events == ["epoch 1", 1, 2, 3, 4, "validated", "epoch 2", 0, 1, 2, 3, 4, "validated"]


def test_a_finished_fit_is_not_made_again(tmp_path):
    undisturbed = run(tmp_path, "--data=dataset")
    seen = Seen()
    again = run(tmp_path, "--data=dataset", callbacks=[seen])
    assert again["weights"] == undisturbed["weights"] and again["losses"] == undisturbed["losses"][-1:]
    assert seen.events == ["epoch 3", 4, "validated"]
    # And can be made longer.
    longer = run(tmp_path, "--data=dataset", "--epochs=6")
    assert longer["weights"] == run(tmp_path / "other", "--data=dataset", "--epochs=6")["weights"]


def test_reading_only_the_running_epoch_again_is_right_for_data_that_is_alike_in_all(tmp_path):
    # A validation split of unshuffled arrays is alike; the program's data set is shuffled anew in each epoch.
    options = ["--data=dataset", "--read_again=epoch"]
    undisturbed = run(tmp_path / "a", *options)
    interrupted(tmp_path / "b", 8, *options)
    assert run(tmp_path / "b", *options)["weights"] != undisturbed["weights"]


def plain_model():
    save_and_resume._finished.clear()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(LARS(0.1), "mse")
    return model


def test_data_alike_in_all_epochs_needs_no_reading_of_former_ones(tmp_path):
    x, y = np.random.default_rng(0).random((60, 4)), np.ones((60, 2))

    def fit(folder, epochs, **options):
        keras.utils.set_random_seed(2)
        model, read = plain_model(), []
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)

        def counted(*batch):
            tf.py_function(lambda: read.append(1), [], [])
            return batch

        callback = SaveAndResume(folder, every_steps=1, every_minutes=None, **options)
        model.fit(data.map(counted), epochs=epochs, callbacks=[callback], verbose=0)
        return model.get_weights(), len(read)

    (whole, _), _ = fit(tmp_path / "a", 4), fit(tmp_path / "b", 3)
    resumed, read = fit(tmp_path / "b", 4, read_again="epoch")
    assert all(np.array_equal(one, other) for one, other in zip(whole, resumed))
    # The epoch that had ended is read to its end again, and the new one; prefetching may read some more.
    assert 12 <= read <= 18


def test_a_time_between_saves(tmp_path):
    # 20 steps of 0.05 s each; 0.3 s are about 6 steps.
    run(tmp_path, "--data=dataset", "--every_steps=0", "--every_minutes=0.005", "--pause=0.05")
    saved = steps(tmp_path)
    assert saved[-1] == 20 and 11 <= saved[0] < 20


def test_sigterm_and_sigusr1_save_and_end_with_75(tmp_path):
    undisturbed = run(tmp_path / "a", "--data=arrays", "--every_steps=0")
    for name in ("SIGTERM", "SIGUSR1"):
        folder = tmp_path / name
        before = signal.getsignal(signal.Signals[name])
        with pytest.raises(SystemExit) as stopped:
            run(folder, "--data=arrays", "--every_steps=0", "--stop_at=7", f"--how={name}")
        assert stopped.value.code == 75 and steps(folder) == [7]
        # As before, for whatever comes next.
        assert signal.getsignal(signal.Signals[name]) == before
        assert run(folder, "--data=arrays", "--every_steps=0")["weights"] == undisturbed["weights"]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_on_two_replicas(how, tmp_path):
    # Metrics are kept per replica. Keras 2 cannot save the random states of several.
    options = ["--data=dataset", "--replicas=2", *(["--no_dropout"] if KERAS_2 else [])]
    undisturbed = python(PROGRAM, tmp_path / "a", *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    stopped = python(PROGRAM, tmp_path / "b", *options, "--stop_at=8", f"--how={how}")
    assert stopped.returncode == (-9 if how == "SIGKILL" else 75), stopped.stderr
    resumed = python(PROGRAM, tmp_path / "b", *options)
    first, second = (json.loads(done.stdout.splitlines()[-1]) for done in (undisturbed, resumed))
    # The moving statistics of Keras 2 are the mean over replicas, from which all replicas go on.
    what = "trained" if KERAS_2 else "weights"
    assert (second[what], second["steps"]) == (first[what], 20)
    assert second["losses"][-1] == pytest.approx(first["losses"][-1], rel=1e-6)


def test_another_model_or_optimizer_is_refused_in_one_sentence(tmp_path):
    def fit(units=2, optimizer=None):
        save_and_resume._finished.clear()
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
        model.compile(optimizer or LARS(0.1), "mse")
        weights = model.get_weights()
        try:
            model.fit(np.ones((8, 4)), np.ones((8, units)), callbacks=[SaveAndResume(tmp_path)], verbose=0)
        finally:
            assert all(np.array_equal(*pair) for pair in zip(weights, model.get_weights())) == (units != 2)

    fit()
    with pytest.raises(InputError, match=r"is of another model or optimizer: .*\[4, 2\].*\[4, 3\] here"):
        fit(units=3)
    model = plain_model()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    with pytest.raises(InputError, match="is of another model or optimizer"):
        model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[SaveAndResume(tmp_path)], verbose=0)


def test_facts_that_differ_are_refused(tmp_path):
    model = plain_model()
    callback = SaveAndResume(tmp_path)
    callback.restore(model, {"recipe": "one"})
    model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[callback], verbose=0)
    assert SaveAndResume(tmp_path).restore(plain_model(), {"recipe": "one"}).step == 1
    with pytest.raises(InputError, match="are of another recipe; choose another folder"):
        SaveAndResume(tmp_path).restore(plain_model(), {"recipe": "two"})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every_steps": 0}, "SaveAndResume: every_steps"),
        ({"every_minutes": -1}, "SaveAndResume: every_minutes"),
        ({"keep": 0}, "SaveAndResume: keep"),
        ({"read_again": "some"}, "SaveAndResume: read_again"),
    ],
)
def test_bad_arguments(arguments, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        SaveAndResume(tmp_path, **arguments)


def test_a_model_without_weights_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(InputError, match="has no weights yet; give it an Input"):
        SaveAndResume(tmp_path).restore(model)


def test_another_fit_with_the_same_folder_is_refused_and_not_skipped(tmp_path):
    # As in cross validation: each would get the weights of the first.
    model, callback = plain_model(), SaveAndResume(tmp_path)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[callback], verbose=0)
    for again in (callback, SaveAndResume(tmp_path)):
        with pytest.raises(InputError, match="has finished a training with the folder .*; give every fit a folder"):
            model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[again], verbose=0)
    model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[SaveAndResume(tmp_path / "other")], verbose=0)


class Mistake(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise RuntimeError("once")


def test_after_an_exception_the_same_callback_goes_on_and_signals_do_what_they_did(tmp_path):
    x, y = np.random.default_rng(0).random((48, 4)), np.ones((48, 2))

    def fit(model, callback, *others):
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, callbacks=[*others, callback], verbose=0)
        return model.get_weights()

    keras.utils.set_random_seed(4)
    whole = fit(plain_model(), SaveAndResume(tmp_path / "a"))
    keras.utils.set_random_seed(4)
    model, callback = plain_model(), SaveAndResume(tmp_path / "b", every_steps=2)
    with pytest.raises(RuntimeError, match="once"):
        fit(model, callback, Mistake())
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("outside"))
    with pytest.raises(RuntimeError, match="once"):
        fit(model, callback, Mistake())
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
    assert heard == ["outside"]
    assert all(np.array_equal(*pair) for pair in zip(fit(model, callback), whole))


class StopsAfter(keras.callbacks.Callback):
    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch + 1 >= self.epochs

    def on_train_end(self, logs=None):
        # As EarlyStopping does with the best weights.
        self.model.set_weights([value + 1 for value in self.model.get_weights()])


def test_a_fit_that_was_stopped_early_stays_so(tmp_path):
    def fit(*callbacks, epochs=6):
        model = plain_model()
        given = {"batch_size": 4, "epochs": epochs, "verbose": 0}
        model.fit(np.ones((8, 4)), np.ones((8, 2)), callbacks=[*callbacks, SaveAndResume(tmp_path)], **given)
        return model

    ended = fit(StopsAfter(2))
    for _ in range(2):
        again = fit()
        assert int(np.asarray(again.optimizer.iterations)) == 4
        assert all(np.array_equal(*pair) for pair in zip(again.get_weights(), ended.get_weights()))
    # Unless it is asked for more epochs than then.
    assert int(np.asarray(fit(epochs=7).optimizer.iterations)) == 14


def test_another_number_of_steps_in_an_epoch_is_refused(tmp_path):
    model = plain_model()
    model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, callbacks=[SaveAndResume(tmp_path)], verbose=0)
    with pytest.raises(InputError, match="an epoch has 4 steps, but had 2 when"):
        plain_model().fit(
            np.ones((8, 4)), np.ones((8, 2)), batch_size=2, epochs=2, callbacks=[SaveAndResume(tmp_path)], verbose=0
        )
