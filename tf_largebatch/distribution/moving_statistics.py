"""Moving statistics of batch-norm layers, made equal on all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from tf_largebatch._keras import keras, sublayers, tf, tf_variable
from tf_largebatch.distribution import collectives


def variables(model: keras.Model) -> list[tf.Variable]:
    """The moving statistics that the model's batch-norm layers update in training, as TF variables."""
    layers = [
        layer
        for layer in sublayers(model)
        # A frozen layer uses its statistics and leaves them.
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    return [tf_variable(variable) for layer in layers for variable in layer.non_trainable_variables]


def average(statistics: Sequence[tf.Variable], share: tf.Tensor | None = None) -> None:
    """Gives every replica the mean over replicas of what each has, in one all-reduce; call it in each replica.

    A moving statistic is linear in what a step adds to it, so the mean over replicas is what the mean
    over all their groups would have given.

    Args:
      statistics: of this replica, as `variables` gives them.
      share: this replica's part of the global batch where replicas have different numbers of examples,
        0 to 1, its weight in the mean; None: all have the same.
    """
    context = tf.distribute.get_replica_context()
    if not statistics or context is None or context.num_replicas_in_sync == 1:
        return
    weighted = []
    for statistic in statistics:
        value = tf.convert_to_tensor(statistic)
        if share is None:
            weighted.append(value / context.num_replicas_in_sync)
        else:
            # Statistics of no examples are NaN.
            weighted.append(tf.where(share > 0, value, tf.zeros_like(value)) * tf.cast(share, value.dtype))
    for statistic, mean in zip(statistics, collectives.all_reduce_sum(weighted)):
        statistic.assign(mean)
