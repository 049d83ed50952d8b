"""Arrays in memory as `tf.data` pipelines that give every worker its slice of each global batch.

Global batch k of an epoch is the same set of examples on any cluster: the epoch's permutation
depends on the recipe's seed and the epoch alone, and a worker takes the columns of it that its
replicas own (`distribution/batch_split.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tf_largebatch._keras import tf
from tf_largebatch.datasets import augmentation as augmentations
from tf_largebatch.distribution.batch_split import BatchSplit


def training_batches(
    images: np.ndarray,
    labels: np.ndarray,
    split: BatchSplit,
    rank: int,
    epochs: int,
    seed: int,
    augmentation: str = "none",
    first_step: int = 0,
) -> tf.data.Dataset:
    """One worker's part of all global batches of all epochs, cut into the shares of its replicas.

    The elements of one global batch follow each other, a replica's after the other's, as
    `tf.distribute` hands a pipeline's elements to the replicas of a worker; the training step cuts an
    element into micro-batches. Examples left over at the end of an epoch are skipped in that epoch:
    every batch is whole.

    Args:
      images, labels: (n, ...) and (n,).
      rank: the worker's position, 0 to `split.num_workers` - 1.
      epochs: how many epochs the pipeline lasts.
      seed: the recipe's seed.
      augmentation: what is done to each image, by `augmentation.py`.
      first_step: the global step whose batch comes first; earlier ones are not made.

    Returns:
      A dataset of (images, labels), each of `split.share` examples, that begins again with the first of
      `epochs` after the last.

    Raises:
      InputError: the augmentation does not exist, or does not fit the images.
    """
    augmentations.check(augmentation, images.shape[1:])
    steps = len(images) // split.global_batch_size
    first = rank * split.replicas_per_worker

    def epoch_order(epoch: tf.Tensor) -> tf.data.Dataset:
        # A named algorithm, so that every machine and version draws the same permutation.
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(images)), seed=tf.stack([tf.cast(seed, tf.int64), epoch]), alg="philox"
        )
        order = tf.reshape(order[: steps * split.global_batch_size], (steps, split.replicas, split.share))
        mine = tf.reshape(order[:, first : first + split.replicas_per_worker], (-1, split.share))
        if augmentation == "none":
            return tf.data.Dataset.from_tensor_slices((mine,))
        seeds = augmentations.seeds(seed, epoch, len(images))
        return tf.data.Dataset.from_tensor_slices((mine, tf.gather(seeds, mine)))

    all_images, all_labels = tf.constant(images), tf.constant(labels)

    def gather(chosen: tf.Tensor, seeds: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = tf.gather(all_images, chosen)
        if seeds is not None:
            inputs = augmentations.augmented(augmentation, inputs, seeds)
        return inputs, tf.gather(all_labels, chosen)

    # Without an end, the workers need not ask each other at every step whether all have data left.
    epoch, step = divmod(first_step, steps)
    epoch_numbers = tf.data.Dataset.range(epochs).repeat().skip(epoch)
    order = epoch_numbers.flat_map(epoch_order).skip(step * split.replicas_per_worker)
    return _made_ahead(order, gather, split)


def evaluation_batches(images: np.ndarray, labels: np.ndarray, split: BatchSplit, rank: int) -> tf.data.Dataset:
    """One worker's part of every example once, in batches of one size, at most a micro-batch, for one replica each.

    The last global batch is filled up with examples of weight 0, so that shapes are static and all
    replicas take the same number of steps. The weight of the others makes up for it: Keras divides
    a loss by the number of examples, fill included, so each real one weighs (all + fill) / all.
    Weighted metrics and the mean loss are then exact.

    Returns:
      A dataset of (images, labels, weights) that begins again after `evaluation_steps` steps: Keras
      3 takes one batch more than it evaluates, to learn its shapes, and stops training where a
      distributed pipeline has none left.
    """
    size = min(split.per_replica_batch_size, math.ceil(len(images) / split.replicas))
    steps = math.ceil(len(images) / (size * split.replicas))
    filled = steps * split.replicas * size
    position = np.arange(filled)
    weights = np.where(position < len(images), filled / len(images), 0.0).astype(np.float32)
    first = rank * split.replicas_per_worker

    def mine(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(steps, split.replicas, size)[:, first : first + split.replicas_per_worker]
        return columns.reshape(-1, size)

    chosen = tf.data.Dataset.from_tensor_slices((mine(position % len(images)), mine(weights))).repeat()
    all_images, all_labels = tf.constant(images), tf.constant(labels)

    def gather(chosen: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.gather(all_images, chosen), tf.gather(all_labels, chosen), weight

    return _made_ahead(chosen, gather, split)


def evaluation_steps(num_examples: int, split: BatchSplit) -> int:
    """Steps that `evaluation_batches` takes."""
    size = min(split.per_replica_batch_size, math.ceil(num_examples / split.replicas))
    return math.ceil(num_examples / (size * split.replicas))


def _made_ahead(order: tf.data.Dataset, gather: Callable[..., tuple[tf.Tensor, ...]], split: BatchSplit):
    """Maps `order` while the model computes.

    What the worker's replicas take in the next step is made side by side, and one more waits: AUTOTUNE
    would put more CPU time and memory into elements that nobody is waiting for, each as large as a share
    of the global batch, 25 MB of 28x28 images at 32,768.
    """
    return order.map(gather, num_parallel_calls=split.replicas_per_worker).prefetch(1)
