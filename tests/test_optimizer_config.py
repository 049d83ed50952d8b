"""The optimizer of a recipe: its keys are the arguments of the class, and every one arrives there."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
from one_sentence import refusal

from tf_largebatch import LAMB, LARS, config, preflight, recipe_objects
from tf_largebatch.optimizer_config import Lamb, Lars
from tf_largebatch.optimizers.lars_presets import PRESETS

pytestmark = pytest.mark.smoke

LAMB_OPTIONS = {
    "beta_1": 0.8,
    "beta_2": 0.99,
    "epsilon": 1e-5,
    "weight_decay": 0.02,
    "exclude_from_weight_decay": ["bias"],
    "exclude_from_layer_adaptation": [],
    "excluded_lr_multiplier": 0.25,
    "trust_min": 0.01,
    "trust_max": 10.0,
    "bias_correction": False,
}


def recipe(optimizer: dict) -> config.Recipe:
    required = {"network": "small_cnn", "dataset": "synthetic", "global_batch_size": 32, "epochs": 1}
    return config.from_dict(
        {"name": "trial", **required, "schedule": {"peak_learning_rate": 1.0}, "optimizer": optimizer}
    )


def built_config(optimizer: dict) -> dict:
    return recipe_objects.optimizer(recipe(optimizer), 0.5).get_config()


@pytest.mark.parametrize(("in_recipe", "optimizer"), [(Lars, LARS), (Lamb, LAMB)])
def test_keys_are_the_arguments_and_so_are_the_defaults(in_recipe, optimizer):
    arguments = inspect.signature(optimizer).parameters
    keys = {field.name: field.default for field in dataclasses.fields(in_recipe)}
    # How XLA compiles is the machine's business; the rate is the schedule's.
    assert set(keys) - {"name", "preset"} == set(arguments) - {"learning_rate", "jit_compile", "name", "kwargs"}
    for key, default in keys.items():
        assert key in ("name", "preset") or default in (None, arguments[key].default), key


def test_presets_are_those_of_lars_and_set_what_a_recipe_leaves_open():
    literal, _ = typing.get_args(typing.get_type_hints(Lars)["preset"])
    assert typing.get_args(literal) == tuple(PRESETS)
    open_keys = {field.name for field in dataclasses.fields(Lars) if field.default is None}
    for options in PRESETS.values():
        assert set(options) <= open_keys


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_that_of_lars(preset):
    given = {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}
    assert built_config({"name": "lars", "preset": preset, **given}) == LARS.preset(preset, 0.5, **given).get_config()
    preflight.check(recipe({"name": "lars", "preset": preset}))


def test_what_a_recipe_says_is_stronger_than_the_preset():
    given = {"gradient_clip": 3.0, "epsilon": 0.0, "exclude_from_weight_decay": []}
    expected = LARS.preset("nus", 0.5, **given).get_config()
    assert built_config({"name": "lars", "preset": "nus", **given}) == expected
    assert (expected["epsilon"], expected["gradient_clip"], expected["trust_max"]) == (0.0, 3.0, 50.0)


def test_lars_and_lamb_without_options_are_the_defaults_of_the_classes():
    assert built_config({"name": "lars"}) == LARS(0.5).get_config()
    assert built_config({"name": "lamb"}) == LAMB(0.5).get_config()


def test_every_option_of_lamb_arrives():
    assert built_config({"name": "lamb", **LAMB_OPTIONS}) == LAMB(0.5, **LAMB_OPTIONS).get_config()


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"name": "lars", "preset": "mlpref"}, "optimizer.preset is 'mlpref', but must be 'intel_caffe'"),
        ({"name": "lars", "preset": "mlpref"}, "(did you mean 'mlperf'?)"),
        ({"name": "lars", "norm_rule": "sums"}, "but must be 'sum', 'vector' or 'gradient' (did you mean 'sum'?)"),
        ({"name": "lars", "clip": True}, "optimizer.clip is True, but must be 'larc'"),
        ({"name": "lars", "trust_max": 0}, "optimizer.trust_max is 0, but must be greater than 0"),
        ({"name": "lars", "trust_coefficient": 0}, "optimizer.trust_coefficient is 0, but must be greater than 0"),
        ({"name": "lars", "epsilon": True}, "optimizer.epsilon is True, but must be a number"),
        ({"name": "lars", "momentum": None}, "optimizer.momentum is None, but must be a number"),
        ({"name": "lars", "sparse": None}, "optimizer.sparse is None, but must be 'densify', 'sgd' or 'error'"),
        ({"name": "lars", "beta_1": 0.9}, "unknown key 'optimizer.beta_1'"),
        ({"name": "lamb", "beta_1": 1.0}, "optimizer.beta_1 is 1.0, but must be less than 1"),
        ({"name": "lamb", "epsilon": 0.0}, "optimizer.epsilon is 0.0, but must be greater than 0"),
        ({"name": "lamb", "bias_corection": False}, "(did you mean 'bias_correction'?)"),
        ({"name": "lam"}, "unknown optimizer 'lam' (did you mean 'lamb'?); allowed are lars, lamb, sgd, addons.CLASS"),
        ({"name": 3}, "unknown optimizer 3; allowed are lars"),
        ({"momentum": 0.9}, "the key 'optimizer.name' is missing"),
        # Between keys.
        ({"name": "lars", "momentum_order": "post_trust"}, "needs optimizer.norm_rule to be 'vector'"),
        (
            {"name": "lars", "preset": "nus", "momentum_correction": True},
            "optimizer.momentum_correction needs momentum_order 'classic', but that is 'unscaled'",
        ),
        (
            {"name": "lars", "preset": "nus", "trust_min": 51},
            "optimizer.trust_min is 51.0, but must be at most optimizer.trust_max (50.0)",
        ),
        (
            {"name": "lamb", "trust_min": 2, "trust_max": 1},
            "optimizer.trust_min is 2.0, but must be at most optimizer.trust_max (1.0)",
        ),
    ],
)
def test_a_wrong_optimizer_is_refused(optimizer, said):
    assert said in refusal(lambda: preflight.check(recipe(optimizer)))


def test_what_preflight_lets_pass_between_keys_lars_takes():
    for options in ({"momentum_order": "post_trust", "norm_rule": "vector"}, {"preset": "intel_caffe"}):
        preflight.check(recipe({"name": "lars", **options}))
        built_config({"name": "lars", **options})
    # Equal bounds are in order.
    built_config({"name": "lamb", "trust_min": 1.0, "trust_max": 1.0})
    preflight.check(recipe({"name": "lamb", "trust_min": 1.0, "trust_max": 1.0}))
