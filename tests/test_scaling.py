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


def test_the_nearest_step_of_examples():
    assert scaling.examples_to_steps(102_400, 1024) == 100
    assert scaling.examples_to_steps(102_400 + 511, 1024) == 100
    assert scaling.examples_to_steps(102_400 + 513, 1024) == 101
    assert scaling.examples_to_steps(0, 7) == 0


def test_linear_scaling_is_goyals():
    # 0.1 x B / 256 (arXiv 1706.02677, table of batches 128 to 64K).
    got = [scaling.linear(0.1, 256, 2**power) for power in range(7, 17)]
    assert got == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6])


def test_square_root_scaling_is_lambs_table():
    # LAMB on ResNet-50 (arXiv 1904.00962): 4 / (100 x 2^(3, 2.5, ... 0)) for 512 to 32K.
    published = [4 / (100 * 2 ** (3 - half / 2)) for half in range(7)]
    assert [scaling.square_root(0.04, 32_768, 2**power) for power in range(9, 16)] == pytest.approx(published)


@pytest.mark.parametrize("base", [1024, 8192, 32_768])
def test_legw_is_the_published_table_of_resnet_50(base):
    # Table 3 of arXiv 1901.08256, 1K to 32K: rates 2^2.5 ... 2^5, warm-up 0.3125 ... 10 epochs; from any row.
    table = {1024 * 2**row: (2 ** (2.5 + row / 2), 0.3125 * 2**row) for row in range(6)}
    assert table[32_768] == (32.0, 10.0)
    for batch, (rate, epochs) in table.items():
        assert scaling.legw(*table[base], base, batch) == pytest.approx((rate, epochs))
    rounded = [(5.66, 0.3125), (8, 0.625), (11.31, 1.25), (16, 2.5), (22.6, 5), (32, 10)]
    for (rate, epochs), row in zip(table.values(), rounded):
        assert (rate, epochs) == pytest.approx(row, rel=2e-3)


def test_legw_is_the_published_table_of_gnmt():
    # 200 warm-up steps at every batch, of 3,534,981 examples an epoch; 1e-3 at 512.
    examples = 3_534_981
    published = {
        256: ("7.07e-04", "0.0145"),
        512: ("1.00e-03", "0.0290"),
        1024: ("1.41e-03", "0.0579"),
        2048: ("2.00e-03", "0.1159"),
        4096: ("2.83e-03", "0.2317"),
    }
    for batch, row in published.items():
        got = scaling.legw(1e-3, 200 * 512 / examples, 512, batch)
        assert (f"{got.learning_rate:.2e}", f"{got.warmup_epochs:.4f}") == row
        assert scaling.epochs_to_steps(got.warmup_epochs, examples / batch) == 200


def test_from_256_to_8192():
    scaled = scaling.scale_up(0.1, 256, 8192)
    sgd, lars = scaled.sgd, scaled.lars
    assert sgd.learning_rate == pytest.approx(3.2)
    assert (sgd.warmup_epochs, sgd.warmup_start_rate, sgd.trust_coefficient) == (5.0, 0.1, None)
    assert (lars.learning_rate, lars.warmup_epochs, lars.warmup_start_rate) == pytest.approx((16.0, 2.5, 0.0))
    assert lars.trust_coefficient == 0.001
    text = str(scaled)
    assert "global batch 8,192" in text and "SGD: rate 3.2 after 5 epochs of linear warm-up from 0.1" in text
    assert "LARS: rate 16 after 2.5 epochs of linear warm-up from 0, trust coefficient 0.001" in text
    for what in (sgd.basis, lars.basis, *scaled.tune):
        assert what in text and what.endswith(".")


def test_the_steps_of_legws_warm_up_are_the_same_at_any_batch():
    assert "391 steps" in " ".join(scaling.scale_up(0.1, 256, 8192).tune)
    for batch in (1024, 8192, 32_768):
        epochs = scaling.scale_up(0.1, 256, batch).lars.warmup_epochs
        assert scaling.epochs_to_steps(epochs, 1_281_167 / batch) == 391


@pytest.mark.parametrize(
    ("batch", "sgd", "lars"),
    [
        (512, "kept the accuracy up to 8,192", "continued below its first row"),
        (1024, "kept the accuracy up to 8,192", "Published for that task"),
        (8192, "kept the accuracy up to 8,192", "Published for that task"),
        (8193, "beyond its range", "Published for that task"),
        (32_768, "beyond its range", "Published for that task"),
        (65_536, "beyond its range", "nothing confirms it"),
    ],
)
def test_what_is_no_published_rule_is_said_to_be_none(batch, sgd, lars):
    scaled = scaling.scale_up(0.1, 256, batch)
    assert sgd in scaled.sgd.basis and lars in scaled.lars.basis


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 256, 8192), "base_learning_rate is 0, but must be greater than 0."),
        ((0.1, 0, 8192), "base_global_batch_size is 0, but must be greater than 0."),
        ((0.1, 256, 8192.5), "global_batch_size is 8192.5, but must be a whole number."),
        ((0.1, 256, 128), "global_batch_size is 128, but must be at least base_global_batch_size (256)."),
        ((float("inf"), 256, 8192), "base_learning_rate is inf, but must be a finite number."),
    ],
)
def test_bad_values_are_refused(arguments, said):
    assert refusal(scaling.scale_up, *arguments) == said


def test_a_negative_warm_up_is_refused():
    assert refusal(scaling.legw, 1.0, -1, 256, 512) == "base_warmup_epochs is -1, but must be at least 0."
