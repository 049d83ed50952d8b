"""How a worker meets the others, which TensorFlow waits for without a limit and without hearing a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# TensorFlow has no public way to set its coordination service up.
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl

from tf_largebatch import worker_events
from tf_largebatch._keras import tf
from tf_largebatch.distribution.cluster import Cluster

# As `timeout` and the supervisor have it.
_TIMED_OUT = 124
# Short: a SIGTERM in between is lost.
_LIBC_PERIOD_SECS = 0.1
_SIG_DFL = 0
_LONGEST_MS = 2**31 - 1
_LIBRARY = "libtensorflow_cc.so.2"


@contextlib.contextmanager
def waiting(cluster: Cluster) -> Iterator[None]:
    """Around the making of a strategy of several workers, which returns when all have made theirs.

    Within it and after it SIGINT and SIGTERM end the process, as they do elsewhere: the wait runs no Python
    handler, and TensorFlow would take SIGTERM for a notice that it only logs. After
    `cluster.start_timeout_secs` the process ends with code 124.
    """
    worker_events.tell("waiting")
    met = threading.Event()
    watch = threading.Thread(target=_watch, args=(met, cluster), name="waiting for workers", daemon=True)
    watch.start()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
    try:
        with _threads_run():
            yield
    finally:
        met.set()
        # It must not set a handler after this.
        watch.join()
        if is_main:
            signal.signal(signal.SIGINT, before)
            # TensorFlow's handler stays otherwise.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_events.tell("ready")


def _watch(met: threading.Event, cluster: Cluster) -> None:
    began, libc = time.monotonic(), ctypes.CDLL(None)
    while not met.wait(_LIBC_PERIOD_SECS):
        # Python's signal.signal is for the main thread, which waits.
        libc.signal(signal.SIGTERM, ctypes.c_void_p(_SIG_DFL))
        limit = cluster.start_timeout_secs
        if limit is not None and time.monotonic() >= began + limit:
            message = f"worker {cluster.rank}: the other workers had not started after {limit:g} s; giving up\n"
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                os.write(2, message.encode())
            os._exit(_TIMED_OUT)


@contextlib.contextmanager
def _threads_run() -> Iterator[None]:
    """Lets other threads run while TensorFlow waits, which it does in one call that holds Python's lock.

    The same function of TensorFlow's C API, called by ctypes, does not hold it. Where it is not found,
    workers wait without a limit.
    """
    binding = context.pywrap_tfe
    held = binding.TFE_EnableCollectiveOps
    try:
        library = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / _LIBRARY), mode=os.RTLD_NOLOAD)
        pointer_type = ctypes.c_void_p
        new_status = ctypes.CFUNCTYPE(pointer_type)(("TF_NewStatus", library))
        delete_status = ctypes.CFUNCTYPE(None, pointer_type)(("TF_DeleteStatus", library))
        get_code = ctypes.CFUNCTYPE(ctypes.c_int, pointer_type)(("TF_GetCode", library))
        get_message = ctypes.CFUNCTYPE(ctypes.c_char_p, pointer_type)(("TF_Message", library))
        enable = ctypes.CFUNCTYPE(None, pointer_type, ctypes.c_char_p, ctypes.c_size_t, pointer_type)(
            ("TFE_EnableCollectiveOps", library)
        )
        get_pointer = ctypes.PYFUNCTYPE(pointer_type, ctypes.py_object, ctypes.c_char_p)(
            ("PyCapsule_GetPointer", ctypes.pythonapi)
        )
    except (OSError, AttributeError):
        yield
        return

    def released(handle: Any, server: bytes) -> None:
        status = new_status()
        try:
            enable(get_pointer(handle, None), server, len(server), status)
            if code := get_code(status):
                text = get_message(status).decode("utf-8", "replace")
                raise errors_impl.exception_type_from_error_code(code)(None, None, text)
        finally:
            delete_status(status)

    binding.TFE_EnableCollectiveOps = released
    try:
        yield
    finally:
        binding.TFE_EnableCollectiveOps = held


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
        # 0 would be TensorFlow's own limit.
        heartbeat_timeout_in_ms=int(min(max(cluster.heartbeat_timeout_secs * 1000, 1), _LONGEST_MS)),
    )
