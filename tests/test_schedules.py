"""Schedules in closed form: at step 0, inside, at the boundaries and past the end."""

from __future__ import annotations

import pytest

from tf_largebatch import InputError, PolynomialDecay, Warmup
from tf_largebatch._keras import keras

pytestmark = pytest.mark.smoke


def rates(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_polynomial_decay():
    # 1 + (9 - 1) (1 - t / 100)^2
    schedule = PolynomialDecay(9.0, decay_steps=100, end_learning_rate=1.0, power=2.0)
    assert rates(schedule, [0, 50, 75, 100, 101, 10_000]) == pytest.approx([9.0, 3.0, 1.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_polynomial_decay_equals_kerass_own(power):
    ours = PolynomialDecay(2.0, 40, 0.1, power)
    theirs = keras.optimizers.schedules.PolynomialDecay(2.0, 40, 0.1, power)
    steps = range(0, 60, 3)
    assert rates(ours, steps) == pytest.approx(rates(theirs, steps), rel=1e-6)


def test_warmup_ramps_linearly_to_the_peak_and_hands_over():
    schedule = Warmup(PolynomialDecay(8.0, 100, power=2.0), warmup_steps=20, start=2.0)
    assert rates(schedule, [0, 10, 19, 20]) == pytest.approx([2.0, 5.0, 7.7, 8.0])
    # From the end of the warm-up the decay counts its own steps.
    assert rates(schedule, [70, 120, 500]) == pytest.approx([2.0, 0.0, 0.0])


def test_warmup_whose_decay_counts_from_the_start():
    # As both Caffe releases: at step 20 of 100 the rate falls from the peak to 8 x 0.8^2.
    schedule = Warmup(PolynomialDecay(8.0, 100), warmup_steps=20, after_from="start")
    assert rates(schedule, [0, 10, 20, 50, 100]) == pytest.approx([0.0, 4.0, 8 * 0.64, 2.0, 0.0])


def test_warmup_by_default_starts_at_zero_and_without_steps_is_what_it_wraps():
    assert rates(Warmup(5.0, 4), [0, 1, 4, 99]) == pytest.approx([0.0, 1.25, 5.0, 5.0])
    assert rates(Warmup(PolynomialDecay(4.0, 2, power=1.0), 0, start=9.0), [0, 1, 2]) == pytest.approx([4.0, 2.0, 0.0])


def test_warmup_around_a_keras_schedule():
    schedule = Warmup(keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [1.0, 0.1, 0.01]), 2)
    assert rates(schedule, [0, 1, 2, 5, 6, 9]) == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.1, 0.01])


@pytest.mark.parametrize(
    "schedule",
    [
        PolynomialDecay(9.0, 100, 1.0, 3.0),
        Warmup(PolynomialDecay(9.0, 100), 20, start=1.0, after_from="start"),
        Warmup(0.5, 3),
        Warmup(keras.optimizers.schedules.CosineDecay(1.0, 50), 5),
    ],
)
def test_serialisation(schedule):
    copy = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(copy) is type(schedule)
    assert copy.get_config() == schedule.get_config()
    assert rates(copy, range(0, 130, 7)) == rates(schedule, range(0, 130, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolynomialDecay(1.0, 0), "decay_steps is 0"),
        (lambda: PolynomialDecay(1.0, 10, power=0.0), "power 0.0"),
        (lambda: Warmup(1.0, -1), "warmup_steps is -1"),
        (lambda: Warmup(1.0, 5, after_from="peak"), "after_from is 'peak'"),
    ],
)
def test_bad_values(make, message):
    with pytest.raises(InputError, match=message):
        make()
