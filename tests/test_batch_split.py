"""global = replicas x micro_batches x per_replica, against brute force."""

from __future__ import annotations

import itertools
import re

import pytest
from one_sentence import refusal

from tf_largebatch.distribution import batch_split
from tf_largebatch.distribution.batch_split import BatchSplit

BATCHES, WORKERS, DEVICES = range(1, 65), range(1, 7), range(1, 5)
CASES = list(itertools.product(BATCHES, WORKERS, DEVICES))


def divides(batch: int, workers: int, devices: int) -> bool:
    """By handing out examples one by one: whether all replicas end with as many, and with any."""
    shares = [0] * (workers * devices)
    for example in range(batch):
        shares[example % len(shares)] += 1
    return len(set(shares)) == 1 and shares[0] > 0


def test_a_batch_that_divides_is_split_so_that_the_equation_holds():
    split_up = [case for case in CASES if divides(*case)]
    assert len(split_up) > 100
    for batch, workers, devices in split_up:
        split = batch_split.split(batch, workers, devices)
        assert (split.global_batch_size, split.num_workers, split.replicas_per_worker) == (batch, workers, devices)
        assert split.replicas == workers * devices
        assert split.replicas * split.micro_batches * split.per_replica_batch_size == batch


def test_the_replicas_own_every_example_once():
    """The slices as the class's docstring gives them."""
    for case in filter(lambda case: divides(*case), CASES):
        split = batch_split.split(*case)
        share = split.micro_batches * split.per_replica_batch_size
        owned = []
        for worker, replica in itertools.product(range(split.num_workers), range(split.replicas_per_worker)):
            first = (worker * split.replicas_per_worker + replica) * share
            owned += range(first, first + share)
        assert owned == list(range(split.global_batch_size))


def numbers(pattern: str, sentence: str) -> list[int]:
    found = re.search(pattern, sentence)
    return [int(number) for number in found.groups() if number] if found else []


def test_a_batch_that_does_not_divide_is_refused_with_ways_that_do():
    refused = [case for case in CASES if not divides(*case)]
    assert len(refused) > 100
    for batch, workers, devices in refused:
        sentence = refusal(batch_split.split, batch, workers, devices)
        assert f"global_batch_size is {batch}, which {workers * devices} replicas" in sentence
        # The nearest batches on both sides, 0 left out.
        below = [other for other in range(1, batch) if divides(other, workers, devices)][-1:]
        above = next(other for other in itertools.count(batch) if divides(other, workers, devices))
        assert numbers(r"use (\d+)(?: or (\d+))?[,.]", sentence) == [*below, above]
        # As many workers, or devices of each, as can share the batch that was asked for.
        fewer_workers = [other for other in range(1, workers) if divides(batch, other, devices)][-1:]
        fewer_devices = [other for other in range(1, devices) if divides(batch, workers, other)][-1:]
        assert numbers(r"or (\d+) workers?[,.]", sentence) == fewer_workers
        assert numbers(r"or (\d+) replicas? per worker\.", sentence) == fewer_devices


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((0, 1, 1), "global_batch_size is 0, but must be at least 1"),
        ((-8, 2, 2), "global_batch_size is -8, but must be at least 1"),
        ((8, 0, 1), "the number of workers is 0, but must be at least 1"),
        # Two negative numbers would multiply to a split that looks right.
        ((8, -2, -1), "the number of workers is -2, but must be at least 1"),
        ((8, 2, 0), "the number of replicas per worker is 0, but must be at least 1"),
    ],
)
def test_nothing_and_less_is_refused(case, said):
    assert said in refusal(batch_split.split, *case)


def test_one_process_is_the_default():
    assert batch_split.split(24) == batch_split.split(24, 1, 1) == BatchSplit(24, 1, 1, 24, 1)


@pytest.mark.parametrize(("case", "micro_batches", "per_replica"), [((24, 2, 3), 1, 4), ((24, 2, 3), 2, 2)])
def test_the_text_is_the_equation(case, micro_batches, per_replica):
    text = str(BatchSplit(*case, per_replica, micro_batches))
    batch, product = text.split(" = ")
    factors = [int(number) for number in re.findall(r"\d+(?= (?:replicas|micro-batches|examples))", product)]
    assert factors == [6, micro_batches, per_replica]
    assert int(batch) == factors[0] * factors[1] * factors[2] == 24
    assert "(2 workers x 3)" in text
