"""Schedules of recipes: which keys go with which decay, and the rates that come of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from one_sentence import refusal

from tf_largebatch import config, recipe_objects, schedule_config

PEAK = "peak_learning_rate"
EPOCHS, STEPS = 10, 6
TOTAL = EPOCHS * STEPS
# No value is a default.
WARMUP = {
    PEAK: 8.0,
    "warmup_epochs": 0.0,
    "warmup_steps": 12,
    "warmup_examples": 0,
    "warmup_start_rate": 2.0,
    "warmup_shape": "quadratic",
}
OWN = {
    "polynomial": {"decay_power": 1.0, "decay_plus_one": True, "decay_from": "start", "end_learning_rate": 0.5},
    "step": {"decay_epochs": [3, 6.5], "decay_factor": 0.5},
    "halvings": {"halvings": 3, "first_halving_step": 30, "halving_interval_steps": 10},
    "cosine": {"decay_from": "start", "end_learning_rate": 0.5},
    "constant": {},
}


def recipe(schedule):
    return config.from_dict(
        {
            "name": "trial",
            "network": "small_cnn",
            "dataset": "synthetic",
            "global_batch_size": 32,
            "epochs": EPOCHS,
            "optimizer": {"name": "sgd"},
            "schedule": schedule,
        }
    )


def rates(schedule, steps):
    made = recipe_objects.learning_rate_schedule(recipe(schedule), STEPS)
    return [float(made(step)) for step in steps]


@pytest.mark.parametrize("decay", OWN)
def test_every_value_arrives(decay, tmp_path):
    given = {**WARMUP, "decay": decay, **OWN[decay]}
    read = recipe(given)
    assert type(read.schedule) is schedule_config.DECAYS[decay]
    for key, value in given.items():
        assert getattr(read.schedule, key) == (tuple(value) if isinstance(value, list) else value)
    # The table above is complete.
    assert set(given) == {field.name for field in dataclasses.fields(read.schedule)}
    (tmp_path / "again.yaml").write_text(read.to_yaml())
    assert config.load(str(tmp_path / "again.yaml")) == read


@pytest.mark.parametrize("decay", OWN)
def test_a_key_of_another_decay_is_refused_by_name(decay):
    for other, keys in OWN.items():
        for key in set(keys) - set(OWN[decay]):
            schedule = {**WARMUP, "decay": decay, **OWN[decay], key: keys[key]}
            knows = " and ".join(schedule_config.owners(key))
            assert other in knows
            said = f"'schedule.{key}' is a key of decay {knows}, but schedule.decay is {decay}."
            assert refusal(recipe, schedule).endswith(said)


def test_without_a_decay_it_is_polynomial():
    read = recipe({PEAK: 1.0}).schedule
    assert read == schedule_config.Polynomial(peak_learning_rate=1.0) and read.decay == "polynomial"
    said = "'schedule.decay_epochs' is a key of decay step, but schedule.decay is polynomial."
    assert said in refusal(recipe, {PEAK: 1.0, "decay_epochs": [3]})


@pytest.mark.parametrize("decay", OWN)
def test_another_decay_by_override_begins_without_the_keys_of_the_first(decay, tmp_path):
    path = tmp_path / "trial.yaml"
    for first, own in OWN.items():
        path.write_text(recipe({**WARMUP, "decay": first, **own}).to_yaml())
        needed = ["schedule.decay_epochs=[4]"] if decay == "step" else []
        after = config.load(str(path), [f"schedule.decay={decay}", *needed]).schedule
        assert type(after) is schedule_config.DECAYS[decay]
        assert [getattr(after, key) for key in WARMUP] == list(WARMUP.values())
        kept = set(own) & set(OWN[decay])
        assert [getattr(after, key) for key in kept - {"decay_epochs"}] == [own[key] for key in kept - {"decay_epochs"}]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"decay": "stp"}, "unknown decay 'stp' (did you mean 'step'?); allowed are polynomial, step, halvings,"),
        ({"decay": ["step"]}, "unknown decay ['step'] (did you mean 'step'?); allowed are"),
        ({"decay": None}, "unknown decay None"),
        ({"decay": "step"}, "the key 'schedule.decay_epochs' is missing."),
        ({"decay": "step", "decay_epochs": []}, "schedule.decay_epochs is [], but must be a list of 1 or more."),
        ({"decay": "step", "decay_epochs": 30}, "schedule.decay_epochs is 30, but must be a list."),
        ({"decay": "step", "decay_epochs": [3, 3]}, "schedule.decay_epochs is [3.0, 3.0], but must increase."),
        ({"decay": "step", "decay_epochs": [0, 3]}, "schedule.decay_epochs.0 is 0, but must be greater than 0."),
        ({"decay": "step", "decay_epochs": [3], "decay_factor": 1}, "schedule.decay_factor is 1, but must be less"),
        ({"decay": "halvings", "halvings": 0}, "schedule.halvings is 0, but must be greater than 0."),
        (
            {"decay": "halvings", "first_halving_step": 3},
            "first_halving_step is 3, but halving_interval_steps is None;",
        ),
        ({"decay": "halvings", "halving_interval_steps": 3}, "first_halving_step is None, but halving_interval_steps"),
        ({"decay": "cosine", "end_learning_rate": 9}, "schedule.end_learning_rate is 9.0, but must be at most"),
        ({"decay_plus_one": 2}, "schedule.decay_plus_one is 2, but must be true or false."),
        ({"warmup_shape": "cubic"}, "schedule.warmup_shape is 'cubic', but must be 'linear', 'quadratic',"),
        ({"warmup_shape": "exponential"}, "must be greater than 0 with warmup_shape 'exponential'."),
        ({"warmup_shape": "constant"}, "schedule.warmup_start_rate is 0.0, but must be greater than 0 with"),
        (
            {"warmup_start_rate": 9},
            "schedule.warmup_start_rate is 9.0, but must be at most schedule.peak_learning_rate",
        ),
        ({"warmup_steps": -1}, "schedule.warmup_steps is -1, but must be at least 0."),
        ({"warmup_epochs": 1, "warmup_steps": 2}, "warmup_epochs is 1.0, but schedule.warmup_steps is 2; one of them"),
        ({"warmup_steps": 2, "warmup_examples": 3}, "schedule.warmup_steps is 2, but schedule.warmup_examples is 3;"),
    ],
)
def test_a_wrong_value_is_refused(schedule, said):
    assert said in refusal(recipe, {PEAK: 8.0, **schedule})


@pytest.mark.smoke
@pytest.mark.parametrize("length", [{"warmup_epochs": 2}, {"warmup_steps": 12}, {"warmup_examples": 12 * 32}])
def test_the_warm_up_is_stated_in_any_unit(length):
    got = rates({PEAK: 8.0, "decay": "constant", **length}, [0, 1, 11, 12, 13, TOTAL])
    assert got == pytest.approx([0.0, 8 / 12, 8 * 11 / 12, 8.0, 8.0, 8.0])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("keys", "after"),
    [
        # The rates of t - 12, or of t, from step 12 on.
        ({"decay": "polynomial", "decay_power": 1}, lambda t: 8 * (TOTAL - t) / 48),
        ({"decay": "polynomial", "decay_power": 1, "decay_plus_one": True}, lambda t: 8 * (TOTAL + 1 - t) / 49),
        ({"decay": "polynomial", "decay_from": "start"}, lambda t: 8 * ((TOTAL - t) / TOTAL) ** 2),
        ({"decay": "polynomial", "end_learning_rate": 2}, lambda t: 2 + 6 * ((TOTAL - t) / 48) ** 2),
        ({"decay": "cosine", "end_learning_rate": 2}, lambda t: 5 + 3 * math.cos(math.pi * (t - 12) / 48)),
        ({"decay": "cosine", "decay_from": "start"}, lambda t: 4 + 4 * math.cos(math.pi * t / TOTAL)),
        # After 3 and 6.5 epochs of 6 steps; the last third, steps 40 to 60, in four parts; every 10 from 30.
        ({"decay": "step", **OWN["step"]}, lambda t: 8 / 2 ** ((t >= 18) + (t >= 39))),
        ({"decay": "halvings"}, lambda t: 8 / 2 ** (max(t - 40, 0) // 5)),
        ({"decay": "halvings", **OWN["halvings"]}, lambda t: 8 / 2 ** ((t >= 30) + (t >= 40) + (t >= 50))),
        ({"decay": "constant"}, lambda t: 8),
    ],
)
def test_rates_of_each_decay(keys, after):
    steps = range(TOTAL + 1)
    expected = [2 + 6 * (t / 12) ** 2 if t < 12 else after(t) for t in steps]
    # Cosines cancel to zero at the end.
    assert rates({**WARMUP, **keys}, steps) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("length", [{"warmup_steps": TOTAL}, {"warmup_examples": TOTAL * 32}, {"warmup_epochs": 9.99}])
def test_a_warm_up_of_the_whole_run_is_refused(length):
    said = "the warm-up of the schedule takes 60 steps, but the whole run has 60."
    assert refusal(recipe_objects.learning_rate_schedule, recipe({PEAK: 8.0, **length}), STEPS) == said
