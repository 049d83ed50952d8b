"""The sum of gradients over all replicas: with which options, and in which dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tf_largebatch._keras import tf
from tf_largebatch.collectives_config import Collectives
from tf_largebatch.validation import InputError

# Measured between two processes on CPUs (configs/results/all_reduce.json): from 1 to 16 hardly differ.
_DEFAULT_PACK_MEGABYTES = 4


def communication_options(collectives: Collectives, has_gpus: bool) -> tf.distribute.experimental.CommunicationOptions:
    """What `MultiWorkerMirroredStrategy` is given.

    Args:
      collectives: the recipe's.
      has_gpus: whether the replicas are GPUs.
    """
    megabytes = collectives.pack_megabytes
    if megabytes is None:
        # TensorFlow's ring sends and adds a pack in turn, so that one pack leaves the wire idle.
        in_ring = collectives.implementation == "ring" or not has_gpus
        megabytes = _DEFAULT_PACK_MEGABYTES if in_ring else 0
    return tf.distribute.experimental.CommunicationOptions(
        # Rounded up: 0 bytes would mean everything in one pack.
        bytes_per_pack=math.ceil(megabytes * 2**20),
        timeout_seconds=collectives.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[collectives.implementation.upper()],
    )


def check_collectives(collectives: Collectives, num_workers: int, replicas_per_worker: int, has_gpus: bool) -> None:
    """Raises InputError where this cluster cannot sum as the recipe wants it.

    One replica can always: it sums nothing, and a recipe for many GPUs is tried on it.
    """
    if num_workers * replicas_per_worker == 1:
        return
    if collectives.implementation == "nccl" and not has_gpus:
        raise InputError("collectives.implementation is 'nccl', which needs GPUs; use 'auto' or 'ring' on CPUs.")
    if collectives.implementation == "ring" and has_gpus and num_workers == 1:
        raise InputError(
            "collectives.implementation is 'ring', which sums between workers, but the GPUs are all on one host; "
            "use 'auto' or 'nccl'."
        )


def all_reduce_sum(
    gradients: Sequence[Any],
    wire_dtype: str = "float32",
    *,
    options: tf.distribute.experimental.CommunicationOptions | None = None,
) -> list[Any]:
    """The sums of gradients over all replicas, by one call of TensorFlow's all-reduce.

    Call it in replica context (in `strategy.run`), on every replica with the same shapes and with None in
    the same places, outside loops and conditions.

    Args:
      gradients: dense tensors, IndexedSlices, or None where a variable has no gradient. If they have
        several dtypes, each takes a call of its own: TensorFlow packs only like with like.
      wire_dtype: "bfloat16", or "float32" for no change, as `Collectives.wire_dtype`. Tensors of 16 bits
        and less and of integers travel as they are, and so do IndexedSlices: TensorFlow gathers no
        bfloat16.
      options: for this call, where they differ from the strategy's. (TensorFlow takes 0 bytes and AUTO to
        mean the strategy's own.)

    Returns:
      As many as `gradients`, of the same dtypes; None stays None. Of IndexedSlices TensorFlow gathers the
      rows of all replicas, not yet summed: indices may repeat. A single replica gets its gradients back.

    Raises:
      RuntimeError: this is not replica context.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("all_reduce_sum was called outside strategy.run, where there is no replica to sum for.")
    sums = list(gradients)
    if context.num_replicas_in_sync == 1:
        return sums
    sent = [_for_the_wire(gradient, wire_dtype) for gradient in gradients]
    for dtype in dict.fromkeys(gradient.dtype for gradient in sent if gradient is not None):
        places = [place for place, gradient in enumerate(sent) if gradient is not None and gradient.dtype == dtype]
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, [sent[place] for place in places], options)
        for place, total in zip(places, totals):
            own = gradients[place].dtype
            sums[place] = total if own == dtype else tf.cast(total, own)
    return sums


def _for_the_wire(gradient: Any, wire_dtype: str) -> Any:
    if gradient is None:
        return None
    wide = gradient.dtype.is_floating and gradient.dtype.size > 2
    if wire_dtype != "float32" and wide and not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, wire_dtype)
    # An argument of a tf.function has no device, and TensorFlow sums only what has one.
    return gradient if gradient.device else tf.identity(gradient)
