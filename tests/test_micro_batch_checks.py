"""What cannot be trained in micro-batches is one sentence, before the first step."""

from __future__ import annotations

import numpy as np
import pytest

from tf_largebatch import GhostBatchNormalization, GlobalBatchDropout, InputError, train_in_micro_batches
from tf_largebatch._keras import KERAS_3, keras, tf
from tf_largebatch.distribution import micro_batch_checks

X, Y = np.zeros((40, 4), np.float32), np.zeros((40, 1), np.float32)


def model(*layers, optimizer=None, loss="mse", **options):
    made = keras.Sequential([keras.Input((4,), **options), *layers, keras.layers.Dense(1)])
    made.compile(optimizer or keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return made


def refused(sentence, made, micro_batches=4, data=None, **fit):
    before = made.get_weights()
    with pytest.raises(InputError, match=sentence):
        train_in_micro_batches(made, micro_batches).fit(*(data or (X, Y)), verbose=0, **fit)
    for a, b in zip(before, made.get_weights()):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("number", [0, -1, 2.5, "a", True])
def test_number_of_micro_batches(number):
    with pytest.raises(InputError, match="micro_batches is"):
        train_in_micro_batches(model(), number)


def test_not_a_model():
    with pytest.raises(InputError, match="takes a Keras model, not Dense"):
        train_in_micro_batches(keras.layers.Dense(1), 2)


def test_own_train_step():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(InputError, match="Own has a train_step of its own"):
        train_in_micro_batches(Own(), 2)


def test_what_validation_takes_is_no_part_of_the_batches():
    train_in_micro_batches(model(), 4).fit(X, Y, batch_size=16, validation_split=0.2, verbose=0)


def test_what_is_not_reached_is_no_part_of_the_batches():
    train_in_micro_batches(model(), 4).fit(X, Y, batch_size=16, steps_per_epoch=2, verbose=0)


@pytest.mark.parametrize(("size", "rows"), [(10, 40), (20, 40), (6, 36)])
def test_batches_that_do_not_divide(size, rows):
    refused(f"batches of {size} examples cannot be cut into 8", model(), 8, (X[:rows], Y[:rows]), batch_size=size)


def test_arrays_whose_last_batch_is_short():
    refused("the 40 examples do not fill batches of 16", model(), batch_size=16)


def test_data_set_whose_last_batch_may_be_short():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    refused("drop_remainder=True", model(), data=(data,))


def test_generator_whose_batches_do_not_divide():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10, drop_remainder=True)
    refused("10 examples cannot be cut into 4", model(), data=(data,))


def test_ragged_data():
    x = tf.ragged.constant([[1.0], [2.0, 3.0]] * 20)
    data = tf.data.Dataset.from_tensors((x, Y))
    inputs = keras.Input((None,), ragged=True) if not KERAS_3 else keras.Input((None,))
    made = keras.Model(inputs, keras.layers.Lambda(lambda t: tf.reduce_sum(t, 1, keepdims=True))(inputs))
    made.compile("sgd", "mse", jit_compile=False)
    refused("dense tensors, and the data have a RaggedTensor", made, data=(data,))


def test_unequal_arrays():
    data = tf.data.Dataset.from_tensors((X, Y[:20]))
    refused("different numbers of examples: 20, 40", model(loss=lambda y, p: 0 * p), data=(data,))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: GhostBatchNormalization(synchronized=True, name="bn"), "'bn' takes the statistics of the whole"),
        (lambda: GhostBatchNormalization(8, name="bn"), "'bn' takes statistics over groups of 8"),
        (lambda: keras.layers.SpectralNormalization(keras.layers.Dense(2), name="sn"), "'sn' changes its weights"),
    ],
)
def test_layers_that_cannot_be_cut(layer, sentence):
    refused(sentence, model(layer()), batch_size=20)


def test_stateful_layer():
    inputs = keras.Input(batch_shape=(8, 2, 4)) if KERAS_3 else keras.Input((2, 4), batch_size=8)
    made = keras.Model(inputs, keras.layers.LSTM(2, stateful=True, name="lstm")(inputs))
    made.compile("sgd", "mse")
    with pytest.raises(InputError, match="'lstm' keeps a state|fixed batch size"):
        train_in_micro_batches(made, 2)


def test_fixed_batch_size():
    with pytest.raises(InputError, match=r"has a fixed batch size \(8\)"):
        train_in_micro_batches(model(batch_size=8), 2)
    assert train_in_micro_batches(model(batch_size=8), 1)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_losses_that_are_no_mean(reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    refused(f"has reduction '{reduction}'", model(loss=loss), batch_size=8)


def test_ignored_class():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    refused("ignore_class=0", model(loss=loss), batch_size=8)


@pytest.mark.parametrize(("argument", "value"), [("wire_dtype", "float8"), ("wire_dtype", None), ("jit_compile", "x")])
def test_other_arguments(argument, value):
    with pytest.raises(InputError, match=f"{argument} is"):
        train_in_micro_batches(model(), 2, **{argument: value})


def test_masked_output():
    made = keras.Sequential([keras.Input((3, 4)), keras.layers.Masking(), keras.layers.LSTM(1, return_sequences=True)])
    made.compile("sgd", "mse", jit_compile=False)
    data = (np.zeros((8, 3, 4), np.float32), np.zeros((8, 3, 1), np.float32))
    refused("has a mask", made, 2, data, batch_size=8)


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no gradient_accumulation_steps")
def test_two_accumulations():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    refused(
        "has gradient_accumulation_steps, and the model trains in micro-batches",
        model(optimizer=optimizer),
        batch_size=8,
    )


def test_layers_that_know_the_cluster():
    group, whole = GhostBatchNormalization(4, name="group"), GhostBatchNormalization(synchronized=True, name="whole")
    frozen = keras.layers.BatchNormalization(trainable=False, name="frozen")
    known = [keras.layers.BatchNormalization(name="stock"), keras.layers.Dropout(0.5, name="dropout")]
    made = model(group, whole, frozen, GlobalBatchDropout(0.5), GhostBatchNormalization(name="any"), *known)
    assert micro_batch_checks.layers_that_know_the_cluster(made) == ["any", "stock", "dropout"]


def test_a_second_call_replaces_the_first():
    made = train_in_micro_batches(model(), 8)
    refused("batches of 20 examples cannot be cut into 8", made, 8, batch_size=20)
    train_in_micro_batches(made, 4).fit(X, Y, batch_size=20, verbose=0)
