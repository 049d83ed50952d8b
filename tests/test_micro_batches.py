"""Training in micro-batches is training on the whole batch; on replicas, tests/conformance/test_invariance.py."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import ROOT, python

from tf_largebatch import LARS, PolynomialDecay, train_in_micro_batches
from tf_largebatch._keras import keras, set_precision, tf

DRAW = np.random.default_rng(0)
X, WORDS = DRAW.normal(size=(48, 6)), DRAW.integers(0, 9, (48, 3))
Y = DRAW.normal(size=(48, 1))
WEIGHTS = DRAW.uniform(0, 2, 48)
BATCH = 24


@pytest.fixture(autouse=True)
def float64():
    set_precision("float64")
    keras.utils.set_random_seed(3)
    yield
    set_precision("float32")


def dense(units=1, **options):
    return keras.layers.Dense(units, **options)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = dense(4, activation="tanh"), dense()

    def call(self, x, training=None):
        return self.out(self.hidden(x))


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, dense()(dense(4, activation="tanh")(inputs)))


def sequential():
    return keras.Sequential([keras.Input((6,)), dense(4, activation="tanh", kernel_regularizer="l2"), dense()])


def without_call_arguments():
    return keras.Sequential([dense(4, activation="tanh"), dense()])


def optimizer(**options):
    return LARS(PolynomialDecay(5.0, 4), weight_decay=1e-3, **options)


def trained(build, micro_batches, x=X, y=Y, *, epochs=2, make=optimizer, fit=None, compiled=None, **options):
    """Weights and history of a model that is trained in so many micro-batches; None is Keras's own step."""
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(make(), **{"loss": "mse", "metrics": ["mae"], "jit_compile": False, **(compiled or {})})
    if micro_batches is not None:
        assert train_in_micro_batches(model, micro_batches, **options) is model
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **(fit or {})).history
    return model, history


def assert_same(ours, right, rtol=1e-11):
    (ours, our_history), (right, history) = ours, right
    for a, b in zip(ours.get_weights(), right.get_weights()):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    assert our_history.keys() == history.keys()
    for key in history:
        # Metrics are counted in float32.
        assert our_history[key] == pytest.approx(history[key], rel=2e-6), key


@pytest.mark.smoke
@pytest.mark.parametrize("build", [functional, sequential, Subclassed, without_call_arguments])
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_as_keras_on_the_whole_batch(build, micro_batches):
    assert_same(trained(build, micro_batches), trained(build, None))


@pytest.mark.parametrize("fit", [{"sample_weight": WEIGHTS}, {"validation_split": 0.5}])
def test_weights_and_validation(fit):
    compiled = {"weighted_metrics": ["mse"]}
    ours, right = (trained(functional, k, fit=fit, compiled=compiled) for k in (4, None))
    assert_same(ours, right)


def test_several_outputs_in_dicts():
    def build():
        inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((3,), name="b")}
        x = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        return keras.Model(inputs, {"p": dense(name="p")(x), "q": dense(2, name="q")(x)})

    x, y = {"a": X, "b": WORDS.astype("float64")}, {"p": Y, "q": X[:, :2]}
    compiled = {"loss": {"p": "mse", "q": "mae"}, "loss_weights": {"p": 1.0, "q": 0.3}, "metrics": {"p": ["mae"]}}
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    runs = []
    for micro_batches in (4, None):
        keras.utils.set_random_seed(1)
        model = build()
        model.compile(optimizer(), jit_compile=False, **compiled)
        if micro_batches:
            train_in_micro_batches(model, micro_batches)
        runs.append((model, model.fit(data, epochs=2, verbose=0).history))
    assert_same(*runs)


def test_sparse_gradients():
    def build():
        inputs = keras.Input((3,), dtype="int64")
        x = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(inputs))
        return keras.Model(inputs, dense()(x))

    assert_same(trained(build, 4, WORDS), trained(build, None, WORDS))


