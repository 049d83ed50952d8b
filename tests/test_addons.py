"""Optimizers of tensorflow-addons by name: checked before TensorFlow loads, trained on one and on two workers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Workers, launcher, python
from one_sentence import assert_one_sentence, refusal

from tf_largebatch import config, preflight
from tf_largebatch.optimizers import addons

INSTALLED = importlib.util.find_spec("tensorflow_addons") is not None
needs_addons = pytest.mark.skipif(not INSTALLED, reason="tensorflow-addons needs TensorFlow 2.15: the extra [addons]")
without_addons = pytest.mark.skipif(INSTALLED, reason="tensorflow-addons is installed")
BATCH = 24

# What the checks read of the package, cut down to one class of each kind.
PACKAGE = {
    "__init__.py": """
from tensorflow_addons.optimizers.constants import KerasLegacyOptimizer
from tensorflow_addons.optimizers.lamb import LAMB
from tensorflow_addons.optimizers.lookahead import Lookahead
from tensorflow_addons.optimizers.cocob import COCOB
from tensorflow_addons.optimizers.weight_decay_optimizers import SGDW
""",
    "constants.py": "KerasLegacyOptimizer = None\n",
    "lamb.py": """
class LAMB:
    def __init__(
        self,
        learning_rate: Union[FloatTensorLike, Callable] = 0.001,
        beta_1: FloatTensorLike = 0.9,
        weight_decay: Union[FloatTensorLike, Callable, Dict] = 0.0,
        exclude_from_weight_decay: Optional[List[str]] = None,
        total_steps: int = 0,
        amsgrad: bool = False,
        name: str = "LAMB",
        **kwargs,
    ):
        pass
""",
    "lookahead.py": "class Lookahead:\n    def __init__(self, optimizer, sync_period: int = 6): pass\n",
    "cocob.py": "class COCOB:\n    def __init__(self, alpha: float = 100): pass\n",
    "weight_decay_optimizers.py": """
class SGDW(Extension, SGD):
    def __init__(self, weight_decay: Union[FloatTensorLike, Callable], learning_rate: FloatTensorLike = 0.001): pass
class Hidden:
    def __init__(self, learning_rate): pass
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for the package's source; nothing of it can be imported."""
    folder = tmp_path / "tensorflow_addons"
    (folder / "optimizers").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    for name, source in PACKAGE.items():
        (folder / "optimizers" / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    # One that another test has imported would be found before it.
    monkeypatch.delitem(sys.modules, "tensorflow_addons", raising=False)
    return folder / "optimizers"


def recipe(name: str, **options) -> config.Recipe:
    return config.load("fashion_mnist_lamb_b1k", [f"optimizer={json.dumps({'name': name, 'options': options})}"])


def test_optimizers_are_those_with_a_learning_rate(package):
    found = addons.optimizers(package)
    assert list(found) == ["addons.LAMB", "addons.SGDW"]
    assert [key for key, option in found["addons.SGDW"].items() if option.required] == ["weight_decay"]


def test_options_are_read_by_their_types(package):
    given = {"beta_1": "8e-1", "weight_decay": 0, "exclude_from_weight_decay": ["bias"], "clipnorm": 1, "amsgrad": True}
    read = addons.check("addons.LAMB", given)
    assert read == {**given, "beta_1": 0.8} and type(read["weight_decay"]) is float
    preflight.check(recipe("addons.LAMB", **given))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("addons.LAMP", {}, "unknown optimizer 'addons.LAMP' (did you mean 'addons.LAMB'?); allowed are addons.LAMB"),
        ("addons.lamb", {}, "unknown optimizer 'addons.lamb'"),
        ("addons.", {}, "unknown optimizer 'addons.'"),
        ("addons.Lookahead", {}, "unknown optimizer 'addons.Lookahead'"),
        ("addons.Hidden", {}, "unknown optimizer 'addons.Hidden'"),
        ("addons.LAMB", {"beta1": 0.9}, "unknown key 'optimizer.options.beta1' (did you mean 'beta_1'?); allowed are"),
        ("addons.LAMB", {"learning_rate": 0.1}, "unknown key 'optimizer.options.learning_rate'; allowed are beta_1"),
        ("addons.LAMB", {"beta_1": "fast"}, "optimizer.options.beta_1 is 'fast', but must be a number"),
        ("addons.LAMB", {"amsgrad": "maybe"}, "optimizer.options.amsgrad is 'maybe', but must be true or false"),
        ("addons.LAMB", {"total_steps": 1.5}, "optimizer.options.total_steps is 1.5, but must be a whole number"),
        (
            "addons.LAMB",
            {"exclude_from_weight_decay": "bias"},
            "exclude_from_weight_decay is 'bias', but must be a list",
        ),
        ("addons.LAMB", {"clipnorm": 0}, "optimizer.options.clipnorm is 0, but must be greater than 0"),
        ("addons.SGDW", {}, "the key 'optimizer.options.weight_decay' is missing"),
    ],
)
def test_what_cannot_be_is_refused_without_an_import(name, options, said, package):
    assert said in refusal(preflight.check, recipe(name, **options))


