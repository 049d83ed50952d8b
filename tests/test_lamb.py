"""LAMB against its NumPy twin, tensorflow-addons' LAMB, and the faults that others have had."""

from __future__ import annotations

import numpy as np
import pytest
from lamb_twin import LambTwin
from updates import apply_all, make_variable, one_step

from tf_largebatch import LAMB, InputError
from tf_largebatch._keras import KERAS_3, keras, tf

pytestmark = pytest.mark.smoke

# Two kernels whose norm or whose step begins at zero, and names that the default rules tell apart.
SHAPES = {
    "scalar/scale": (),
    "dense/bias": (7,),
    "dense/kernel": (5, 7),
    "attention/bias": (4, 3),
    "conv2d/kernel": (3, 3, 2, 5),
    "zero/kernel": (4, 4),
    "idle/kernel": (3, 2),
}
ADAPTED = [False, False, True, False, True, True, True]
STEPS = 100


def make_variables(values):
    return [make_variable(value, name) for name, value in zip(SHAPES, values)]


def problem(dtype=np.float32, steps=STEPS):
    """Initial values and the gradients of each step."""
    draw = np.random.default_rng(0)
    values = [np.asarray(0.0 if name.startswith("zero") else 1.0) * draw.normal(size=SHAPES[name]) for name in SHAPES]
    gradients = []
    for step in range(steps):
        # Gradients shrink as in training, so that bias correction and its absence differ for long.
        of_step = [draw.normal(size=shape) / (1 + 0.1 * step) for shape in SHAPES.values()]
        if step < 20:
            of_step[-1] = np.zeros(SHAPES["idle/kernel"])
        gradients.append([np.asarray(g, dtype) for g in of_step])
    return [np.asarray(value, dtype) for value in values], gradients


# A warm-up, then a decay, as the float32 that Keras computes a rate in.
RATES = [0.05 * min((step + 1) / 10, 1 - max(step - 10, 0) / STEPS) for step in range(STEPS)]
RATES = [float(np.float32(rate)) for rate in RATES]


class Table(keras.optimizers.schedules.LearningRateSchedule):
    """RATES, with no rounding of its own: float64 then compares the update alone."""

    def __call__(self, step):
        return tf.gather(tf.constant(RATES, tf.float32), tf.cast(step, tf.int32))


def assert_close(result, expected, bound):
    for name, ours, theirs in zip(SHAPES, result, expected):
        difference = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert difference <= bound * max(np.linalg.norm(theirs), 1e-30), name


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_equals_twin(dtype, bound, beta, bias_correction):
    values, gradients = problem(dtype)
    optimizer = LAMB(Table(), weight_decay=beta, excluded_lr_multiplier=0.2, bias_correction=bias_correction)
    result = apply_all(optimizer, make_variables(values), gradients)
    twin = LambTwin(decay=beta, excluded=0.2, bias=bias_correction)
    expected, ratios = twin.run(values, gradients, RATES, adapted=ADAPTED, decayed=ADAPTED)
    assert_close(result, expected, bound)
    np.testing.assert_allclose(optimizer.trust_ratios(), ratios, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "twin"),
    [
        ({"trust_min": 2.0}, {"bounds": (2.0, np.inf)}),
        ({"trust_max": 0.9}, {"bounds": (0.0, 0.9)}),
        ({"trust_min": 2.0, "trust_max": 4.0}, {"bounds": (2.0, 4.0)}),
        ({"beta_1": 0.0, "beta_2": 0.0, "epsilon": 1e-2}, {"beta_1": 0.0, "beta_2": 0.0, "epsilon": 1e-2}),
        ({"beta_1": 0.5, "beta_2": 0.9}, {"beta_1": 0.5, "beta_2": 0.9}),
    ],
)
def test_other_options_equal_twin(options, twin):
    values, gradients = problem()
    result = apply_all(LAMB(Table(), weight_decay=0.1, **options), make_variables(values), gradients)
    expected, _ = LambTwin(decay=0.1, **twin).run(values, gradients, RATES, ADAPTED, ADAPTED)
    assert_close(result, expected, 1e-5)
    # An option that changed nothing would prove nothing.
    default, _ = LambTwin(decay=0.1).run(values, gradients, RATES, ADAPTED, ADAPTED)
    kernel = list(SHAPES).index("dense/kernel")
    assert np.linalg.norm(expected[kernel] - default[kernel]) > 1e-2 * np.linalg.norm(default[kernel])