def test_variable_without_a_gradient():
    class Unused(keras.layers.Layer):
        def build(self, shape):
            self.unused = self.add_weight(name="unused", shape=(2,), initializer="ones")

        def call(self, x):
            return x

    def build():
        return keras.Sequential([keras.Input((6,)), Unused(), dense()])

    model, _ = trained(build, 4, make=lambda: keras.optimizers.SGD(0.5))
    assert_same((model, {}), (trained(build, None, make=lambda: keras.optimizers.SGD(0.5))[0], {}))
    assert model.get_weights()[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_moving_statistics_take_the_mean_over_slices_once_a_step(frozen):
    def build():
        layer = keras.layers.BatchNormalization(momentum=0.75, trainable=not frozen)
        return keras.Sequential([keras.Input((6,)), layer, dense()])

    model, _ = trained(build, 6, epochs=1)
    mean, variance = np.zeros(6), np.ones(6)
    for batch in X.reshape(2, 6, 4, 6):
        mean = 0.75 * mean + 0.25 * batch.mean(axis=1).mean(axis=0)
        variance = 0.75 * variance + 0.25 * batch.var(axis=1).mean(axis=0)
    if frozen:
        mean, variance = np.zeros(6), np.ones(6)
    np.testing.assert_allclose(np.asarray(model.layers[0].moving_mean), mean, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(model.layers[0].moving_variance), variance, rtol=1e-12)


def test_averages_schedules_and_iterations_count_steps():
    def make():
        return optimizer(use_ema=True, ema_momentum=0.5)

    ours, right = trained(functional, 8, make=make, epochs=1), trained(functional, None, make=make, epochs=1)
    assert_same(ours, right)
    assert ours[0].optimizer.step_count() == 2


@pytest.mark.parametrize("batch_norm", [False, True])
def test_xla_over_the_loop(batch_norm):
    def build():
        middle = [keras.layers.BatchNormalization()] if batch_norm else []
        return keras.Sequential([keras.Input((6,)), dense(4, activation="tanh"), *middle, dense()])

    assert_same(trained(build, 4, jit_compile=True), trained(build, 4))


def test_eagerly():
    assert_same(trained(functional, 4, compiled={"run_eagerly": True}), trained(functional, 4))


def test_generator():
    def batches():
        while True:
            yield from zip(np.split(X, 2), np.split(Y, 2))

    keras.utils.set_random_seed(1)
    model = functional()
    model.compile(optimizer(), "mse", metrics=["mae"], jit_compile=False)
    history = train_in_micro_batches(model, 4).fit(batches(), steps_per_epoch=2, epochs=2, verbose=0).history
    assert_same((model, history), trained(functional, None))


def test_several_steps_at_once():
    assert_same(trained(functional, 4, compiled={"steps_per_execution": 2}), trained(functional, None))


def test_nothing_to_train():
    model, history = trained(lambda: keras.Sequential([keras.Input((6,)), dense(trainable=False)]), 4, epochs=1)
    assert np.isfinite(history["loss"]).all()


def test_saved_and_cloned(tmp_path):
    model, _ = trained(functional, 4)
    model.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(str(tmp_path / "model.keras"))
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    loaded.fit(X, Y, batch_size=7, verbose=0)
    assert keras.models.clone_model(model).count_params() == model.count_params()
    model.export(str(tmp_path / "exported"))
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(tf.constant(X)), model.predict(X, verbose=0), rtol=1e-9)


def test_dropout_of_keras():
    model, history = trained(lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), dense()]), 4)
    assert np.isfinite(history["loss"]).all()


class InfiniteFor(keras.layers.Layer):
    """Multiplies an example by infinity where its first feature is 7."""

    def call(self, x):
        return x * tf.where(x[:, :1] == 7, tf.constant(np.inf, x.dtype), tf.ones((), x.dtype))


def test_an_infinite_slice_skips_the_whole_step():
    set_precision("mixed_float16")
    x = X.astype("float32").clip(-2, 2)
    x[BATCH + 9, 0] = 7  # in the second of two steps, and the second of its four slices
    kernel = keras.initializers.Constant(0.5)

    def build():
        return keras.Sequential([keras.Input((6,)), InfiniteFor(), dense(kernel_initializer=kernel, dtype="float32")])

    def fit(steps):
        model, _ = trained(
            build, 4, x[: steps * BATCH], Y[: steps * BATCH], make=lambda: keras.optimizers.SGD(0.1), epochs=1
        )
        scale = getattr(model.optimizer, "dynamic_scale", None)
        return model, float(np.asarray(model.optimizer.loss_scale if scale is None else scale))

    one, scale = fit(1)
    two, halved = fit(2)
    assert (scale, halved) == (2.0**15, 2.0**14)
    for a, b in zip(two.get_weights(), one.get_weights()):
        np.testing.assert_array_equal(a, b)
    assert not np.allclose(one.get_weights()[0], 0.5)


COUNT = """
import json
import numpy as np
import worker_devices
worker_devices.use(2)
from tf_largebatch import train_in_micro_batches
from tf_largebatch._keras import keras, tf

# One worker of its own, whose two devices sum by collectives.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
assert strategy.num_replicas_in_sync == 2
counts = {}
for micro_batches in (1, 4):
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    train_in_micro_batches(model, micro_batches)
    data = tf.data.Dataset.from_tensors((np.ones((16, 3), "float32"), np.ones((16, 1), "float32"))).repeat()
    model.fit(data, steps_per_epoch=2, verbose=0)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @tf.function
    def step():
        return strategy.run(model.train_step, args=(next(iterator),))

    graph = step.get_concrete_function().graph

    def collectives(nodes):
        return sum("CollectiveReduce" in node.op for node in nodes)

    definition = graph.as_graph_def()
    inside = sum(collectives(f.node_def) for f in definition.library.function if "while" in f.signature.name)
    loops = sum(f.signature.name.startswith(("while_body", "replica_1/while_body")) or "while_body" in f.signature.name
                for f in definition.library.function)
    counts[micro_batches] = {"outside": collectives(definition.node), "inside": inside, "loops": loops}
print("COUNTS", json.dumps(counts))
"""


def test_one_all_reduce_whatever_the_micro_batches():
    done = python("-c", COUNT, timeout=200, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("COUNTS")]
    whole, cut = json.loads(line.removeprefix("COUNTS ")).values()
    assert cut["loops"] and not whole["loops"], "micro-batches are no loop"
    assert cut["inside"] == 0, "an all-reduce for every micro-batch"
    assert cut["outside"] == whole["outside"] > 0
