"""What a strategy is told of a worker's GPUs, of which there are none here: TensorFlow's list of them is made up."""

from __future__ import annotations

import pytest

from tf_largebatch._keras import tf
from tf_largebatch.distribution import strategies
from tf_largebatch.distribution.cluster import of_workers


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_worker_takes_all_its_gpus(monkeypatch, gpus):
    def listed(kind=None):
        return (
            [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(gpus)]
            if kind == "GPU"
            else []
        )

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    cluster = of_workers(["a:1", "b:1"], 1)
    resolver = strategies.cluster_resolver(cluster)
    # What MultiWorkerMirroredStrategy reads; without it, it trains on the CPU of a machine with GPUs.
    assert resolver.num_accelerators().get("GPU", 0) == gpus
    assert strategies.replicas_per_worker(cluster) == (gpus or 1)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
