"""The seam between the two Kerases; no other file knows that there are two.

TensorFlow 2.16 and later give Keras 3 as `tensorflow.keras`. TensorFlow 2.15, and tf_keras under
`TF_USE_LEGACY_KERAS=1`, give Keras 2. Their optimizer base classes differ in constructor, state,
variable index, arity of `update_step` and variable names; `Optimizer` below hides all of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from absl import logging

from tf_largebatch.validation import InputError, NonNegativeFloat, checked

if os.environ.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
    raise InputError(f"KERAS_BACKEND is {os.environ['KERAS_BACKEND']!r}, but tf_largebatch trains with 'tensorflow'.")
try:
    import tensorflow as tf
    from tensorflow import keras
except ImportError as failure:
    raise ImportError(
        "tf_largebatch needs TensorFlow, which it does not install by itself: "
        "pip install 'tf_largebatch[tensorflow]' (or [cuda], [tpu], [addons])."
    ) from failure

KERAS_3 = hasattr(keras, "ops")
if KERAS_3 and keras.config.backend() != "tensorflow":
    raise InputError(f"Keras is set to the backend {keras.config.backend()!r}, but tf_largebatch needs 'tensorflow'.")


def register(cls: type) -> type:
    """Class decorator: Keras finds the class again when it loads a model."""
    if not KERAS_3:
        # Its .h5 files name a schedule without the package.
        keras.utils.get_custom_objects()[cls.__name__] = cls
    return keras.utils.register_keras_serializable(package="tf_largebatch")(cls)


def keras_version() -> str:
    """Version of the Keras in use, such as "3.15.1" or "2.15.0"."""
    if KERAS_3:
        return keras.version()
    # `tensorflow.keras` of Keras 2 has no version of its own; its classes know their package.
    package = keras.Model.__module__.partition(".")[0]
    return __import__(package).__version__


def set_precision(precision: str) -> None:
    """Sets the dtype of variables and of computation: "float32", "float64" or "mixed_..."."""
    keras.backend.set_floatx("float64" if precision == "float64" else "float32")
    keras.mixed_precision.set_global_policy(precision)


def variable_path(variable: Any) -> str:
    """A variable's name with its layers, such as "block_1/conv/kernel"."""
    return getattr(variable, "path", None) or variable.name.partition(":")[0]


def tf_variable(variable: Any) -> tf.Variable:
    """The TF variable of a variable that Keras made."""
    return variable.value if KERAS_3 and isinstance(variable, keras.Variable) else variable


