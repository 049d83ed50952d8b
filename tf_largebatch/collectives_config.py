"""How a recipe's gradients travel between the replicas."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from tf_largebatch.validation import STRICT, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class Collectives:
    """How gradients are summed over the replicas. One replica sums nothing and heeds none of this.

    `implementation`, `pack_megabytes` and `timeout_seconds` change speed alone, apart from the order in
    which numbers are added; `wire_dtype` changes results.

    Attributes:
      implementation: who sums. "ring" is TensorFlow's own code, "nccl" NVIDIA's library, for GPUs alone;
        "auto" leaves the choice to TensorFlow, which takes NCCL where all devices are GPUs.
      pack_megabytes: size in MiB, as they travel, of the packs that gradients are joined into between
        workers; a pack is sent as soon as its gradients are there. 0 is TensorFlow's default, all in
        one. null: 4 with "ring" or without GPUs, where one of float32 takes 1.4 to 2.4 times as long
        (`configs/results/all_reduce.json`), TensorFlow's default otherwise. No gradient is cut, and on
        one host TensorFlow makes one pack.
      timeout_seconds: how long any collective between workers may take, the wait for a worker that
        still compiles its first step included, before the run fails with DeadlineExceededError. null:
        for ever. For debugging: it costs a thread for each collective.
      wire_dtype: in which dtype gradients travel and, because TensorFlow sums what it is given, are
        summed. "float32" leaves them as they are, so float64 stays float64. "bfloat16" halves the
        bytes, and rounds every gradient and every partial sum to 8 significant bits; rows of sparse
        gradients (IndexedSlices) stay as they are.
    """

    implementation: Literal["auto", "ring", "nccl"] = "auto"
    pack_megabytes: NonNegativeFloat | None = None
    timeout_seconds: PositiveFloat | None = None
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
