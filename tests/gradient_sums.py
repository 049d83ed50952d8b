"""Program for tests: `all_reduce_sum` on some replicas of this process, or on the workers of TF_CONFIG.

    python gradient_sums.py FOLDER [REPLICAS]

Writes what each replica received into FOLDER/REPLICA.npz, as arrays named `case/gradient`, and `case/packs`:
into how many packs TensorFlow says that it joined the dense gradients, for each dtype.
"""

from __future__ import annotations

import logging
import os
import re
import sys

import numpy as np

PACK_MEGABYTES = 0.25


def gradients(replica: int) -> dict[str, np.ndarray]:
    """One replica's gradients; "values" and "indices" are one sparse gradient."""
    draw = np.random.default_rng(replica)
    # The large ones have 0.27 MiB each.
    shapes = {"matrix": (37, 5), "large": (70_000,), "large too": (70_000,), "scalar": (), "values": (4, 3)}
    given = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given["indices"] = np.array([2, 5, 2, replica])
    given["double"] = draw.normal(size=6)
    given["half"] = draw.normal(size=6).astype(np.float16)
    given["count"] = np.arange(3, dtype=np.int32) + replica
    return given


def main() -> None:
    from tf_largebatch._keras import tf
    from tf_largebatch.collectives_config import Collectives
    from tf_largebatch.distribution import strategies
    from tf_largebatch.distribution.collectives import all_reduce_sum

    folder, alone = sys.argv[1], "TF_CONFIG" not in os.environ
    if alone:
        strategies.set_logical_cpus(int(sys.argv[2]))
    strategy = strategies.strategy(collectives=Collectives(pack_megabytes=PACK_MEGABYTES))
    options = tf.distribute.experimental.CommunicationOptions
    cases = {
        "float32": ("float32", None),
        "bfloat16": ("bfloat16", None),
        "one pack": ("float32", options(bytes_per_pack=2**30)),
        "no packs": ("float32", options(bytes_per_pack=1)),
        "ring": ("float32", options(implementation=tf.distribute.experimental.CommunicationImplementation.RING)),
    }

    def of_replica(name):
        return lambda context: tf.constant(gradients(context.replica_id_in_sync_group)[name])

    given = {name: strategy.experimental_distribute_values_from_function(of_replica(name)) for name in gradients(0)}
    log = tf.get_logger()
    log.setLevel("INFO")
    said = []
    log.addHandler(logging.Handler())
    log.handlers[-1].emit = lambda record: said.append(record.getMessage())

    def step(wire_dtype, call_options):
        def sums(given):
            dense = {name: gradient for name, gradient in given.items() if name not in ("values", "indices")}
            rows = tf.IndexedSlices(given["values"], given["indices"], tf.constant([9, 3]))
            rows, none, *others = all_reduce_sum([rows, None, *dense.values()], wire_dtype, options=call_options)
            assert none is None and isinstance(rows, tf.IndexedSlices) and len(others) == len(dense)
            return {"values": rows.values, "indices": rows.indices, **dict(zip(dense, others))}

        # The gradients as arguments: such tensors have no device.
        return tf.function(lambda given: strategy.run(sums, args=(given,)))

    received = {}
    for case, arguments in cases.items():
        for name, value in step(*arguments)(given).items():
            received[f"{case}/{name}"] = strategy.experimental_local_results(value)
        packs = [int(packs) for packs in re.findall(r"num_packs = (\d+)", "\n".join(said))]
        received[f"{case}/packs"] = [packs] * len(value.values if alone else [value])
        said.clear()
    first = 0 if alone else strategy.cluster_resolver.task_id
    for index in range(strategy.num_replicas_in_sync if alone else 1):
        np.savez(f"{folder}/{first + index}.npz", **{key: np.array(each[index]) for key, each in received.items()})


if __name__ == "__main__":
    main()
