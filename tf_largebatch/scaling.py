"""Epochs and examples to steps. Plain arithmetic, no TensorFlow."""

from __future__ import annotations

from tf_largebatch.validation import InputError


def steps_per_epoch(num_examples: int, global_batch_size: int) -> int:
    """Whole global batches in an epoch; examples left over are skipped until the next shuffle.

    Raises:
      InputError: the batch is larger than the data set.
    """
    steps = num_examples // global_batch_size
    if not steps:
        raise InputError(
            f"global_batch_size is {global_batch_size}, but the data set has {num_examples} training examples; "
            "an epoch needs at least one full batch."
        )
    return steps


def epochs_to_steps(epochs: float, steps_per_epoch: int) -> int:
    """The nearest whole number of steps: 5 epochs of 39 steps are 195, 0.3125 epochs are 12."""
    return round(epochs * steps_per_epoch)