def sublayers(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all layers in it, at any depth, each once."""
    return list({id(layer): layer for layer in model._flatten_layers()}.values())


_TWICE = "%s decays %s, which a regularizer of the layer decays as well: leave one of them out."


def warn_if_regularized(model: keras.Model, weight_decay: float) -> None:
    """On Keras 2, warns of a model with regularizers that an optimizer decays too; Keras 3's optimizers do it."""
    if not KERAS_3 and weight_decay and model.losses:
        logging.warning(_TWICE, "the optimizer", f"the weights of {model.name}")


class Optimizer(keras.optimizers.Optimizer):
    """Base of this package's optimizers, the same on both Kerases.

    A subclass implements `create_state(variables)`, called once, which leaves in `_decays` each
    variable's weight decay if it has any, and `update(index, gradient, variable, learning_rate)`,
    called in each replica with the reduced gradient; `index` is the variable's place in what
    `create_state` was given.
    """

    def __init__(self, learning_rate: Any, name: str, jit_compile: bool = False, **kwargs: Any):
        if isinstance(learning_rate, (int, float)):
            learning_rate = checked(f"{type(self).__name__}: learning_rate", learning_rate, NonNegativeFloat)
        elif isinstance(learning_rate, dict):
            learning_rate = keras.optimizers.schedules.deserialize(learning_rate)
        # A base class that knew of a decay would apply it as well, outside the update rule.
        kwargs["weight_decay"] = None
        if KERAS_3:
            super().__init__(learning_rate=learning_rate, name=name, **kwargs)
            self.jit_compile = jit_compile
        else:
            super().__init__(name=name, jit_compile=jit_compile, **kwargs)
            self._learning_rate = self._build_learning_rate(learning_rate)

    def create_state(self, variables: Sequence[Any]) -> None:
        raise NotImplementedError

    def update(self, index: int, gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        raise NotImplementedError

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables, once; Keras calls it before the first update."""
        # Keras 2 calls it again at every update.
        if getattr(self, "_state_created", False):
            return
        super().build(variables)
        self.paths = tuple(variable_path(variable) for variable in variables)
        self.shapes = tuple(tuple(variable.shape) for variable in variables)
        self._decays: tuple[float, ...] = (0.0,) * len(variables)
        self.create_state(variables)
        # Keras 2 variables do not know their regularizer; `warn_if_regularized` looks at the model there.
        regularized = [v for v, decay in zip(variables, self._decays) if decay and getattr(v, "regularizer", None)]
        if regularized:
            logging.warning(_TWICE, type(self).__name__, ", ".join(map(variable_path, regularized)))
        self._state_created = True
        self._built = True

    def slots(self, variables: Sequence[Any], name: str) -> list[tf.Variable]:
        """One zero variable for each of `variables`, of its shape and dtype, as plain TF variables."""
        created = [self.add_variable_from_reference(variable, name) for variable in variables]
        return [slot.value for slot in created] if KERAS_3 else created

    def vector(self, length: int, name: str) -> tf.Variable:
        """A float32 variable of zeros that holds one number for each trained variable; see `store`."""
        created = self.add_variable(shape=(length,), dtype="float32", initializer="zeros", name=name)
        return created.value if KERAS_3 else created

    def update_step(self, gradient: Any, variable: tf.Variable, learning_rate: Any = None) -> None:
        """Called by Keras in each replica; hands over to `update`."""
        if KERAS_3:
            index = self._get_variable_index(variable)
        else:
            index = self._index_dict[self._var_key(variable)]
            learning_rate = self.learning_rate
        self.update(index, gradient, variable, tf.convert_to_tensor(learning_rate))

    # Keras 3 clips each replica's gradient before the all-reduce, so that the threshold grows with
    # the number of replicas; Keras 2 clips the reduced gradient. Here both do as Keras 2.

    def _clip_gradients(self, gradients: Sequence[Any]) -> Sequence[Any]:
        return gradients if KERAS_3 else super()._clip_gradients(rows_summed(gradients))

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence[Any]) -> list[Any]:
        reduced = super()._all_reduce_sum_gradients(grads_and_vars)
        gradients = rows_summed([gradient for gradient, _ in reduced])
        return list(zip(super()._clip_gradients(gradients), [variable for _, variable in reduced]))

    def exclude_from_weight_decay(self, *args: Any, **kwargs: Any) -> None:
        """Refused: Keras's method excludes variables from a decay of its own, which is off here."""
        raise InputError(f"{type(self).__name__}: give exclude_from_weight_decay to the constructor.")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["jit_compile"] = self.jit_compile
        if not KERAS_3:
            # Keras 2 leaves the rate to its subclasses, and gives a number as NumPy's, which is not JSON.
            rate = self._serialize_hyperparameter(self._learning_rate)
            config["learning_rate"] = rate if isinstance(rate, dict) else float(rate)
        return config

    def current_learning_rate(self) -> float:
        """The rate of the coming update."""
        return self._learning_rate_at(self.step_count())

    def last_learning_rate(self) -> float | None:
        """The rate of the last update; None before the first."""
        steps = self.step_count()
        return self._learning_rate_at(steps - 1) if steps else None

    def step_count(self) -> int:
        """Updates made so far."""
        # NumPy reads one replica's copy of a variable that has several; int() does not.
        return int(_numpy(self.iterations))

    def _learning_rate_at(self, step: int) -> float:
        if isinstance(self._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return float(self._learning_rate(step))
        return float(_numpy(self.learning_rate))


def _numpy(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def store(vector: tf.Variable, index: int, value: tf.Tensor) -> None:
    """vector[index] = value, where `update` runs."""
    tf.raw_ops.ResourceScatterUpdate(resource=vector.handle, indices=index, updates=tf.cast(value, vector.dtype))


def rows_summed(gradients: Sequence[Any]) -> list[Any]:
    """Sparse gradients with each row once: the norm of repeated rows is not that of the gradient."""
    return [_row_sums(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _row_sums(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    rows, positions = tf.unique(gradient.indices)
    sums = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(sums, rows, gradient.dense_shape)
