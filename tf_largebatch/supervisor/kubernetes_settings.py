"""What is asked of Kubernetes for one job, and what it would refuse of that.

kubectl would say so too, but in the words of its own fields, and some faults it would only show as pods that
never run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tf_largebatch.validation import InputError, NonNegativeFloat, NonNegativeInt, PositiveInt, checked, unknown

_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_LONGEST_LABEL = 63
_DNS_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


@dataclass(frozen=True)
class KubernetesJob:
    """What is trained by which pods.

    Attributes:
      name: of the recipe; Kubernetes gets `job_name` of it.
      command: of every pod, program first.
      workers: how many pods.
      image: container image that holds this package.
      pull_policy: Always, IfNotPresent or Never; None: as Kubernetes has it.
      environment: variables of every pod.
      max_restarts: how many failures each pod may have; all together fail in one incident.
      grace: seconds from SIGTERM to SIGKILL, in which a worker saves.
      port: on which every worker listens.
      gpus: of NVIDIA, for each pod.
      cpu: cores for each pod, such as "8" or "500m".
      memory: for each pod, with its unit, such as "64Gi".
      claim: PersistentVolumeClaim that all pods mount.
      mount_path: where they mount it.
      node_selector: labels of the nodes on which pods may run.
      namespace: None: the one that kubectl is set to.
      labels: of everything that is made.
    """

    name: str
    command: Sequence[str]
    workers: int
    image: str
    pull_policy: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace: float = 30.0
    port: int = 2222
    gpus: int = 0
    cpu: str | None = None
    memory: str | None = None
    claim: str | None = None
    mount_path: str = "/work"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def job_name(name: str, workers: int) -> str:
    """The name of Job and Service: a DNS label that leaves room for the "-INDEX" of the pods.

    Raises:
      InputError: nothing in it can stand in such a name.
    """
    label = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label:
        raise InputError(f"name is {name!r}, but must hold a letter from a to z or a digit to name a Kubernetes Job.")
    # A Service, unlike a Job, must begin with a letter.
    label = label if label[0].isalpha() else f"job-{label}"
    room = _LONGEST_LABEL - len(f"-{workers - 1}")
    if len(label) > room:
        # Recipes of one family begin alike; cut short, they would be one.
        ending = "-" + hashlib.sha256(name.encode(errors="replace")).hexdigest()[:6]
        label = label[: room - len(ending)].rstrip("-") + ending
    return label


def check(job: KubernetesJob) -> None:
    """Refuses what Kubernetes would refuse, or would take for something else.

    Raises:
      InputError: naming the first fault.
    """
    if not job.image:
        raise InputError("image is missing: name a container image that holds tf_largebatch.")
    _match("image", job.image, r"\S+", "the name of a container image, without spaces")
    checked("workers", job.workers, PositiveInt)
    checked("gpus", job.gpus, NonNegativeInt)
    checked("max_restarts", job.max_restarts, NonNegativeInt)
    checked("grace", job.grace, NonNegativeFloat)
    if not 1 <= checked("port", job.port, PositiveInt) <= 65535:
        raise InputError(f"port is {job.port!r}, but must be at most 65535.")
    if not job.command:
        raise InputError("command is empty, but must be a program and its arguments.")
    if job.pull_policy is not None and job.pull_policy not in _PULL_POLICIES:
        raise InputError(f"{unknown('pull_policy', job.pull_policy, _PULL_POLICIES)}.")
    _match("cpu", job.cpu, r"[0-9]+(\.[0-9]+)?|[0-9]+m", "a number of cores, such as 8, 0.5 or 500m")
    # Without a unit it would be bytes, and "m" thousandths of them.
    _match("memory", job.memory, r"[0-9]+(\.[0-9]+)?[KMGT]i|[0-9]+(\.[0-9]+)?[kMGT]", "an amount such as 64Gi")
    _match("namespace", job.namespace, _DNS_LABEL, "at most 63 small letters, digits and '-'")
    _match("claim", job.claim, _DNS_NAME, "the name of a PersistentVolumeClaim: small letters, digits and '-'")
    _match("mount_path", job.mount_path, "/[^:]+", "an absolute path below / without ':'")
    for name in job.environment:
        _match("the name of a variable in environment", name, "[-._A-Za-z][-._A-Za-z0-9]*", "letters, digits and '_'")
    for argument, labels in (("labels", job.labels), ("node_selector", job.node_selector)):
        for key, value in labels.items():
            _match(f"a key of {argument}", key, f"({_DNS_NAME}/)?{_WORD}", "such as pool or example.com/pool")
            _match(f"{argument}[{key!r}]", value, f"({_WORD})?", "at most 63 letters, digits, '-', '_' and '.'")


def _match(argument: str, value: str | None, pattern: str, allowed: str) -> None:
    if value is not None and not re.fullmatch(pattern, value):
        raise InputError(f"{argument} is {value!r}, but must be {allowed}.")
