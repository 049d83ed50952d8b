"""global = replicas x micro_batches x per_replica, against brute force."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

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
        owned = []
        for worker, replica in itertools.product(range(split.num_workers), range(split.replicas_per_worker)):
            first = (worker * split.replicas_per_worker + replica) * split.share
            owned += range(first, first + split.share)
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
        ((8, 2, 1, 0), "max_per_replica_batch_size is 0, but must be at least 1"),
        ((8, 2, 1, None, -4), "batch_norm_group_size is -4, but must be at least 1"),
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


def test_a_limit_makes_micro_batches_and_none_is_no_limit():
    assert batch_split.split(48, 2, 2, 5) == BatchSplit(48, 2, 2, 4, 3)
    assert batch_split.split(48, 2, 2, 12) == batch_split.split(48, 2, 2) == BatchSplit(48, 2, 2, 12, 1)
    assert batch_split.split(48, 2, 2, 5).share == 12


# Shares with many divisors and with few, groups that fit and that do not.
GROUPED = list(
    itertools.product((1, 6, 7, 12, 24, 36), (1, 2, 3), (1, 2), (None, 1, 2, 4, 6, 7, 40), (None, 1, 3, 4, 8, 12, 24))
)


def micro_batches(batch: int, workers: int, devices: int, limit: int | None, group: int | None) -> list[int]:
    """Every micro-batch that is allowed, by cutting a replica's examples up and looking at the pieces."""
    if not divides(batch, workers, devices):
        return []
    examples = list(range(batch // (workers * devices)))
    found = []
    for size in range(1, (limit or batch) + 1):
        pieces = [examples[first : first + size] for first in range(0, len(examples), size)]
        equal = all(len(piece) == size for piece in pieces)
        whole = group is None or all(len(piece) % group == 0 for piece in pieces)
        if equal and (whole or (group == batch and len(pieces) == 1)):
            found.append(size)
    return found


def test_micro_batches_are_the_largest_that_keep_the_limit_and_the_groups():
    split_up = [case for case in GROUPED if micro_batches(*case)]
    assert len(split_up) > 100
    for case in split_up:
        split = batch_split.split(*case)
        assert (split.global_batch_size, split.num_workers, split.replicas_per_worker) == case[:3]
        assert split.replicas * split.micro_batches * split.per_replica_batch_size == case[0]
        assert split.per_replica_batch_size == max(micro_batches(*case))


def nearest(number: int, candidates: Iterable[int]) -> list[int]:
    """The candidates next to a number, below and above."""
    candidates = list(candidates)
    return [n for n in candidates if n < number][-1:] + [n for n in candidates if n > number][:1]


def test_what_no_micro_batch_fits_is_refused_with_ways_that_do():
    refused = [case for case in GROUPED if divides(*case[:3]) and not micro_batches(*case)]
    too_small = [case for case in refused if micro_batches(*case[:3], None, case[4])]
    assert len(too_small) > 50 and len(refused) - len(too_small) > 50
    for batch, workers, devices, limit, group in too_small:
        sentence = refusal(batch_split.split, batch, workers, devices, limit, group)
        assert sentence.startswith(f"max_per_replica_batch_size is {limit}, but ")
        enough = next(n for n in itertools.count(limit) if micro_batches(batch, workers, devices, n, group))
        assert numbers(r"use (\d+) or more\.", sentence) == [enough]
    for batch, workers, devices, limit, group in set(refused) - set(too_small):
        sentence = refusal(batch_split.split, batch, workers, devices, limit, group)
        assert sentence.startswith(f"batch_norm_group_size is {group}, which does not divide the ")
        every = range(1, batch + 1)
        groups = nearest(group, (n for n in every if micro_batches(batch, workers, devices, limit, n)))
        assert numbers(r"use (\d+)(?: or (\d+))?[,.]", sentence) == groups
        more = nearest(workers, (n for n in every if micro_batches(batch, n, devices, limit, group)))
        assert numbers(r"or (?:(\d+) or )?(\d+) workers?[,.]", sentence) == more
        more = nearest(devices, (n for n in every if micro_batches(batch, workers, n, limit, group)))
        assert numbers(r"or (?:(\d+) or )?(\d+) replicas? per worker\.", sentence) == more


def test_a_batch_that_does_not_divide_is_refused_with_ways_that_keep_groups_whole():
    refused = [case for case in GROUPED if case[4] and not divides(*case[:3])]
    assert len(refused) > 100
    for batch, workers, devices, limit, group in refused:
        sentence = refusal(batch_split.split, batch, workers, devices, limit, group)
        named = numbers(r"cannot share evenly; use (\d+)(?: or (\d+))?", sentence)
        assert (" for it and for batch_norm_group_size" in sentence) == (group == batch)
        # A limit below the group would be refused after that.
        for other in named:
            assert micro_batches(other, workers, devices, None, other if group == batch else group)
        fewer = [n for n in range(1, workers) if micro_batches(batch, n, devices, limit, group)][-1:]
        assert numbers(r"or (\d+) workers?[,.]", sentence) == fewer


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((40, 2, 2, None, 8), "batch_norm_group_size is 8, which does not divide the 10 examples that each of 4"),
        ((42, 2, 2, None, 8), "cannot share evenly; use 32 or 64."),
        ((10, 4, 1, None, 10), "use 8 or 12 for it and for batch_norm_group_size, or 2 workers."),
        ((10, 4, 1, 3, 10), "use 8 or 12 for it and for batch_norm_group_size."),
        ((48, 2, 2, 8, 48), "takes a replica's 12 examples at once; use 12 or more."),
        ((48, 2, 2, 3, 4), "a batch-norm group takes 4 examples at once; use 4 or more."),
        ((48, 2, 1, None, 16), "each of 2 replicas (2 workers x 1) takes of a global batch; use 12 or 24, or 1 or 3 "),
    ],
)
def test_groups_are_kept_whole(case, said):
    assert said in refusal(batch_split.split, *case)
