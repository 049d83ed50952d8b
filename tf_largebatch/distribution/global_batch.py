"""Where in the global batch the examples at hand stand, for layers whose result depends on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tf_largebatch._keras import tf

# Each replica of tf.distribute.MirroredStrategy is traced in a thread of its own.
_here = threading.local()


@dataclass(frozen=True)
class Position:
    """What a training step says about the examples it gives to the model.

    Attributes:
      step: int64 scalar, global steps made before this one.
      first_example: int64 scalar, place of the first example in the global batch; the others follow it.
    """

    step: tf.Tensor
    first_example: tf.Tensor


@contextlib.contextmanager
def at(step: tf.Tensor, first_example: tf.Tensor) -> Iterator[None]:
    """Within it, `position()` gives this position, in this thread."""
    before = position()
    _here.position = Position(step, first_example)
    try:
        yield
    finally:
        _here.position = before


def position() -> Position | None:
    """The position that the training step states; None where no step of this package runs."""
    return getattr(_here, "position", None)
