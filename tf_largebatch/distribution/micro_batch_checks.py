"""What cannot be trained in micro-batches, in one sentence each, before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_largebatch._keras import keras, sublayers, tf
from tf_largebatch.distribution import keras_train_step
from tf_largebatch.validation import InputError

# Losses that are a mean over the examples: a mean of means over equal slices.
_MEANS = (None, "auto", "sum_over_batch_size", "mean")
_ONE_SIZE = (
    "the batches may be cut short at the end: micro-batches need batches of one size, as "
    "dataset.batch(size, drop_remainder=True) gives them."
)


def slice_size(data: Any, micro_batches: int) -> Any:
    """Examples in a slice: a number, or a tensor where only the running step knows."""
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    for leaf in leaves:
        if micro_batches > 1 and not isinstance(leaf, tf.Tensor):
            raise InputError(f"micro-batches are cut from dense tensors, and the data have a {type(leaf).__name__}.")
    sizes = {None if leaf.shape.rank is None else (leaf.shape[:1] or [0])[0] for leaf in leaves}
    if sizes == {None}:
        # Of generators, of several steps at once, and of several workers whose data have an end.
        size = tf.shape(leaves[0])[0]
        with tf.control_dependencies([tf.debugging.assert_equal(size % micro_batches, 0, _ONE_SIZE)]):
            return tf.identity(size // micro_batches)
    size = sizes.pop()
    if sizes or not size:
        counts = ", ".join(sorted(map(str, {size, *sizes})))
        raise InputError(f"the arrays of a batch have different numbers of examples: {counts}.")
    if size % micro_batches:
        raise InputError(
            f"each replica gets {size} examples a step, which cannot be cut into {micro_batches} equal micro-batches."
        )
    return size // micro_batches


def check_data(x: Any, batch_size: int | None, micro_batches: int, replicas: int) -> None:
    """Refuses what `fit` is given where it is plain to see that batches will not divide."""
    if isinstance(x, tf.data.Dataset):
        size = tf.nest.flatten(x.element_spec)[0].shape[:1]
        size = size[0] if size else None
        if size is None:
            raise InputError(_ONE_SIZE)
    elif isinstance(x, (np.ndarray, tf.Tensor)):
        size = batch_size or 32
        if len(x) % size:
            raise InputError(f"the {len(x)} examples do not fill batches of {size}, and the last would be cut short.")
    else:
        return
    if size % (micro_batches * replicas):
        raise InputError(
            f"batches of {size} examples cannot be cut into {micro_batches} equal micro-batches "
            f"on each of {replicas} replica{'s' * (replicas > 1)}."
        )


def check_compiled(model: keras.Model, micro_batches: int) -> None:
    if keras_train_step.accumulates(model.optimizer):
        raise InputError(
            "the optimizer has gradient_accumulation_steps, and the model trains in micro-batches: use one of them."
        )
    for loss in tf.nest.flatten(model.loss):
        # Keras 2 keeps it among the arguments of the function that the loss calls.
        ignored = getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))
        if micro_batches > 1 and ignored is not None:
            raise InputError(
                f"the loss has ignore_class={ignored}, by whose count Keras divides the loss of each "
                "micro-batch; give sample weights instead, or train with micro_batches=1."
            )
        reduction = getattr(loss, "reduction", None)
        if micro_batches > 1 and reduction not in _MEANS:
            raise InputError(
                f"the loss {getattr(loss, 'name', loss)!r} has reduction {reduction!r}, which micro-batches cannot "
                "keep; use 'sum_over_batch_size'."
            )


def check_layers(model: keras.Model, micro_batches: int) -> None:
    """Refuses layers whose result for a whole batch is not made of results for its slices."""
    if micro_batches == 1:
        return
    for layer in sublayers(model):
        reason = None
        if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
            reason = "keeps a state from batch to batch (stateful=True)"
        elif getattr(layer, "synchronized", False):
            reason = "takes the statistics of the whole global batch (synchronized=True)"
        elif isinstance(layer, keras.layers.SpectralNormalization):
            reason = "changes its weights at every call"
        elif isinstance(layer, keras.layers.InputLayer) and _fixed_batch_size(layer):
            reason = f"has a fixed batch size ({_fixed_batch_size(layer)})"
        if reason:
            raise InputError(f"layer {layer.name!r} {reason}, so the model cannot be trained in micro-batches.")


def check_groups(model: keras.Model, size: Any, micro_batches: int) -> None:
    """Refuses batch-norm groups that reach over the end of a micro-batch."""
    for layer in sublayers(model):
        group = getattr(layer, "group_size", None)
        if micro_batches > 1 and isinstance(group, int) and isinstance(size, int) and size % group:
            raise InputError(
                f"layer {layer.name!r} takes statistics over groups of {group} examples, which do not divide "
                f"micro-batches of {size}; use {group} or a multiple of it."
            )


def layers_that_know_the_cluster(model: keras.Model) -> list[str]:
    """Names of layers whose result depends on how a global batch is cut up.

    Batch norm over whatever a device gets at a time, and random layers whose numbers are drawn for
    each device and micro-batch in turn.
    """
    found = []
    for layer in sublayers(model):
        whole = getattr(layer, "synchronized", False) or getattr(layer, "group_size", None)
        batch_norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not whole
        random = isinstance(layer, (keras.layers.Dropout, keras.layers.GaussianNoise, keras.layers.GaussianDropout))
        if batch_norm or random:
            found.append(layer.name)
    return found


def _fixed_batch_size(layer: keras.layers.InputLayer) -> int | None:
    shape = getattr(layer, "batch_shape", None) or getattr(layer, "_batch_input_shape", None)
    return shape[0] if shape else None
