"""Who trains together in an Indexed Job of Kubernetes, from what each of its pods finds in its environment.

Kubernetes tells a pod its own index, and a pod with a headless Service has the name `JOB-INDEX.SERVICE`. What
else is needed to name all pods, the manifest puts beside it (`supervisor/kubernetes_job.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tf_largebatch.validation import InputError

# Set by Kubernetes in every container of an Indexed Job.
INDEX = "JOB_COMPLETION_INDEX"
_WORKERS = "TFLB_KUBERNETES_WORKERS"
_JOB = "TFLB_KUBERNETES_JOB"
_SERVICE = "TFLB_KUBERNETES_SERVICE"
_PORT = "TFLB_KUBERNETES_PORT"

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def pod_variables(job: str, service: str, workers: int, port: int) -> dict[str, str]:
    """What `worker_addresses` reads, beside the index; the same for every pod of a job."""
    return {_WORKERS: str(workers), _JOB: job, _SERVICE: service, _PORT: str(port)}


def worker_addresses(environment: Mapping[str, str]) -> tuple[list[str], int] | None:
    """The `host:port` of all pods of this job in order, and which of them this one is.

    The hosts are short names: a resolver looks in the pod's own namespace first, which is the job's, whatever
    the domain of the Kubernetes cluster is called.

    Returns:
      (addresses, index of this pod); None outside an Indexed Job, in one that was not made by this package, and
      in a job of one pod.

    Raises:
      InputError: one of the variables is missing or wrong.
    """
    told = {name: environment.get(name, "").strip() for name in (_WORKERS, _JOB, _SERVICE, _PORT)}
    index_text = environment.get(INDEX, "").strip()
    if not index_text or not any(told.values()):
        return None
    for name, value in told.items():
        # Alone, each pod would train on its own, and all would write to the same folder.
        if not value:
            raise InputError(f"{name} is missing beside {INDEX}; take it from the manifest that the launcher wrote.")
    for name in (_JOB, _SERVICE):
        if not _NAME.fullmatch(told[name]):
            raise InputError(f"{name} is {told[name]!r}, but must be a DNS name of small letters, digits and '-'.")
    workers = _whole_number(_WORKERS, told[_WORKERS], 1, 10**9)
    index = _whole_number(INDEX, index_text, 0, workers - 1)
    port = _whole_number(_PORT, told[_PORT], 1, 65535)
    if workers == 1:
        return None
    return [f"{told[_JOB]}-{rank}.{told[_SERVICE]}:{port}" for rank in range(workers)], index


def _whole_number(name: str, text: str, least: int, most: int) -> int:
    # int() would take " 1_0" and digits of other scripts.
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise InputError(f"{name} is {text!r}, but must be a whole number from {least} to {most}.")
    return int(text)
