"""What a training step asks of a Keras model and its optimizer, the same on both Kerases.

Each function does what the stock `Model.train_step` does at that place: keras/src/backend/tensorflow/trainer.py
of Keras 3, keras/src/engine/training.py of Keras 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_largebatch._keras import KERAS_3, keras, tf, tf_variable
from tf_largebatch.distribution import keras3_optimizer


def has_own_train_step(model: keras.Model) -> bool:
    """Whether the model's class overrides Keras's `train_step`."""
    return type(model).train_step is not keras.Model.train_step


def forward(model: keras.Model, x: Any, training: bool = True) -> Any:
    """The model's outputs; the first call also makes its variables."""
    if KERAS_3 and not model._call_has_training_arg:
        return model(x)
    return model(x, training=training)


def loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """The loss of these examples, divided by the number of replicas, and counted in the reported loss."""
    if not KERAS_3:
        return model.compute_loss(x, y, y_pred, sample_weight)
    from keras.src.losses import loss as loss_module

    value = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
    examples = tf.shape(tf.nest.flatten(x)[0])[0]
    model._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(value), sample_weight=examples)
    return value


def update_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Counts these examples in the compiled metrics."""
    if KERAS_3 or type(model).compute_metrics is not keras.Model.compute_metrics:
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    else:
        # Without computing the results, for which all replicas meet.
        model.compiled_metrics.update_state(y, y_pred, sample_weight)


def metrics_are_built(model: keras.Model) -> bool:
    """Whether loss and metrics have all their variables, which cannot be made inside a loop."""
    parts = (model._compile_metrics, model._compile_loss) if KERAS_3 else (model.compiled_metrics, model.compiled_loss)
    return all(part is None or part.built for part in parts) and model.built


def scaled_loss(optimizer: Any, value: tf.Tensor) -> tf.Tensor:
    """The loss times the loss scale, where the optimizer has one."""
    if KERAS_3:
        return optimizer.scale_loss(value)
    return optimizer.get_scaled_loss(value) if hasattr(optimizer, "get_scaled_loss") else value


def apply_reduced(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """One update with gradients of the scaled loss that are summed over all replicas."""
    if KERAS_3:
        with keras3_optimizer.reduced_gradients():
            optimizer.apply_gradients(zip(gradients, variables))
        return
    if hasattr(optimizer, "get_unscaled_gradients"):
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, variables), experimental_aggregate_gradients=False)


def trained(model: keras.Model) -> tuple[list[Any], list[tf.Variable]]:
    """The variables to train, as the optimizer wants them and as TF variables."""
    variables = list(model.trainable_variables)
    return variables, [tf_variable(variable) for variable in variables]


def accumulates(optimizer: Any) -> bool:
    """Whether the optimizer has a gradient accumulation of its own, as Keras 3's can."""
    return bool(getattr(getattr(optimizer, "inner_optimizer", optimizer), "gradient_accumulation_steps", None))


def has_mask(y_pred: Any) -> bool:
    """Whether some output carries a mask, by which Keras divides the loss."""
    return any(getattr(output, "_keras_mask", None) is not None for output in tf.nest.flatten(y_pred))
