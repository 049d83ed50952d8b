"""For tests: workers with several CPU devices each, of which TensorFlow would use one."""

from __future__ import annotations

from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from tf_largebatch._keras import tf
from tf_largebatch.distribution import strategies


def use(count: int) -> None:
    """Gives MultiWorkerMirroredStrategy in this process `count` CPU devices, as if they were GPUs; call it first."""
    strategies.set_logical_cpus(count)

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        return tuple(f"{worker_device}/device:CPU:{index}" for index in range(count)), "CPU"

    CollectiveAllReduceExtended._initialize_local_devices = _initialize_local_devices
    one_process = strategies.replicas_per_worker
    strategies.replicas_per_worker = lambda cluster: count if cluster.num_workers > 1 else one_process(cluster)
    assert tf.config.list_physical_devices("GPU") == []
