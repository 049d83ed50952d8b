"""How a worker meets the others, which TensorFlow waits for without a limit and without hearing a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

# TensorFlow has no public way to set its coordination service up.
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context

from tf_largebatch import worker_events
from tf_largebatch._keras import tf
from tf_largebatch.distribution.cluster import Cluster

# As `timeout` and the supervisor have it.
_TIMED_OUT = 124
_LIBC_PERIOD_SECS = 0.5
_SIG_DFL = 0


@contextlib.contextmanager
def waiting(cluster: Cluster) -> Iterator[None]:
    """Around the making of a strategy of several workers, which returns when all have made theirs.

    Within it and after it SIGINT and SIGTERM end the process, as they do elsewhere: the wait runs no Python
    handler, and TensorFlow would take SIGTERM for a notice that it only logs. After
    `cluster.start_timeout_secs` the process ends with code 124.
    """
    worker_events.tell("waiting")
    met = threading.Event()
    threading.Thread(target=_watch, args=(met, cluster), name="waiting for workers", daemon=True).start()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    try:
        yield
    finally:
        met.set()
        if is_main:
            signal.signal(signal.SIGINT, before)
            # TensorFlow's handler stays otherwise.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_events.tell("ready")


def _watch(met: threading.Event, cluster: Cluster) -> None:
    limit, waited = cluster.start_timeout_secs, 0.0
    while not met.wait(_LIBC_PERIOD_SECS):
        # Python's signal.signal is for the main thread, which waits.
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(_SIG_DFL))
        waited += _LIBC_PERIOD_SECS
        if limit is not None and waited >= limit:
            sys.stdout.flush()
            message = f"worker {cluster.rank}: the other workers had not started after {limit:g} s; giving up\n"
            os.write(sys.stderr.fileno(), message.encode())
            os._exit(_TIMED_OUT)


def set_heartbeat(cluster: Cluster, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Sets after how long without a sign of life a worker counts as lost; before the strategy is made."""
    if cluster.heartbeat_timeout_secs is None:
        return
    spec = resolver.cluster_spec()
    # Given in part, the rest would be left out too.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        coordinated_jobs=[
            context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=spec.num_tasks(job))
            for job, _ in cluster.jobs
        ],
        heartbeat_timeout_in_ms=int(cluster.heartbeat_timeout_secs * 1000),
    )
