"""Epochs and examples to steps: the definitions, and the papers' own numbers."""

from __future__ import annotations

import itertools

import pytest
from one_sentence import refusal

from tf_largebatch import scaling


def test_an_epoch_is_as_many_whole_batches_as_the_data_hold():
    for examples, batch in itertools.product(range(1, 60), range(1, 60)):
        if batch > examples:
            continue
        steps = scaling.steps_per_epoch(examples, batch)
        assert steps >= 1
        assert steps * batch <= examples < (steps + 1) * batch


@pytest.mark.parametrize(
    ("examples", "batch", "steps"),
    [
        (10_000, 1024, 9),
        # ImageNet has 1,281,167 training images: 39 steps of 32,768 and 3,215 images over.
        (1_281_167, 32_768, 39),
        (1_281_167, 1_281_167, 1),
    ],
)
def test_steps_of_an_epoch(examples, batch, steps):
    assert scaling.steps_per_epoch(examples, batch) == steps


@pytest.mark.parametrize(("examples", "batch"), [(0, 1), (9, 10), (10_000, 32_768)])
def test_a_batch_larger_than_the_data_is_refused(examples, batch):
    sentence = refusal(scaling.steps_per_epoch, examples, batch)
    assert f"global_batch_size is {batch}" in sentence and f"{examples} training examples" in sentence


def test_whole_epochs_are_exact():
    for epochs, steps in itertools.product(range(50), range(1, 50)):
        assert scaling.epochs_to_steps(epochs, steps) == sum(steps for _ in range(epochs))


@pytest.mark.parametrize("epochs", [0.0, 0.3125, 0.625, 1.25, 2.5, 4.5, 1 / 3, 7.1])
@pytest.mark.parametrize("steps", [1, 9, 39, 156, 1251])
def test_part_epochs_end_at_the_nearest_step(epochs, steps):
    got = scaling.epochs_to_steps(epochs, steps)
    assert isinstance(got, int)
    assert abs(got - epochs * steps) <= 0.5


@pytest.mark.parametrize(("epochs", "steps", "expected"), [(5, 39, 195), (0.3125, 39, 12), (0.01, 9, 0)])
def test_steps_of_a_warm_up(epochs, steps, expected):
    assert scaling.epochs_to_steps(epochs, steps) == expected
