"""Schedules in closed form: at step 0, at each boundary and its neighbours, and past the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from one_sentence import refusal

from tf_largebatch import Halvings, PolynomialDecay, StepDecay, Warmup, scaling
from tf_largebatch._keras import keras, tf

pytestmark = pytest.mark.smoke


def rates(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_polynomial_decay():
    # 1 + (9 - 1) ((100 - t) / 100)^2
    schedule = PolynomialDecay(9.0, decay_steps=100, end_learning_rate=1.0, power=2.0)
    expected = [9.0, 1 + 8 * 0.99**2, 3.0, 1.5, 1 + 8 * 0.01**2, 1.0, 1.0, 1.0]
    assert rates(schedule, [0, 1, 50, 75, 99, 100, 101, 10_000]) == pytest.approx(expected)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("plus_one", [False, True])
def test_polynomial_decay_equals_kerass_own(power, plus_one):
    ours = PolynomialDecay(2.0, 40, 0.1, power, plus_one)
    theirs = keras.optimizers.schedules.PolynomialDecay(2.0, 40 + plus_one, 0.1, power)
    steps = range(0, 60)
    assert rates(ours, steps) == pytest.approx(rates(theirs, steps), rel=1e-6)


def test_polynomial_decay_with_mlperfs_plus_one():
    # T = 4 + 1: one step more than are made, so at step 4, after the last, 1/5 of the way is left.
    schedule = PolynomialDecay(26.0, decay_steps=4, end_learning_rate=1.0, plus_one=True)
    expected = [1 + 25 * (left / 5) ** 2 for left in (5, 4, 3, 2, 1, 0, 0)]
    assert rates(schedule, [0, 1, 2, 3, 4, 5, 99]) == pytest.approx(expected)


def test_a_run_of_mlperf():
    # At 32,768 its log has 16 epochs of warm-up and 2,267 decay steps, 58 epochs, one of them the +1.
    per_epoch = 1_281_167 / 32_768
    assert int(58 * per_epoch) == 2267
    warmup_steps = int(16 * per_epoch)
    schedule = Warmup(PolynomialDecay(21.2, 2267 - 1, 1e-4, plus_one=True), warmup_steps)
    assert rates(schedule, [0, warmup_steps]) == pytest.approx([0.0, 21.2])
    # The last update, one after it, where a decay without the +1 would end, and its own end.
    expected = [1e-4 + (21.2 - 1e-4) * (left / 2267) ** 2 for left in (2, 1, 0, 0)]
    assert rates(schedule, [warmup_steps + since for since in (2265, 2266, 2267, 5000)]) == pytest.approx(expected)


def test_step_decay():
    schedule = StepDecay(8.0, [3, 6, 7], factor=0.5)
    assert rates(schedule, [0, 2, 3, 4, 5, 6, 7, 8, 1000]) == [8.0, 8.0, 4.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0]


def test_step_decay_equals_kerass_own_whose_boundaries_are_one_less():
    theirs = keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.7, 0.07, 0.007])
    assert rates(StepDecay(0.7, [3, 6]), range(12)) == pytest.approx(rates(theirs, range(12)), rel=1e-6)


def test_goyals_recipe_at_8k():
    # 0.1 x 8192 / 256 = 3.2 after 5 epochs from 0.1; a tenth after each of 30, 60 and 80 epochs.
    per_epoch = scaling.steps_per_epoch(1_281_167, 8192)
    peak = scaling.linear(0.1, 256, 8192)
    decay = StepDecay.from_epochs(peak, (30, 60, 80), per_epoch)
    schedule = Warmup.from_epochs(decay, 5, per_epoch, start=0.1, after_from="start")
    steps = [0, 2.5, 5, 29.99, 30, 59.99, 60, 79.99, 80, 90]
    expected = [0.1, 1.65, 3.2, 3.2, 0.32, 0.32, 0.032, 0.032, 0.0032, 0.0032]
    assert rates(schedule, [round(epoch * per_epoch) for epoch in steps]) == pytest.approx(expected, rel=1e-6)
    assert decay.boundaries == [4680, 9360, 12480]
    assert rates(schedule, [4679, 4680]) == pytest.approx([3.2, 0.32])


def test_the_ptb_recipe_of_zaremba():
    # Rate 1 for 4 epochs, then half of it in each of the other 9: 0.5^max(epoch - 4, 0), epochs from 1.
    schedule = StepDecay.from_epochs(1.0, range(4, 13), steps_per_epoch=10, factor=0.5)
    for epoch in range(1, 14):
        first, last = (epoch - 1) * 10, epoch * 10 - 1
        assert rates(schedule, [first, last]) == [0.5 ** max(epoch - 4, 0)] * 2


def test_halvings_as_mlperf_logs_them():
    # GNMT at 2,048: rate 2e-3, 4 halvings from step 6453, every 809.
    schedule = Halvings(2e-3, 6453, 809, 4)
    for k in range(1, 5):
        step = 6453 + (k - 1) * 809
        assert rates(schedule, [step - 1, step, step + 1]) == pytest.approx(
            [2e-3 / 2 ** (k - 1), 2e-3 / 2**k, 2e-3 / 2**k], rel=1e-6
        )
    assert rates(schedule, [0, 10**6]) == pytest.approx([2e-3, 2e-3 / 16], rel=1e-6)


@pytest.mark.parametrize("total", [12, 120, 3452, 3453, 3454, 6904])
def test_luong234_is_nmts(total):
    # nmt/model.py: constant to int(2 T / 3), then exponential_decay by stairs of int((T - that) / 4) steps.
    start = int(total * 2 / 3)
    interval = int((total - start) / 4)
    schedule = Halvings.luong234(1e-3, total)
    assert [schedule.first_step, schedule.interval_steps, schedule.count] == [start + interval, interval, 4]
    steps = {0, start, total - 1}
    steps |= {start + k * interval + nearby for k in range(5) for nearby in (-1, 0, 1)}
    for step in sorted(steps):
        # Theirs goes on past the fourth, which only a short last part could reach.
        stairs = min(max(step - start, 0) // interval, 4)
        assert float(schedule(step)) == pytest.approx(1e-3 * 0.5**stairs, rel=1e-6), step


def test_luong234_of_a_run_of_a_few_steps():
    assert rates(Halvings.luong234(8.0, 3), range(5)) == [8.0, 8.0, 8.0, 4.0, 2.0]
    assert rates(Halvings.luong234(8.0, 6, count=2), range(8)) == [8.0] * 5 + [4.0, 2.0, 2.0]


def test_warmup_ramps_linearly_to_the_peak_and_hands_over():
    schedule = Warmup(PolynomialDecay(8.0, 100, power=2.0), warmup_steps=20, start=2.0)
    expected = [2.0, 2.3, 5.0, 7.7, 8.0, 8 * 0.99**2]
    assert rates(schedule, [0, 1, 10, 19, 20, 21]) == pytest.approx(expected)
    # From the end of the warm-up the decay counts its own steps.
    assert rates(schedule, [70, 119, 120, 500]) == pytest.approx([2.0, 8 * 0.01**2, 0.0, 0.0])


@pytest.mark.parametrize(
    ("shape", "ramp"),
    [
        ("linear", lambda f: 0.5 + 7.5 * f),
        ("quadratic", lambda f: 0.5 + 7.5 * f**2),
        ("exponential", lambda f: 0.5 * 16**f),
        ("constant", lambda f: 0.5),
    ],
)
@pytest.mark.parametrize("after_from", ["warmup_end", "start"])
def test_shapes_of_the_warm_up(shape, ramp, after_from):
    schedule = Warmup(PolynomialDecay(8.0, 40, power=1.0), 10, 0.5, after_from, shape)
    assert rates(schedule, range(10)) == pytest.approx([ramp(t / 10) for t in range(10)], rel=1e-6)
    first = 8.0 if after_from == "warmup_end" else 6.0
    assert rates(schedule, [10, 11, 30, 60]) == pytest.approx([first, first - 0.2, first - 4.0, 0.0])
    assert rates(schedule, [10**6]) == [0.0]


def test_gnmts_warm_up():
    # Google's: rate x 0.01^((W - t) / W), from a hundredth of the rate.
    schedule = Warmup(2e-3, 200, start=2e-5, shape="exponential")
    expected = [2e-3 * 0.01 ** ((200 - t) / 200) for t in (0, 1, 100, 199)]
    assert rates(schedule, [0, 1, 100, 199]) == pytest.approx(expected, rel=1e-5)
    assert rates(schedule, [200, 201, 10**7]) == pytest.approx([2e-3] * 3)


@pytest.mark.parametrize(("warmup", "total", "left"), [(10, 100, 0.81), (5, 100, 0.9025)])
def test_warmup_whose_decay_counts_from_the_start(warmup, total, left):
    # As both Caffe releases: the rate falls at the end of the warm-up to (1 - w / E)^2 of the peak.
    schedule = Warmup(PolynomialDecay(8.0, total), warmup, after_from="start")
    assert rates(schedule, [0, warmup - 1, warmup]) == pytest.approx([0.0, 8 * (warmup - 1) / warmup, 8 * left])
    assert rates(schedule, [50, total - 1, total, total + 1]) == pytest.approx([2.0, 8 / total**2, 0.0, 0.0])


def test_warmup_by_default_starts_at_zero_and_without_steps_is_what_it_wraps():
    assert rates(Warmup(5.0, 4), [0, 1, 4, 99]) == pytest.approx([0.0, 1.25, 5.0, 5.0])
    assert rates(Warmup(PolynomialDecay(4.0, 2, power=1.0), 0, start=9.0), [0, 1, 2]) == pytest.approx([4.0, 2.0, 0.0])


def test_warmup_in_epochs_and_examples():
    assert Warmup.from_epochs(1.0, 5, steps_per_epoch=39).warmup_steps == 195
    assert Warmup.from_examples(1.0, 409_600, global_batch_size=2048).warmup_steps == 200
    schedule = Warmup.from_epochs(1.0, 0.5, 8, start=0.1, shape="constant", after_from="start")
    assert schedule.get_config() == Warmup(1.0, 4, 0.1, "start", "constant").get_config()


def test_warmup_around_kerass_schedules():
    schedule = Warmup(keras.optimizers.schedules.PiecewiseConstantDecay([3, 6], [1.0, 0.1, 0.01]), 2)
    assert rates(schedule, [0, 1, 2, 5, 6, 9]) == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.1, 0.01])
    # Cosine: end + (peak - end) (1 + cos(pi t / T)) / 2, where Keras has end as a fraction of the peak.
    schedule = Warmup(keras.optimizers.schedules.CosineDecay(8.0, 40, alpha=0.25), 10)
    expected = [2 + 6 * (1 + math.cos(math.pi * t / 40)) / 2 for t in (0, 1, 20, 39, 40, 40)]
    assert rates(schedule, [10, 11, 30, 49, 50, 99]) == pytest.approx(expected, rel=1e-6)


SCHEDULES = [
    PolynomialDecay(9.0, 100, 1.0, 3.0),
    PolynomialDecay(9.0, 100, plus_one=True),
    StepDecay(0.4, [10, 20, 90], 0.3),
    Halvings(2e-3, 60, 11, 3),
    Halvings.luong234(1.0, 90),
    Warmup(PolynomialDecay(9.0, 100), 20, start=1.0, after_from="start"),
    Warmup(StepDecay(0.4, [30, 60]), 20, start=0.01, shape="exponential"),
    Warmup(Halvings(1.0, 50, 10), 20, start=0.25, shape="constant"),
    Warmup(0.5, 3, shape="quadratic"),
    Warmup(Warmup(0.5, 3), 3, start=0.1),
    Warmup(keras.optimizers.schedules.CosineDecay(1.0, 50), 5),
]


def name_of(schedule):
    return "-".join(str(value) for value in schedule.get_config().values() if not isinstance(value, dict))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_serialisation(schedule):
    copy = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(copy) is type(schedule)
    assert copy.get_config() == schedule.get_config()
    assert rates(copy, range(0, 130, 7)) == rates(schedule, range(0, 130, 7))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_rates_are_float32_the_same_in_a_graph_and_for_many_steps_at_once(schedule):
    steps = np.arange(0, 130, 3)
    one_by_one = rates(schedule, steps)
    many = schedule(tf.constant(steps, tf.int64))
    assert many.dtype == tf.float32
    np.testing.assert_allclose(many, one_by_one, rtol=1e-6, atol=1e-9)
    compiled = tf.function(schedule.__call__, jit_compile=True)
    counter = tf.Variable(0, dtype=tf.int64)
    for step, rate in list(zip(steps, one_by_one))[::7]:
        counter.assign(step)
        assert float(compiled(counter.read_value())) == pytest.approx(rate, rel=1e-5, abs=1e-6)


def test_numbers_of_numpy_are_saved_as_pythons():
    schedule = Warmup(np.float32(0.5), np.int64(3), start=np.float64(0.25))
    assert [type(value) for value in schedule.get_config().values()] == [float, int, float, str, str]
    config = StepDecay(np.float64(1.0), np.array([2, 3]).tolist()).get_config()
    assert config == {"initial_learning_rate": 1.0, "boundaries": [2, 3], "factor": 0.1}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PolynomialDecay(1.0, 0), "PolynomialDecay: decay_steps is 0, but must be greater than 0."),
        (lambda: PolynomialDecay(1.0, 10, power=0.0), "PolynomialDecay: power is 0.0, but must be greater than 0."),
        (lambda: PolynomialDecay(-1.0, 10), "initial_learning_rate is -1.0, but must be at least 0."),
        (lambda: PolynomialDecay(float("nan"), 10), "initial_learning_rate is nan, but must be a finite number."),
        (lambda: PolynomialDecay(1.0, 2.5), "decay_steps is 2.5, but must be a whole number."),
        (lambda: StepDecay(1.0, []), "StepDecay: boundaries is [], but must be a list of 1 or more."),
        (lambda: StepDecay(1.0, [0, 2]), "StepDecay: boundaries.0 is 0, but must be greater than 0."),
        (lambda: StepDecay(1.0, [4, 4]), "StepDecay: boundaries is [4, 4], but must increase."),
        (lambda: StepDecay(1.0, [4], factor=1.0), "StepDecay: factor is 1.0, but must be less than 1."),
        (lambda: Halvings(1.0, -1, 2), "Halvings: first_step is -1, but must be at least 0."),
        (lambda: Halvings(1.0, 1, 0), "Halvings: interval_steps is 0, but must be greater than 0."),
        (lambda: Halvings(1.0, 1, 2, 0), "Halvings: count is 0, but must be greater than 0."),
        (lambda: Halvings.luong234(1.0, 0), "Halvings: total_steps is 0, but must be greater than 0."),
        (lambda: Warmup(1.0, -1), "Warmup: warmup_steps is -1, but must be at least 0."),
        (lambda: Warmup(1.0, 5, start=-0.1), "Warmup: start is -0.1, but must be at least 0."),
        (lambda: Warmup("fast", 5), "Warmup: after is 'fast', but must be a number."),
        (lambda: Warmup(1.0, 5, after_from="begin"), "Warmup: after_from is 'begin'"),
        (lambda: Warmup(1.0, 5, shape="quadratc"), "Warmup: shape is 'quadratc' (did you mean 'quadratic'?), but"),
        (lambda: Warmup(1.0, 5, shape="exponential"), "start is 0.0, but must be greater than 0 with shape 'expon"),
        (lambda: Warmup(1.0, 5, shape="constant"), "start is 0.0, but must be greater than 0 with shape 'constant'."),
    ],
)
def test_bad_values(make, said):
    assert said in refusal(make)
