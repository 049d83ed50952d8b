"""`training.run` in this process: what it writes, what it refuses, and the numbers it reports."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tf_largebatch import config, recipe_objects, training
from tf_largebatch._keras import keras
from tf_largebatch.distribution.cluster import Cluster
from tf_largebatch.validation import InputError

pytestmark = pytest.mark.smoke

BATCH, STEPS, EPOCHS = 32, 4, 3


def recipe(*overrides):
    return config.load(
        "fashion_mnist_lars_b1k",
        [
            "dataset=synthetic",
            f"dataset_options={{num_train: {BATCH * STEPS + 5}, num_test: 50}}",
            f"global_batch_size={BATCH}",
            f"epochs={EPOCHS}",
            "schedule.warmup_epochs=1",
            "network_options.width=4",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, training.run(recipe(), Cluster(), workdir)


def scalars(folder):
    """{tag: [(step, value), ...]} of a TensorBoard run."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    from tf_largebatch._keras import tf

    return {
        tag: [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_result_file_is_what_run_returns(finished):
    workdir, result = finished
    with open(workdir / "result.json") as file:
        written = json.load(file)
    assert {**written, "model_saved": True} == json.loads(json.dumps(result))
    assert result["steps"] == STEPS * EPOCHS
    assert result["split"]["per_replica_batch_size"] == BATCH
    assert result["images_per_second"] > 0
    assert not list(workdir.glob("*.tmp"))


def test_recipe_file_reads_back(finished):
    workdir, _ = finished
    assert config.load(str(workdir / "recipe.yaml")) == recipe()


def test_saved_model_gives_the_reported_accuracy(finished):
    workdir, result = finished
    model = keras.models.load_model(str(workdir / "model.keras"))
    from tf_largebatch.datasets import synthetic

    _, (images, labels) = synthetic.load(num_train=BATCH * STEPS + 5, num_test=50)
    logits = np.asarray(model(images), np.float64)
    assert np.mean(logits.argmax(1) == labels) == pytest.approx(result["test_accuracy"], rel=1e-6)
    # The exact mean over 50 images, though evaluation ran two batches of 32.
    log_sum = np.log(np.exp(logits).sum(1))
    loss = np.mean(log_sum - logits[np.arange(50), labels])
    assert loss == pytest.approx(result["test_loss"], rel=1e-5)


def test_tensorboard_scalars(finished):
    workdir, result = finished
    train, test = scalars(workdir / "tensorboard" / "train"), scalars(workdir / "tensorboard" / "test")
    assert {"loss", "accuracy", "learning_rate", "images_per_second"} <= set(train)
    assert [step for step, _ in train["loss"]] == list(range(1, STEPS * EPOCHS + 1))
    # The rate of step k is that of the k-th update: a ramp from 0 over one epoch, then the decay.
    peak = recipe().schedule.peak_learning_rate
    warm = [peak * step / STEPS for step in range(STEPS)]
    rest = STEPS * (EPOCHS - 1)
    decay = [peak * (1 - step / rest) ** 2 for step in range(rest)]
    assert [value for _, value in train["learning_rate"]] == pytest.approx(warm + decay, rel=1e-5)
    assert [step for step, _ in test["accuracy"]] == [STEPS * (epoch + 1) for epoch in range(EPOCHS)]
    assert test["loss"][-1][1] == pytest.approx(result["test_loss"], rel=1e-5)
    assert all(value > 0 for _, value in train["images_per_second"])


def test_a_finished_run_is_not_overwritten_unasked(finished):
    workdir, result = finished
    with pytest.raises(InputError, match="holds a finished run"):
        training.run(recipe(), Cluster(), workdir)
    with open(workdir / "result.json") as file:
        assert json.load(file)["train_loss"] == result["train_loss"]


def test_overwrite(tmp_path):
    training.run(recipe("epochs=3"), Cluster(), tmp_path)
    second = training.run(recipe("epochs=2", "seed=1"), Cluster(), tmp_path, overwrite=True)
    with open(tmp_path / "result.json") as file:
        assert json.load(file)["recipe"]["seed"] == second["recipe"]["seed"] == 1
    # The first run's curves, an epoch longer, are gone.
    assert scalars(tmp_path / "tensorboard" / "train")["loss"][-1][0] == 2 * STEPS


def test_the_same_recipe_gives_the_same_run(finished, tmp_path):
    _, first = finished
    second = training.run(recipe(), Cluster(), tmp_path)
    for key in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
        assert second[key] == pytest.approx(first[key], rel=1e-4), key


def test_evaluation_can_be_left_to_the_end(tmp_path):
    result = training.run(recipe("evaluate_every_epochs=0", "epochs=2"), Cluster(), tmp_path)
    assert math.isfinite(result["test_loss"])
    assert scalars(tmp_path / "tensorboard" / "test") == {}


def test_log_every_steps(tmp_path):
    training.run(recipe("log_every_steps=3", "epochs=2"), Cluster(), tmp_path)
    assert [step for step, _ in scalars(tmp_path / "tensorboard" / "train")["loss"]] == [3, 6]


def test_a_run_that_diverges_says_so_and_leaves_no_result(tmp_path):
    wild = recipe(
        "optimizer={name: sgd, momentum: 0.9}", "schedule.peak_learning_rate=1e30", "schedule.warmup_epochs=0"
    )
    with pytest.raises(training.TrainingDiverged, match="lower schedule.peak_learning_rate"):
        training.run(wild, Cluster(), tmp_path)
    assert not (tmp_path / "result.json").exists()


def test_sgd_is_lars_without_the_layer_wise_rate():
    # Rate 0.1 from step 0: the first step of a kernel is -0.1 (g + beta w).
    plain = recipe("optimizer={name: sgd, momentum: 0.0, weight_decay: 0.5}")
    optimizer = recipe_objects.optimizer(plain, 0.1)
    from tf_largebatch._keras import tf

    kernel = tf.Variable(tf.ones((2, 2)), name="kernel")
    if hasattr(keras, "Variable"):
        kernel = keras.Variable(np.ones((2, 2), np.float32), name="kernel")
    optimizer.build([kernel])
    optimizer.apply_gradients([(tf.fill((2, 2), 2.0), kernel)])
    np.testing.assert_allclose(np.asarray(kernel), 1 - 0.1 * (2 + 0.5), rtol=1e-6)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_sixteen_bits_in_micro_batches(tmp_path, precision):
    small = recipe(f"precision={precision}", "epochs=2", "network_options.batch_norm_group_size=8")
    result = training.run(small, Cluster(), tmp_path, max_per_replica_batch_size=8)
    assert result["split"]["micro_batches"] == BATCH // 8
    assert math.isfinite(result["test_loss"])


def test_a_network_that_knows_the_cluster_is_warned_of(tmp_path, caplog):
    knowing = recipe("epochs=1", "schedule.warmup_epochs=0", "network_options.batch_norm_group_size=null")
    with caplog.at_level("WARNING"):
        training.run(knowing, Cluster(), tmp_path / "knowing")
    assert "because of the layers batch_normalization_1, batch_normalization_2, batch_normalization_3" in caplog.text
    caplog.clear()
    training.run(recipe("epochs=1", "schedule.warmup_epochs=0"), Cluster(), tmp_path / "not")
    assert "because of the layers" not in caplog.text


@pytest.fixture(autouse=True)
def default_precision():
    yield
    from tf_largebatch._keras import set_precision

    set_precision("float32")


OWN_MODULES = """
import numpy as np
from tensorflow import keras

def load(num_images: int = 64):
    images = np.random.default_rng(0).normal(size=(num_images, 6)).astype("float32")
    labels = (images.sum(1) > 0).astype("int64")
    return (images, labels), (images[:10], labels[:10])

def build(input_shape, num_classes, units: int = 4):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(units), keras.layers.Dense(num_classes)])
"""


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ("None", "returned NoneType, but must return a Keras model"),
        ("keras.Sequential([keras.Input(input_shape), keras.layers.Dense(1)])", r"outputs of shape \(None, 1\)"),
        ("keras.Sequential([keras.Input(input_shape), keras.layers.Reshape((6, 1))])", r"shape \(None, 6, 1\)"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(tmp_path, monkeypatch, returned, sentence):
    module = f"unfit_{abs(hash(returned))}"
    code = OWN_MODULES.partition("def build")[0] + f"def build(input_shape, num_classes):\n    return {returned}\n"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    own = recipe(f"network={module}:build", f"dataset={module}:load")
    with pytest.raises(InputError, match=sentence):
        training.run(own, Cluster(), tmp_path / "run")


def test_a_model_that_cannot_be_saved_costs_the_model_alone(tmp_path):
    # A folder in its place stands for a full disk or a layer without get_config.
    (tmp_path / "model.keras").mkdir()
    result = training.run(recipe("epochs=2"), Cluster(), tmp_path)
    assert not result["model_saved"]
    assert (tmp_path / "result.json").exists() and not (tmp_path / "draft.keras").exists()


def test_network_and_data_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "their_code.py").write_text(OWN_MODULES)
    monkeypatch.syspath_prepend(tmp_path)
    own = recipe(
        "network=their_code:build",
        "dataset=their_code:load",
        "network_options.units=3",
        "dataset_options.num_images=80",
        "epochs=2",
    )
    result = training.run(own, Cluster(), tmp_path / "run")
    assert result["steps"] == 2 * (80 // BATCH)
    model = keras.models.load_model(str(tmp_path / "run" / "model.keras"))
    assert model.output_shape == (None, 2)
