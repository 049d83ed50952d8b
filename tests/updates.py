"""How tests make variables, apply updates to them and compare the outcome; the same on both Kerases."""

from __future__ import annotations

import numpy as np

from tf_largebatch._keras import KERAS_3, Optimizer, keras, tf


def make_variable(value, name):
    """A trainable variable with a path such as "dense/kernel"."""
    if not KERAS_3:
        return tf.Variable(value, name=name)
    variable = keras.Variable(value, name=name.rpartition("/")[2], dtype=str(value.dtype))
    variable._path = name
    return variable


def apply_all(optimizer, variables, gradients_by_step, jit_compile=None):
    """The variables' values after an update for each entry of `gradients_by_step`."""

    @tf.function(jit_compile=jit_compile)
    def step(gradients):
        optimizer.apply_gradients(zip(gradients, variables))

    if isinstance(optimizer, (Optimizer, keras.optimizers.SGD)):
        optimizer.build(variables)
    for gradients in gradients_by_step:
        step([tf.constant(g) for g in gradients])
    return [np.asarray(variable) for variable in variables]


def one_step(optimizer, value, gradient, name="dense/kernel"):
    """A variable's value after one update."""
    variable = make_variable(np.asarray(value), name)
    optimizer.build([variable])
    optimizer.apply_gradients([(gradient, variable)])
    return np.asarray(variable)


def relative_difference(a, b):
    """|a - b| / |b|, in float64."""
    return np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30)