def test_exclusions_are_independent():
    values, gradients = problem()
    options = {"exclude_from_weight_decay": ["kernel"], "exclude_from_layer_adaptation": ["^dense/", "zero"]}
    result = apply_all(LAMB(Table(), weight_decay=0.1, **options), make_variables(values), gradients)
    adapted = [True, False, False, True, True, False, True]
    decayed = ["kernel" not in name for name in SHAPES]
    expected, _ = LambTwin(decay=0.1).run(values, gradients, RATES, adapted, decayed)
    assert_close(result, expected, 1e-5)


def test_nothing_excluded():
    values, gradients = problem()
    options = {"exclude_from_weight_decay": [], "exclude_from_layer_adaptation": []}
    result = apply_all(LAMB(Table(), weight_decay=0.1, **options), make_variables(values), gradients)
    everything = [True] * len(SHAPES)
    assert_close(result, LambTwin(decay=0.1).run(values, gradients, RATES, everything, everything)[0], 1e-5)


def test_equals_twin_under_mixed_bfloat16():
    # Variables are float32 under the policy; gradients reach the optimizer in float32 too.
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(0)
        layer = keras.layers.Dense(3, name="dense")
        layer.build((None, 4))
        values = [np.array(weight) for weight in layer.get_weights()]
        x = tf.random.stateless_normal((8, 4), seed=(1, 2))
        optimizer = LAMB(Table(), weight_decay=0.1)
        optimizer.build(layer.trainable_variables)
        gradients_by_step = []
        for _ in range(STEPS):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.cast(layer(x), tf.float32) - 1))
            gradients = tape.gradient(loss, layer.trainable_variables)
            assert all(g.dtype == tf.float32 for g in gradients)
            gradients_by_step.append([g.numpy() for g in gradients])
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables))
        flags = [True, False]
        expected, _ = LambTwin(decay=0.1).run(values, gradients_by_step, RATES, flags, flags)
        for ours, theirs in zip(layer.get_weights(), expected):
            assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_sixteen_bit_variables_have_float32_moments(dtype):
    # In bfloat16 beta_2 = 0.999 is 1 and v would stay 0; in float16 g^2 = 1e6 is infinite.
    dtype = dtype.as_numpy_dtype
    w, g = np.full((512, 512), 0.5, dtype), np.full((512, 512), 1e3, dtype)
    optimizer = LAMB(0.1, weight_decay=0.25)
    result = one_step(optimizer, w, tf.constant(g))
    # r = 1, so u is constant, and |w| / |u| of it is w: a tenth less.
    np.testing.assert_allclose(result.astype(np.float64), 0.45, rtol=4e-3)
    assert optimizer.trust_ratios() == pytest.approx([0.5 / 1.125], rel=1e-5)


@pytest.mark.parametrize("steps", [1, 1000, 3_000_001, 10**8])
def test_bias_correction_keeps_its_digits(steps):
    optimizer = LAMB()
    optimizer.build([make_variable(np.zeros(2, np.float32), "kernel")])
    optimizer.iterations.assign(steps - 1)
    for dtype, bound in ((tf.float32, 3e-7), (tf.float64, 1e-15)):
        for beta, ours in zip((0.9, 0.999), optimizer._corrections(dtype)):
            # 1 - beta^t as a product of exact steps, beta as the type has it.
            beta = np.longdouble(np.asarray(beta, dtype.as_numpy_dtype))
            assert float(ours) == pytest.approx(float(1 - beta**steps), rel=bound)


