"""LARS against its NumPy twin, and the faults that other implementations have had."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from lars_twin import LarsTwin
from updates import apply_all, make_variable, one_step, relative_difference

from tf_largebatch import LARS, InputError, PolynomialDecay, Warmup
from tf_largebatch._keras import KERAS_3, keras

pytestmark = pytest.mark.smoke

# Every rank, two zero tensors, and names that the default exclusion rules must tell apart.
SHAPES = {
    "scalar/scale": (),
    "dense/bias": (7,),
    "dense/kernel": (5, 7),
    "attention/bias": (4, 3),
    "conv1d/kernel": (3, 4, 6),
    "conv2d/kernel": (3, 3, 2, 5),
    "conv3d/kernel": (2, 2, 2, 3, 2),
    "zero/kernel": (4, 4),
}
ADAPTED = [False, False, True, False, True, True, True, True]


def problem(dtype=np.float32, steps=50, seed=0):
    """Variables, gradients for each step, and a changing rate."""
    draw = np.random.default_rng(seed)
    values = [np.zeros(shape) if name.startswith("zero") else draw.normal(size=shape) for name, shape in SHAPES.items()]
    # Far from zero: a difference relative to a number that passes zero would say nothing.
    values[0] = values[0] + 100.0
    values = [np.asarray(value, dtype) for value in values]
    gradients = [[np.asarray(draw.normal(size=shape), dtype) for shape in SHAPES.values()] for _ in range(steps)]
    # A variable without gradient for a while: the norm is zero, the decay is not.
    for step in range(5, min(10, steps)):
        gradients[step][2] = np.zeros(SHAPES["dense/kernel"], dtype)
    variables = [make_variable(value, name) for name, value in zip(SHAPES, values)]
    return variables, values, gradients


SCHEDULE_STEPS = 50


def schedule():
    return Warmup(PolynomialDecay(12.0, SCHEDULE_STEPS - 10), warmup_steps=10, start=1.0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("beta", [0.0, 5e-3])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float64, 1e-6)])
def test_equals_twin(dtype, bound, beta, epsilon, nesterov):
    # The float64 bound is that of the schedule, which Keras computes in float32.
    variables, values, gradients = problem(dtype)
    options = {"weight_decay": beta, "epsilon": epsilon, "nesterov": nesterov, "excluded_lr_multiplier": 0.02}
    result = apply_all(LARS(schedule(), **options), variables, gradients)
    rates = [float(schedule()(step)) for step in range(SCHEDULE_STEPS)]
    twin = LarsTwin(beta=beta, epsilon=epsilon, nesterov=nesterov, excluded=0.02)
    expected = twin.run(values, gradients, rates, adapted=ADAPTED, decayed=ADAPTED)
    for name, ours, theirs in zip(SHAPES, result, expected):
        assert relative_difference(ours, theirs) < bound, name


def test_equals_twin_under_mixed_bfloat16():
    # Variables are float32 under the policy; gradients reach the optimizer in float32 too.
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(3, name="dense")
        layer.build((None, 4))
        values = [np.array(weight) for weight in layer.get_weights()]
        x = tf.random.stateless_normal((8, 4), seed=(1, 2))
        # The bias is not adapted: at the full rate it would diverge, and no rounding be small.
        optimizer = LARS(5.0, weight_decay=1e-3, excluded_lr_multiplier=0.01)
        optimizer.build(layer.trainable_variables)
        gradients_by_step = []
        for _ in range(50):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(layer(x), tf.float32)))
            gradients = tape.gradient(loss, layer.trainable_variables)
            assert all(g.dtype == tf.float32 for g in gradients)
            gradients_by_step.append([g.numpy() for g in gradients])
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
        flags = [True, False]
        expected = LarsTwin(beta=1e-3, excluded=0.01).run(
            values, gradients_by_step, [5.0] * 50, adapted=flags, decayed=flags
        )
        for ours, theirs in zip(layer.get_weights(), expected):
            assert relative_difference(ours, theirs) < 1e-5
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_sixteen_bit_norms_neither_overflow_nor_vanish():
    # |w| = 0.5 sqrt(2^18) = 256: the sum of squares, 2^16, is beyond float16's largest number.
    shape = (512, 512)
    for value, gradient in ((0.5, 0.25), (1e-4, 1e-4)):
        w = np.full(shape, value, np.float16)
        g = np.full(shape, gradient, np.float16)
        result = one_step(LARS(100.0, momentum=0.0), w, tf.constant(g))
        # lambda |g| = eta |w|, so every element shrinks by gamma eta = a tenth.
        np.testing.assert_allclose(result.astype(np.float64), 0.9 * w.astype(np.float64), rtol=2e-3)


def test_without_weight_decay_it_still_adapts():
    # Several implementations turn into plain SGD where the decay is zero.
    w, g = np.full((2, 2), 1.0, np.float32), np.full((2, 2), 1e3, np.float32)
    result = one_step(LARS(1.0, trust_coefficient=0.1, weight_decay=0.0), w, tf.constant(g))
    np.testing.assert_allclose(result, 0.9 * w, rtol=1e-6)


def test_zero_kernel_takes_no_giant_step():
    w, g = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    result = one_step(LARS(30.0, trust_coefficient=0.001), w, tf.constant(g))
    np.testing.assert_allclose(result, -0.03 * g, rtol=1e-6)


def test_scale_of_the_gradient_cancels():
    w = np.array([[1.0, -2.0]], np.float32)
    g = np.array([[0.3, 0.1]], np.float32)
    small, large = (one_step(LARS(1.0), w, tf.constant(scale * g)) for scale in (1.0, 4096.0))
    np.testing.assert_array_equal(small, large)


def test_scale_of_the_gradient_changes_nothing_but_the_balance_with_decay():
    # lambda (c g + beta w) = eta |w| (c g + beta w) / (c |g| + beta |w|): c and beta count as beta / c.
    w = np.array([[1.0, -2.0], [0.5, 3.0]])
    g = np.array([[0.3, 0.1], [-0.2, 0.4]])
    scaled = one_step(LARS(1.0, weight_decay=0.08), w, tf.constant(4.0 * g))
    balanced = one_step(LARS(1.0, weight_decay=0.02), w, tf.constant(g))
    np.testing.assert_allclose(scaled, balanced, rtol=1e-12)
    assert not np.allclose(scaled, one_step(LARS(1.0, weight_decay=0.08), w, tf.constant(g)), rtol=1e-8)


def test_repeated_rows_of_a_sparse_gradient_are_summed_before_the_norm():
    w = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    rows = np.array([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [5.0, 0.0, 1.0]], np.float32)
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([2, 2, 0]), tf.constant([4, 3]))
    dense = np.zeros_like(w)
    np.add.at(dense, [2, 2, 0], rows)
    options = {"weight_decay": 0.01}
    np.testing.assert_allclose(
        one_step(LARS(2.0, **options), w, sparse, "embedding/embeddings"),
        one_step(LARS(2.0, **options), w, tf.constant(dense), "embedding/embeddings"),
        rtol=1e-6,
    )


def test_decay_is_not_applied_a_second_time_by_the_base_class():
    # With a zero gradient and zero momentum, one step is w - gamma eta beta w (zero-norm rule).
    w = np.ones((2, 2), np.float32)
    result = one_step(LARS(1.0, trust_coefficient=0.5, weight_decay=0.1, momentum=0.0), w, tf.zeros((2, 2)))
    np.testing.assert_allclose(result, w - 0.5 * 0.1, rtol=1e-6)


def test_without_adaptation_it_is_keras_sgd():
    variables, values, gradients = problem(steps=20)
    ours = apply_all(LARS(0.1, exclude_from_layer_adaptation=[""], nesterov=True), variables, gradients)
    twins = [make_variable(value, name) for name, value in zip(SHAPES, values)]
    theirs = apply_all(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), twins, gradients)
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("patterns", "adapted"),
    [
        (None, ADAPTED),
        ([], [True] * 8),
        (["conv[12]d"], [True, True, True, True, False, False, True, True]),
        (["^dense/", "zero"], [True, False, False, True, True, True, True, False]),
    ],
)
def test_exclusions(patterns, adapted):
    variables, _, _ = problem()
    optimizer = LARS(weight_decay=0.1, exclude_from_layer_adaptation=patterns, exclude_from_weight_decay=["kernel"])
    optimizer.build(variables)
    assert list(optimizer._adapted) == adapted
    # The two rules are independent.
    assert [decay > 0 for decay in optimizer._decays] == ["kernel" not in name for name in SHAPES]


def test_default_exclusions_in_a_keras_model():
    model = keras.Sequential(
        [
            keras.Input((8, 6)),
            keras.layers.Conv1D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.LayerNormalization(axis=[1, 2]),
            keras.layers.GRU(3),
            keras.layers.Dense(2),
        ]
    )
    optimizer = LARS()
    optimizer.build(model.trainable_variables)
    adapted = [
        v.name.rpartition("/")[2].partition(":")[0]
        for v, flag in zip(model.trainable_variables, optimizer._adapted)
        if flag
    ]
    # The GRU's bias and the layer normalisation's scales have two axes.
    assert adapted == ["kernel", "kernel", "recurrent_kernel", "kernel"]


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name():
    variables, _, _ = problem()
    with pytest.raises(
        InputError, match=r"exclude_from_weight_decay: 'kernl' matches no variable \(did you mean 'kernel'"
    ):
        LARS(exclude_from_weight_decay=["bias", "kernl"]).build(variables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "LARS: momentum is 1.0, but must be less than 1"),
        ({"trust_coefficient": 0.0}, "trust_coefficient is 0.0, but must be greater than 0"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"excluded_lr_multiplier": float("inf")}, "excluded_lr_multiplier is inf"),
        ({"exclude_from_weight_decay": "bias"}, "exclude_from_weight_decay is 'bias', but must be None, a list"),
        ({"exclude_from_layer_adaptation": ["("]}, r"'\(' is not a regular expression"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(InputError, match=message):
        LARS(**options)


def test_keras_method_for_exclusions_is_refused():
    # It would be silently ignored: it acts on the base class's own decay.
    with pytest.raises(InputError, match="constructor"):
        LARS(weight_decay=1e-4).exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.parametrize("option", [{"clipnorm": 0.5}, {"clipvalue": 0.1}, {"global_clipnorm": 0.5}])
def test_clipping_of_the_base_class_works(option):
    w, g = np.array([[3.0, 4.0]], np.float32), np.array([[0.3, 40.0]], np.float32)
    clipped = {"clipnorm": g * 0.5 / np.linalg.norm(g), "clipvalue": np.minimum(g, 0.1)}
    clipped["global_clipnorm"] = clipped["clipnorm"]
    result = one_step(LARS(1.0, epsilon=1.0, **option), w, tf.constant(g))
    # An epsilon makes the step depend on the gradient's size.
    g = clipped[next(iter(option))]
    np.testing.assert_allclose(result, w - 0.001 * 5 / (np.linalg.norm(g) + 1.0) * g, rtol=1e-5)


def test_ema_of_the_base_class_works():
    # Each step halves the weight: 1, 0.5, 0.25.
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.5, use_ema=True, ema_momentum=0.5)
    variable = make_variable(np.ones((2, 2), np.float32), "dense/kernel")
    optimizer.build([variable])
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones((2, 2)), variable)])
    np.testing.assert_allclose(np.asarray(variable), 0.25)
    optimizer.finalize_variable_values([variable])
    # The average begins at the weight after the first step on Keras 3, before it on Keras 2.
    expected = (0.5 + 0.25) / 2 if KERAS_3 else ((1 + 0.5) / 2 + 0.25) / 2
    np.testing.assert_allclose(np.asarray(variable), expected)


@pytest.mark.skipif(not KERAS_3, reason="a Keras 2 variable does not know its regularizer")
def test_a_regularizer_beside_the_weight_decay_is_warned_of_once():
    from unittest import mock

    from absl import logging

    def compiled(weight_decay):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_regularizer="l2", name="dense")])
        model.compile(LARS(0.1, weight_decay=weight_decay), "mse")
        return model

    with mock.patch.object(logging, "warning") as warning:
        compiled(0.0).fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        assert warning.call_count == 0
        model = compiled(1e-4)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=2, verbose=0)
    assert warning.call_count == 1
    assert "dense/kernel" in warning.call_args.args[0] % warning.call_args.args[1:]
