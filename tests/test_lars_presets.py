"""Each published LARS against a twin written from its source, and what `explain` says of it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from lars_twin import ModelGardenPopular, published
from test_lars import SHAPES, problem
from updates import apply_all, make_variable, relative_difference

from tf_largebatch import LARS, InputError, PolynomialDecay, Warmup
from tf_largebatch.optimizers.lars_presets import PRESETS

STEPS = 100
# Publications that skip biases and batch norm, and those that skip nothing.
SKIP = [len(shape) <= 1 or name == "attention/bias" for name, shape in SHAPES.items()]
SKIPPING = {"contrib", "tpu", "mlperf", "model_garden", "nus"}


def schedule(name):
    # Of the right size for each: LARC's rate is a bound, and the others are adapted by 0.001.
    peak = {"larc": 0.1, "nus": 2.0, "contrib": 2.0}.get(name, 6.0)
    return Warmup(PolynomialDecay(peak, STEPS - 20), warmup_steps=20, start=0.1 * peak)


def flags(name):
    """(adapted, decayed) of each variable as the publication has it."""
    if name in SKIPPING:
        return [not skip for skip in SKIP], [not skip for skip in SKIP]
    if name == "timm":
        # Its parameter groups leave biases and scales without decay.
        return [True] * len(SHAPES), [not skip for skip in SKIP]
    return [True] * len(SHAPES), [True] * len(SHAPES)


@pytest.mark.parametrize("beta", [0.0, 1e-2])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_equals_its_twin(name, beta):
    variables, values, gradients = problem(np.float32, steps=STEPS)
    result = apply_all(LARS.preset(name, schedule(name), weight_decay=beta), variables, gradients)
    rates = [float(schedule(name)(step)) for step in range(STEPS)]
    adapted, decayed = flags(name)
    expected = published(name, beta=beta).run(values, gradients, rates, adapted, decayed)
    for variable, ours, theirs in zip(SHAPES, result, expected):
        assert relative_difference(ours, theirs) < 1e-5, variable


@pytest.mark.parametrize("nesterov", [False, True])
def test_popular_momentum_of_the_model_garden(nesterov):
    variables, values, gradients = problem(np.float32, steps=STEPS)
    options = {"momentum_order": "post_trust", "norm_rule": "vector", "zero_norm": "one", "nesterov": nesterov}
    result = apply_all(LARS(schedule("tpu"), weight_decay=1e-2, **options), variables, gradients)
    rates = [float(schedule("tpu")(step)) for step in range(STEPS)]
    adapted, decayed = flags("tpu")
    expected = ModelGardenPopular(beta=1e-2, nesterov=nesterov).run(values, gradients, rates, adapted, decayed)
    for variable, ours, theirs in zip(SHAPES, result, expected):
        assert relative_difference(ours, theirs) < 1e-5, variable


@pytest.mark.parametrize("name", ["contrib", "model_garden", "timm", "tpu"])
def test_nesterov(name):
    variables, values, gradients = problem(np.float32, steps=STEPS)
    result = apply_all(LARS.preset(name, schedule(name), weight_decay=1e-2, nesterov=True), variables, gradients)
    rates = [float(schedule(name)(step)) for step in range(STEPS)]
    adapted, decayed = flags(name)
    expected = published(name, beta=1e-2, nesterov=True).run(values, gradients, rates, adapted, decayed)
    for variable, ours, theirs in zip(SHAPES, result, expected):
        assert relative_difference(ours, theirs) < 1e-5, variable


def test_classic_and_torch_momentum_agree_while_the_rate_is_constant():
    results = []
    for order in ("classic", "torch"):
        variables, _, gradients = problem(np.float64, steps=30)
        results.append(apply_all(LARS(3.0, weight_decay=1e-2, momentum_order=order), variables, gradients))
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_tenfold_drop_overshoots_with_classic_momentum_alone():
    # Before the drop v = gamma m / (1 - mu); right after it, classic gives mu v + gamma m / 10, which
    # is 9.1 times the new steady step, and torch's order exactly that step. (m: lambda d, constant.)
    steps = {}
    for order in ("classic", "torch"):
        variable = make_variable(np.ones((2, 2)), "dense/bias")
        rate = tf.Variable(1e-6, dtype=tf.float64)
        optimizer = LARS(1e-6, momentum=0.9, momentum_order=order, exclude_from_layer_adaptation=[""])
        optimizer.build([variable])
        for step in range(301):
            if step == 300:
                optimizer.learning_rate = 1e-7
                before = np.asarray(variable).copy()
            optimizer.apply_gradients([(tf.ones((2, 2), tf.float64), variable)])
        steps[order] = (before - np.asarray(variable))[0, 0] / (1e-7 / (1 - 0.9))
        del rate
    assert steps["classic"] == pytest.approx(9.1, rel=1e-3)
    assert steps["torch"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("rule", "step"), [("coefficient", 0.002 * 3), ("one", 3.0), ("zero", 0.0), ("plain", 3.0)])
def test_zero_norm_rules(rule, step):
    variable = make_variable(np.zeros((2, 2), np.float32), "dense/kernel")
    optimizer = LARS(3.0, trust_coefficient=0.002, momentum=0.0, weight_decay=0.1, zero_norm=rule)
    optimizer.build([variable])
    optimizer.apply_gradients([(tf.ones((2, 2)), variable)])
    np.testing.assert_allclose(np.asarray(variable), -step * np.ones((2, 2)), rtol=1e-6)


def test_zero_gradient_under_plain_is_not_decayed():
    variable = make_variable(np.ones((2, 2), np.float32), "dense/kernel")
    optimizer = LARS(3.0, weight_decay=0.1, zero_norm="plain")
    optimizer.build([variable])
    optimizer.apply_gradients([(tf.zeros((2, 2)), variable)])
    np.testing.assert_array_equal(np.asarray(variable), np.ones((2, 2)))


@pytest.mark.parametrize(("bounds", "ratio"), [({"trust_min": 5.0}, 5.0), ({"trust_max": 0.25}, 0.25), ({}, 2.0)])
def test_trust_bounds(bounds, ratio):
    # |w| = 2, |g| = 1, eta = 1: lambda = 2.
    variable = make_variable(np.ones((2, 2), np.float32), "dense/kernel")
    optimizer = LARS(0.1, trust_coefficient=1.0, momentum=0.0, **bounds)
    optimizer.build([variable])
    optimizer.apply_gradients([(tf.fill((2, 2), 0.5), variable)])
    np.testing.assert_allclose(np.asarray(variable), 1 - 0.1 * ratio * 0.5, rtol=1e-6)
    assert optimizer.trust_ratios() == pytest.approx([ratio])


@pytest.mark.parametrize("mode", ["sgd", "error"])
def test_sparse_rules(mode):
    w = np.ones((4, 2), np.float32)
    variable = make_variable(w, "embedding/embeddings")
    optimizer = LARS(0.5, weight_decay=0.1, sparse=mode)
    optimizer.build([variable])
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([1, 1]), tf.constant([4, 2]))
    if mode == "error":
        with pytest.raises(InputError, match="sparse gradient"):
            optimizer.apply_gradients([(rows, variable)])
        return
    optimizer.apply_gradients([(rows, variable)])
    # Row 1 takes the sum of both at the plain rate; no decay, nothing elsewhere.
    w[1] -= 0.5 * np.array([4.0, 6.0])
    np.testing.assert_allclose(np.asarray(variable), w, rtol=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (4097,), (3, 1400)])
def test_norm_in_slices_is_the_norm(shape):
    from tf_largebatch.optimizers.trust_ratio import norm

    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    exact = np.linalg.norm(x.astype(np.float64))
    for for_xla in (False, True):
        for compiled in (False, True):
            value = tf.function(lambda for_xla=for_xla: norm(tf.constant(x), for_xla), jit_compile=compiled)()
            assert float(value) == pytest.approx(exact, rel=1e-6)


def test_under_xla_it_is_the_same():
    results = []
    for compiled in (False, True):
        variables, _, gradients = problem(np.float64, steps=10)
        optimizer = LARS(3.0, weight_decay=1e-2, jit_compile=compiled)
        results.append(apply_all(optimizer, variables, gradients, jit_compile=compiled))
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_explanation(name):
    optimizer = LARS.preset(name, 0.5, weight_decay=1e-4)
    assert "Not built yet" in optimizer.explain()
    variables, values, gradients = problem(np.float32, steps=1)
    apply_all(optimizer, variables, gradients)
    text = optimizer.explain()
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    adapted, decayed = flags(name)
    twin = published(name, beta=1e-4)
    for index, path in enumerate(SHAPES):
        row = lines[path].split()
        assert row[2:4] == ["yes" if adapted[index] and (name != "timm" or decayed[index]) else "no"] + [
            "yes" if decayed[index] else "no"
        ]
        assert float(row[5]) == pytest.approx(0.5 * float(row[4]), rel=1e-2)
    # One ratio in closed form.
    w, g = (np.asarray(x[4], np.float64) for x in (values, gradients[0]))
    beta = 0.0 if name == "nvcaffe" else 1e-4
    ratio = twin.eta * np.linalg.norm(w) / (np.linalg.norm(g) + beta * np.linalg.norm(w) + twin.epsilon)
    if name == "larc":
        ratio = min(ratio / 0.5, 1.0)
    assert float(lines["conv1d/kernel"].split()[4]) == pytest.approx(ratio, rel=1e-2)


def test_explanation_of_the_default_is_the_papers_equation():
    lines = LARS(2.0, weight_decay=5e-4).explain().splitlines()
    assert [line.strip() for line in lines[1:5]] == [
        "d      = g + 0.0005 w",
        "lambda = 0.001 |w| / (|g| + 0.0005 |w|); 0.001 where a norm is 0",
        "v      = 0.9 v + gamma lambda d",
        "w      = w - v",
    ]


@pytest.mark.parametrize("rule", ["variables", "function"])
def test_exclusions_by_variable_and_by_function_are_saved_as_patterns(rule):
    variables, _, _ = problem()
    chosen = {"variables": [variables[2]], "function": lambda variable: variable is variables[2]}[rule]
    optimizer = LARS(exclude_from_layer_adaptation=chosen)
    if rule == "function":
        with pytest.raises(InputError, match="only after the optimizer was built"):
            optimizer.get_config()
    optimizer.build(variables)
    assert optimizer._adapted == tuple(index != 2 for index in range(len(SHAPES)))
    copy = LARS.from_config(optimizer.get_config())
    copy.build(problem()[0])
    assert copy._adapted == optimizer._adapted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum_order": "clasic"}, "momentum_order is 'clasic' \\(did you mean 'classic'\\?\\)"),
        ({"norm_rule": "sums"}, "norm_rule is 'sums'"),
        ({"zero_norm": None}, "zero_norm is None"),
        ({"clip": "lars"}, "clip is 'lars'"),
        ({"trust_min": 2.0, "trust_max": 1.0}, "trust_min is 2.0 and trust_max 1.0"),
        ({"sparse": "dense"}, "sparse is 'dense'"),
        ({"gradient_clip": 0.0}, "gradient_clip is 0.0"),
        ({"momentum_order": "post_trust"}, "norm_rule='vector'"),
        ({"momentum_order": "torch", "momentum_correction": True}, "momentum_correction is for"),
        ({"exclude_from_weight_decay": 3}, "exclude_from_weight_decay is 3"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        LARS(**options)


def test_unknown_preset():
    with pytest.raises(InputError, match="unknown preset 'mlpref' \\(did you mean 'mlperf'\\?\\)"):
        LARS.preset("mlpref", 1.0)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_round_trip(name):
    optimizer = LARS.preset(name, 2.0, weight_decay=1e-4, momentum=0.8)
    config = optimizer.get_config()
    assert LARS.from_config(config).get_config() == config
    for argument, value in PRESETS[name].items():
        assert config[argument] == value