def test_decay_is_inside_the_ratio():
    # Keras 3's own Lamb, given weight_decay=0.1, decays outside of the ratio: 1.782.
    # r = 1, u = 1 + 0.1 x 2 = 1.2, lambda = 2 / 1.2, step 0.1 x 2 = 0.2.
    result = one_step(LAMB(0.1, weight_decay=0.1), np.full((1, 1), 2.0, np.float32), tf.fill((1, 1), 0.5))
    np.testing.assert_allclose(result, 1.8, rtol=1e-6)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no Lamb")
def test_keras_lamb_is_another():
    # When this fails, Keras has mended its Lamb, and the docs may say so.
    result = one_step(
        keras.optimizers.Lamb(0.1, weight_decay=0.1), np.full((1, 1), 2.0, np.float32), tf.fill((1, 1), 0.5)
    )
    np.testing.assert_allclose(result, 1.782, rtol=1e-5)


def test_decay_is_not_applied_a_second_time_by_the_base_class():
    # Without gradient u = beta w, so a step is gamma w, whatever beta is.
    result = one_step(LAMB(0.1, weight_decay=0.3), np.ones((2, 2), np.float32), tf.zeros((2, 2)))
    np.testing.assert_allclose(result, 0.9, rtol=1e-6)


def test_without_decay_it_still_adapts():
    result = one_step(LAMB(0.1), np.full((2, 2), 8.0, np.float32), tf.fill((2, 2), 1e-2))
    np.testing.assert_allclose(result, 7.2, rtol=1e-5)


def test_scale_of_the_gradient_cancels():
    w, g = np.array([[1.0, -2.0]], np.float32), np.array([[0.3, 0.1]], np.float32)
    small, large = (one_step(LAMB(0.1, epsilon=1e-12), w, tf.constant(scale * g)) for scale in (1.0, 4096.0))
    np.testing.assert_allclose(small, large, rtol=1e-6)


