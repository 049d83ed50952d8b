"""How gradients travel: the options TensorFlow gets, what is refused, and the sums on several replicas."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT, Workers, python
from gradient_sums import gradients
from one_sentence import refusal

from tf_largebatch._keras import tf
from tf_largebatch.collectives_config import Collectives
from tf_largebatch.distribution import strategies
from tf_largebatch.distribution.cluster import Cluster
from tf_largebatch.distribution.collectives import all_reduce_sum, check_collectives, communication_options

MIB = 2**20
PROGRAM = str(ROOT / "tests" / "gradient_sums.py")
DENSE = ["matrix", "large", "large too", "scalar", "double", "half", "count"]
ROUNDED = ["matrix", "large", "large too", "double"]
# A number rounded to the 8 significant bits of bfloat16 is off by at most this part of itself.
ROUNDING = 2.0**-8


@pytest.mark.parametrize(
    ("implementation", "megabytes", "has_gpus", "bytes_per_pack"),
    [
        ("auto", None, False, 4 * MIB),
        ("ring", None, False, 4 * MIB),
        ("ring", None, True, 4 * MIB),
        # 0 is TensorFlow's own default.
        ("auto", None, True, 0),
        ("nccl", None, True, 0),
        ("nccl", 50.0, True, 50 * MIB),
        ("ring", 0.0, False, 0),
        ("auto", 0.0, False, 0),
        ("auto", 0.5, False, MIB // 2),
        # Small, but not 0, which would be the largest of all.
        ("auto", 1e-9, False, 1),
    ],
)
def test_options_that_tensorflow_gets(implementation, megabytes, has_gpus, bytes_per_pack):
    options = communication_options(Collectives(implementation, megabytes), has_gpus)
    assert options.implementation.name.lower() == implementation
    assert options.bytes_per_pack == bytes_per_pack and isinstance(options.bytes_per_pack, int)
    assert options.timeout_seconds is None
    assert communication_options(Collectives(timeout_seconds=9), has_gpus).timeout_seconds == 9


@pytest.mark.parametrize(
    ("implementation", "workers", "replicas_per_worker", "has_gpus", "said"),
    [
        ("nccl", 2, 1, False, "collectives.implementation is 'nccl', which needs GPUs"),
        ("nccl", 1, 4, False, "collectives.implementation is 'nccl', which needs GPUs"),
        ("ring", 1, 8, True, "collectives.implementation is 'ring', which sums between workers"),
    ],
)
def test_what_the_devices_cannot_do_is_refused(implementation, workers, replicas_per_worker, has_gpus, said):
    collectives = Collectives(implementation)
    assert said in refusal(check_collectives, collectives, workers, replicas_per_worker, has_gpus)


@pytest.mark.parametrize(
    ("implementation", "workers", "replicas_per_worker", "has_gpus"),
    [
        ("nccl", 2, 1, True),
        ("nccl", 1, 8, True),
        ("ring", 2, 8, True),
        ("ring", 2, 1, False),
        # As TensorFlow does there anyway.
        ("ring", 1, 4, False),
        # The recipe of a cluster, tried on one device.
        ("nccl", 1, 1, False),
        ("ring", 1, 1, True),
    ],
)
def test_what_the_devices_can_do_is_not(implementation, workers, replicas_per_worker, has_gpus):
    check_collectives(Collectives(implementation), workers, replicas_per_worker, has_gpus)


def test_a_worker_refuses_before_it_waits_for_the_others():
    two = Cluster((("worker", ("127.0.0.1:1", "127.0.0.1:2")),), ("worker", 0))
    assert "needs GPUs" in refusal(strategies.strategy, two, Collectives("nccl"))


def test_nccl_on_one_host_is_asked_for_only_by_name(monkeypatch):
    # Stands in for two GPUs: what the strategy is told, not what it does.
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(strategies, "replicas_per_worker", lambda cluster: 2)
    device = tf.config.LogicalDevice("GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: [device, device])
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda devices, cross_device_ops: cross_device_ops)
    assert strategies.strategy(Cluster()) is None
    assert isinstance(strategies.strategy(Cluster(), Collectives("nccl")), tf.distribute.NcclAllReduce)


@pytest.mark.parametrize("strategy", [tf.distribute.get_strategy, lambda: tf.distribute.OneDeviceStrategy("/cpu:0")])
def test_one_replica_gets_its_gradients_back(strategy):
    given = [tf.constant([1.0009765625]), None, tf.IndexedSlices(tf.constant([1.5]), tf.constant([3]))]
    sums = strategy().run(lambda: all_reduce_sum(given, "bfloat16"))
    assert sums is not given and all(total is gradient for total, gradient in zip(sums, given))
    assert all_reduce_sum([]) == []


def test_outside_a_replica_there_is_no_sum():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(RuntimeError, match="outside strategy.run"):
        all_reduce_sum([tf.constant(1.0)])


@pytest.fixture(scope="module", params=["workers", "devices"])
def received(request, tmp_path_factory):
    """For two processes, or two devices of one: what each of two replicas received."""
    folder = tmp_path_factory.mktemp("sums")
    if request.param == "workers":
        job = Workers()
        try:
            job.run(2, PROGRAM, str(folder), timeout=300)
        finally:
            job.end()
    else:
        done = python(PROGRAM, str(folder), "2", timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    return [dict(np.load(folder / f"{replica}.npz")) for replica in (0, 1)]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("case", ["float32", "one pack", "no packs", "ring"])
def test_dense_sums_are_exact(received, case, name):
    first, second = gradients(0)[name], gradients(1)[name]
    for arrays in received:
        total = arrays[f"{case}/{name}"]
        assert total.dtype == first.dtype and total.shape == first.shape
        # Two numbers have one correctly rounded sum, in whatever order.
        np.testing.assert_array_equal(total, first + second)


@pytest.mark.parametrize("name", DENSE)
def test_sums_in_bfloat16_are_as_near_as_its_rounding(received, name):
    first, second = gradients(0)[name], gradients(1)[name]
    for arrays in received:
        total = arrays[f"bfloat16/{name}"]
        assert total.dtype == first.dtype and total.shape == first.shape
        if name in ("half", "count"):
            np.testing.assert_array_equal(total, first + second)
            continue
        # |rounded(a') + rounded(b') - (a + b)| <= u (|a| + |b|), and the sum is rounded too.
        summands = np.abs(first).astype(np.float64) + np.abs(second)
        bound = ROUNDING * summands + ROUNDING * (1 + ROUNDING) * summands
        assert np.all(np.abs(total - (first.astype(np.float64) + second)) <= bound)
        if name in ROUNDED:
            # 16 bits did travel: what is left has 8 significant ones, the sum's own.
            assert np.any(total != first + second)
            np.testing.assert_array_equal(total, tf.cast(tf.cast(total, tf.bfloat16), total.dtype))


@pytest.mark.parametrize("case", ["float32", "bfloat16", "one pack", "no packs", "ring"])
def test_sparse_rows_of_all_replicas_arrive_whole(received, case):
    for arrays in received:
        for part in ("values", "indices"):
            np.testing.assert_array_equal(
                arrays[f"{case}/{part}"], np.concatenate([gradients(0)[part], gradients(1)[part]])
            )


@pytest.mark.parametrize("received", ["workers"], indirect=True)
def test_the_strategy_packs_as_the_recipe_says(received):
    # TensorFlow goes through matrix, large, large too, scalar from the end, and closes a pack that is above
    # the limit, here 0.25 MiB: scalar and large too; large; matrix. Other dtypes have packs of their own.
    packs = {case: list(received[0][f"{case}/packs"]) for case in ("float32", "ring", "one pack", "no packs")}
    assert packs == {"float32": [3, 1, 1, 1], "ring": [3, 1, 1, 1], "one pack": [1, 1, 1, 1], "no packs": [4, 1, 1, 1]}
    # Half the bytes: double, scalar, large too, large; matrix.
    assert list(received[0]["bfloat16/packs"]) == [2, 1, 1]
