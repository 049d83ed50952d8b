"""Sums over workers, by which all of them decide alike."""

from __future__ import annotations

import json

import pytest
from conftest import free_ports

from tf_largebatch._keras import tf
from tf_largebatch.distribution import worker_sums

BIG = 2**52 + 1
PROGRAM = f"""
import json
from tf_largebatch.distribution import strategies, worker_sums
strategy = strategies.strategy()
rank = worker_sums.rank(strategy)
loop = [worker_sums.total(strategy, [step, rank]) for step in range(30)]
# As the launchers do: one number, or one for each worker.
lengths = [worker_sums.total(strategy, [rank + 1] * length) for length in (1, 2, 3, 2, 1)]
print("told " + json.dumps({{
    "rank": rank,
    "workers": worker_sums.num_workers(strategy),
    "is_chief": worker_sums.is_chief(strategy),
    "loop": loop,
    "lengths": lengths,
    "negative": worker_sums.total(strategy, [-1 - rank, -{BIG}]),
    "of_chief": [worker_sums.of_chief(strategy, number) for number in (7 + rank, -5 - rank, {BIG} + rank, 0)],
}}), flush=True)
# Not before all are done: the end of one ends the others' sums.
worker_sums.total(strategy, [0])
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "strategy",
    [
        tf.distribute.get_strategy,
        lambda: tf.distribute.OneDeviceStrategy("/CPU:0"),
        lambda: tf.distribute.MirroredStrategy(["/CPU:0"]),
    ],
    ids=["none", "one device", "mirrored"],
)
def test_a_process_on_its_own_is_its_own_sum(strategy):
    alone = strategy()
    numbers = [3, -4, 0, 2**62]
    assert worker_sums.total(alone, numbers) == numbers
    assert worker_sums.total(alone, tuple(numbers)) == numbers
    assert worker_sums.of_chief(alone, 2**62) == 2**62
    assert (worker_sums.num_workers(alone), worker_sums.rank(alone), worker_sums.is_chief(alone)) == (1, 0, True)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("jobs", [("worker", "worker"), ("chief", "worker")], ids=" and ".join)
def test_workers_know_what_all_of_them_have(jobs, workers):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    tasks = [("worker", 0), ("worker", 1)] if jobs[0] == "worker" else [("chief", 0), ("worker", 0)]
    cluster = {"worker": addresses} if jobs[0] == "worker" else {"chief": addresses[:1], "worker": addresses[1:]}
    processes = []
    for kind, index in tasks:
        tf_config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        processes.append(workers.start("-c", PROGRAM, TF_CONFIG=tf_config))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs)):
        assert process.returncode == 0, output[-3000:]
        (line,) = [line for line in output.splitlines() if line.startswith("told ")]
        told = json.loads(line.removeprefix("told "))
        assert (told["rank"], told["workers"], told["is_chief"]) == (rank, 2, rank == 0)
        assert told["loop"] == [[2 * step, 1] for step in range(30)]
        assert told["lengths"] == [[3] * length for length in (1, 2, 3, 2, 1)]
        assert told["negative"] == [-3, -2 * BIG]
        assert told["of_chief"] == [7, -5, BIG, 0]
        # Of retracing, or of shapes that it cannot pack: a user could not do anything about it.
        assert "WARNING:tensorflow" not in output, output[-3000:]