def test_repeated_rows_of_a_sparse_gradient_are_summed_before_the_moments():
    w = np.arange(12, dtype=np.float32).reshape(4, 3) + 1
    rows = np.array([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [5.0, 0.0, 1.0]], np.float32)
    sparse = tf.IndexedSlices(tf.constant(rows), tf.constant([2, 2, 0]), tf.constant([4, 3]))
    dense = np.zeros_like(w)
    np.add.at(dense, [2, 2, 0], rows)
    options = {"weight_decay": 0.01}
    np.testing.assert_allclose(
        one_step(LAMB(0.1, **options), w, sparse, "embedding/embeddings"),
        one_step(LAMB(0.1, **options), w, tf.constant(dense), "embedding/embeddings"),
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta_1": 1.0}, "LAMB: beta_1 is 1.0, but must be less than 1"),
        ({"beta_2": -0.1}, "LAMB: beta_2 is -0.1, but must be at least 0"),
        ({"epsilon": 0.0}, "LAMB: epsilon is 0.0, but must be greater than 0"),
        ({"epsilon": float("nan")}, "LAMB: epsilon is nan, but must be"),
        ({"weight_decay": -1e-4}, "LAMB: weight_decay is -0.0001, but must be at least 0"),
        ({"excluded_lr_multiplier": float("inf")}, "LAMB: excluded_lr_multiplier is inf, but must be"),
        ({"bias_correction": 3}, "LAMB: bias_correction is 3, but must be true or false"),
        ({"trust_min": 2.0, "trust_max": 1.0}, "trust_min is 2.0 and trust_max 1.0, but they must be"),
        ({"exclude_from_weight_decay": "bias"}, "exclude_from_weight_decay is 'bias', but must be None, a list"),
        ({"exclude_from_layer_adaptation": ["("]}, r"'\(' is not a regular expression"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(InputError, match=message):
        LAMB(**options)


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name():
    variables = make_variables(problem(steps=0)[0])
    with pytest.raises(InputError, match=r"'kernl' matches no variable \(did you mean 'kernel'"):
        LAMB(exclude_from_layer_adaptation=["kernl"]).build(variables)


@pytest.mark.parametrize("option", [{"clipnorm": 0.5}, {"clipvalue": 0.1}, {"global_clipnorm": 0.5}])
def test_clipping_of_the_base_class_works(option):
    # The first step has r = g / (|g| + epsilon) for each element: an epsilon of their size shows |g|.
    w, g = np.array([[3.0, 4.0]], np.float32), np.array([[0.3, 40.0]], np.float32)
    clipped = np.minimum(g, 0.1) if "clipvalue" in option else g * 0.5 / np.linalg.norm(g)
    result = one_step(LAMB(0.1, epsilon=1.0, **option), w, tf.constant(g))
    u = clipped / (clipped + 1.0)
    np.testing.assert_allclose(result, w - 0.1 * 5 / np.linalg.norm(u) * u, rtol=1e-5)


def test_ema_of_the_base_class_works():
    # Each step takes a half of the weight: 1, 0.5, 0.25.
    optimizer = LAMB(0.5, use_ema=True, ema_momentum=0.5)
    variable = make_variable(np.ones((2, 2), np.float32), "dense/kernel")
    optimizer.build([variable])
    for _ in range(2):
        optimizer.apply_gradients([(tf.ones((2, 2)), variable)])
    np.testing.assert_allclose(np.asarray(variable), 0.25, rtol=1e-5)
    optimizer.finalize_variable_values([variable])
    # The average begins at the weight after the first step on Keras 3, before it on Keras 2.
    expected = (0.5 + 0.25) / 2 if KERAS_3 else ((1 + 0.5) / 2 + 0.25) / 2
    np.testing.assert_allclose(np.asarray(variable), expected, rtol=1e-5)


def test_explain_shows_the_equation_and_what_was_done():
    values, gradients = problem(steps=3)
    optimizer = LAMB(0.1, weight_decay=0.01, trust_max=10.0)
    assert "Not built yet" in optimizer.explain()
    apply_all(optimizer, make_variables(values), gradients)
    text = optimizer.explain()
    assert text.startswith("LAMB, gamma = 0.1 at step 3\n")
    for line in ("u      = r + 0.01 w", "lambda = |w| / |u|, within [0, 10]; 1 where a norm is 0", "1 - 0.999^t"):
        assert line in text
    rows = {
        row.split()[0]: row.split()[1:] for row in text.splitlines() if row.split()[0:1] and row.split()[0] in SHAPES
    }
    assert rows["dense/bias"] == ["7", "no", "no", "1", "0.1"]
    assert rows["conv2d/kernel"][:3] == ["3x3x2x5", "yes", "yes"]
    ratio = optimizer.trust_ratios()[list(SHAPES).index("conv2d/kernel")]
    assert float(rows["conv2d/kernel"][3]) == pytest.approx(ratio, rel=1e-3)
    assert "1 - 0.999^t" not in LAMB(bias_correction=False).explain()


@pytest.mark.parametrize("beta", [0.0, 0.125])
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_equals_tensorflow_addons(dtype, bound, beta):
    addons = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons needs TensorFlow 2.15")
    values, gradients = problem(dtype)
    # Numbers that float32 holds exactly: theirs go through it for float64 variables too.
    options = {"beta_1": 0.875, "beta_2": 1 - 2**-10, "weight_decay": beta}
    options |= {key: ["bias", "scale"] for key in ("exclude_from_weight_decay", "exclude_from_layer_adaptation")}
    result = apply_all(LAMB(Table(), **options), make_variables(values), gradients)
    theirs = apply_all(addons.optimizers.LAMB(Table(), **options), make_variables(values), gradients)
    assert_close(result, [np.asarray(w, np.float64) for w in theirs], bound)