def test_the_recipe_keeps_the_options(tmp_path):
    written = recipe("addons.LAMB", beta_1=0.8, exclude_from_weight_decay=["bias"])
    (tmp_path / "recipe.yaml").write_text(written.to_yaml())
    assert config.load(str(tmp_path / "recipe.yaml")) == written
    assert "unknown key 'optimizer.beta_1'; allowed are name, options" in refusal(
        config.load, "fashion_mnist_lamb_b1k", ["optimizer={name: addons.LAMB, beta_1: 0.9}"]
    )


@without_addons
@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
def test_without_the_package_one_sentence_names_the_extra(flags, tmp_path):
    # Nor is TensorFlow loaded: a module of that name that fails to import stands in for it.
    code = f"""
import runpy, sys
sys.modules["tensorflow"] = None
sys.argv = {["train", "--config=fashion_mnist_lamb_b1k", "--set", "optimizer={name: addons.LAMB}", *flags]!r}
runpy.run_path({launcher("train")!r}, run_name="__main__")
"""
    failed = python("-c", code, cwd=tmp_path)
    assert failed.returncode == 2, failed.stderr
    (sentence,) = failed.stderr.splitlines()
    assert_one_sentence(sentence)
    assert "pip install 'tf_largebatch[addons]', which needs Python 3.11" in sentence


@needs_addons
def test_every_optimizer_takes_the_recipes_schedule():
    from tf_largebatch import PolynomialDecay, Warmup, recipe_objects
    from tf_largebatch._keras import tf

    folder = Path(importlib.util.find_spec("tensorflow_addons").origin).parent / "optimizers"
    names = addons.optimizers(folder)
    assert {"addons.LAMB", "addons.NovoGrad", "addons.SGDW", "addons.AdamW", "addons.LazyAdam"} <= set(names)
    for name, options in names.items():
        needed = {key: 0.01 for key, option in options.items() if option.required}
        optimizer = recipe_objects.optimizer(recipe(name, **needed), Warmup(PolynomialDecay(0.1, 4), 2, start=0.1))
        variable = tf.Variable([[1.0, 2.0]])
        before = variable.numpy()
        optimizer.apply_gradients([(tf.constant([[0.5, -0.5]]), variable)])
        assert np.all(np.isfinite(variable)) and np.any(variable != before), name


@needs_addons
def test_an_option_that_only_the_class_refuses_is_one_sentence():
    from tf_largebatch import recipe_objects

    sentence = refusal(recipe_objects.optimizer, recipe("addons.ProximalAdagrad", initial_accumulator_value=-1), 0.1)
    assert sentence.startswith("optimizer.options: addons.ProximalAdagrad refuses them: ")


@needs_addons
@pytest.mark.parametrize(
    "optimizer",
    [
        "{name: addons.LAMB, options: {weight_decay: 1e-2, exclude_from_weight_decay: [bias]}}",
        "{name: addons.SGDW, options: {weight_decay: 1e-4, momentum: 0.9, clipnorm: 1.0}}",
    ],
)
def test_two_workers_train_as_one(optimizer, tmp_path):
    from tf_largebatch._keras import keras

    arguments = [
        launcher("train"),
        "--config=fashion_mnist_lamb_b1k",
        *("--set", f"optimizer={optimizer}"),
        *("--set", "precision=float64"),
        *("--set", "network_options={batch_norm: false, width: 4}"),
        *("--set", "dataset=synthetic"),
        *("--set", f"dataset_options={{num_train: {5 * BATCH}, num_test: 33}}"),
        *("--set", f"global_batch_size={BATCH}"),
        *("--set", "epochs=2"),
        *("--set", "schedule.peak_learning_rate=0.05"),
        *("--set", "schedule.warmup_epochs=0.4"),
        *("--set", "schedule.warmup_start_rate=0.001"),
    ]
    one = python(*arguments, f"--workdir={tmp_path}/one")
    assert one.returncode == 0, one.stderr
    workers = Workers()
    try:
        outputs = workers.run(2, *arguments, f"--workdir={tmp_path}/two")
    finally:
        workers.end()
    assert "2 replicas (2 workers x 1)" in outputs[0]
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert [result["steps"] for result in results] == [10, 10]
    assert results[1]["test_loss"] == pytest.approx(results[0]["test_loss"], rel=1e-6)
    # Equal weights prove nothing if nothing moved them: ten classes by chance are a loss of 2.3.
    assert results[0]["train_loss"] < 2.2
    one, two = (
        keras.models.load_model(str(tmp_path / name / "model.keras"), compile=False).get_weights()
        for name in ("one", "two")
    )
    for alone, ours in zip(one, two, strict=True):
        assert alone.dtype == np.float64
        assert np.linalg.norm(ours - alone) < 1e-9 * np.linalg.norm(alone)
