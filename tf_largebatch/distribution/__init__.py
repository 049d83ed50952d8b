"""Clusters, the cut of a global batch, and `tf.distribute`, made to work with Keras."""

from __future__ import annotations

from typing import Any


def strategy(cluster: Any = None, collectives: Any = None) -> Any:
    """`strategies.strategy`, which see, without loading TensorFlow before the call."""
    from tf_largebatch.distribution import strategies

    return strategies.strategy(cluster, collectives)
