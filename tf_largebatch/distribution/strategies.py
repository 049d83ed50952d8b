"""A `Cluster` to the `tf.distribute` strategy that trains on it."""

from __future__ import annotations

import os
import socket
import zlib

from tf_largebatch import worker_events
from tf_largebatch._keras import tf
from tf_largebatch.collectives_config import Collectives
from tf_largebatch.distribution import keras3_repairs, meeting, worker_sums
from tf_largebatch.distribution.cluster import Cluster, from_environment, take_own_gpus
from tf_largebatch.distribution.collectives import check_collectives, communication_options
from tf_largebatch.validation import InputError


def strategy(cluster: Cluster | None = None, collectives: Collectives | None = None) -> tf.distribute.Strategy:
    """The strategy for this process: MultiWorkerMirrored, Mirrored over its devices, or OneDevice.

    It repairs Keras 3 (`keras3_repairs.py`), and with several workers waits until all have started.
    Call it before any other use of TensorFlow: the devices are fixed then.

    Args:
      cluster: as `cluster.from_environment` gives it; None reads TF_CONFIG.
      collectives: the recipe's; None is the default.

    Raises:
      InputError: TF_CONFIG is wrong, this worker's port is taken, or these devices cannot sum as
        `collectives` wants it.
    """
    cluster = from_environment(os.environ) if cluster is None else cluster
    take_own_gpus(os.environ)
    collectives = Collectives() if collectives is None else collectives
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    check_collectives(collectives, cluster.num_workers, replicas_per_worker(cluster), has_gpus)
    if cluster.num_workers > 1:
        check_port(cluster)
        keras3_repairs.apply()
        resolver = cluster_resolver(cluster)
        meeting.set_heartbeat(cluster, resolver)
        with meeting.waiting(cluster):
            return tf.distribute.MultiWorkerMirroredStrategy(
                cluster_resolver=resolver, communication_options=communication_options(collectives, has_gpus)
            )
    worker_events.tell("ready")
    kind = "GPU" if has_gpus else "CPU"
    keras3_repairs.apply()
    devices = [f"/{device.device_type}:{index}" for index, device in enumerate(tf.config.list_logical_devices(kind))]
    if len(devices) == 1:
        return tf.distribute.OneDeviceStrategy(devices[0])
    # Without a wish TensorFlow chooses: NCCL on GPUs, its ring on CPUs.
    nccl = tf.distribute.NcclAllReduce() if collectives.implementation == "nccl" else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=nccl)


def cluster_resolver(cluster: Cluster) -> tf.distribute.cluster_resolver.ClusterResolver:
    """What tells TensorFlow of the cluster, and of this worker's GPUs."""
    gpus = replicas_per_worker(cluster) if tf.config.list_physical_devices("GPU") else 0
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({name: list(addresses) for name, addresses in cluster.jobs}),
        task_type=cluster.task[0],
        task_id=cluster.task[1],
        # This resolver looks for no devices, and the strategy takes the CPU where it is told of none.
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )


def check_same_on_all_workers(strategy: tf.distribute.Strategy, text: str) -> None:
    """Raises InputError on every worker where the workers were given different texts.

    Otherwise they would meet with different collectives, and fail with an error that names none of it.
    """
    own = zlib.crc32(text.encode())
    if worker_sums.total(strategy, [own])[0] != own * worker_sums.num_workers(strategy):
        raise InputError("the workers were started with different recipes; give all the same --config and --set.")


def replicas_per_worker(cluster: Cluster) -> int:
    """How many replicas `strategy(cluster)` gives this worker, without starting TensorFlow's runtime.

    One for each GPU. Without GPUs: one for each logical CPU device of a process on its own, and
    one in a cluster, where tf.distribute uses a single CPU device.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and cluster.num_workers > 1:
        return 1
    devices = gpus or tf.config.list_physical_devices("CPU")
    return sum(len(tf.config.get_logical_device_configuration(device) or [device]) for device in devices)


def set_logical_cpus(count: int) -> None:
    """Makes this process see `count` CPU devices, to try a recipe's split on a machine without GPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def quiet() -> None:
    """Leaves out what TensorFlow's Python code tells of each collective it builds."""
    tf.get_logger().setLevel("WARNING")


class PortTaken(InputError):
    """Another process listens on this worker's port; another time, or on another port, the same job can run."""

    exit_code = 1


def check_port(cluster: Cluster) -> None:
    """Raises PortTaken where another process listens on this worker's port.

    TensorFlow itself would fail deep inside the start of its server while the peers wait.
    """
    port = int(cluster.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        # A port in TIME_WAIT is free for TensorFlow's server too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as failure:
            raise PortTaken(
                f"TF_CONFIG: port {port} of this worker ({cluster.task[0]} {cluster.task[1]}) is not free "
                f"({failure.strerror}); end the process that uses it or choose another port."
            ) from None
