"""A job as a manifest for Kubernetes: a headless Service that names the pods, and an Indexed Job that runs them.

Kubernetes does there what the supervisor does elsewhere: it makes a failed pod anew, where that can help. Only
`apply` starts a program; the rest is text.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterable
from typing import Any

import yaml

from tf_largebatch.distribution import kubernetes
from tf_largebatch.supervisor.kubernetes_settings import KubernetesJob, check, job_name
from tf_largebatch.supervisor.watch import STOPPED_AND_SAVED
from tf_largebatch.validation import InputError

# As in supervise.py: the input is wrong (2, 64) or training diverged (3), so once more would end alike.
_NOT_RETRIED = [2, 3, 64]
_JOB_LABEL = "batch.kubernetes.io/job-name"
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"

# What a reader of the manifest may wonder about, by the start of the line that it stands above.
_COMMENTS = {
    "  publishNotReadyAddresses:": "Workers look one another up before all of them run.",
    "  backoffLimitPerIndex:": "A failed worker takes the others with it: one incident costs each pod one failure.",
    "  podReplacementPolicy:": "Two workers with one index would confuse the others.",
    "  successPolicy:": "Done when the chief is: a worker made anew after that would wait for it for ever.",
    "  podFailurePolicy:": "In order: bad input or diverged training, a pod that was evicted, stopped after saving.",
}


def manifest(job: KubernetesJob) -> str:
    """The YAML that `kubectl apply` takes.

    Raises:
      InputError: something in `job` is missing or wrong.
    """
    check(job)
    name = job_name(job.name, job.workers)
    labels = {"app.kubernetes.io/name": "tf-largebatch", "app.kubernetes.io/instance": name, **job.labels}
    metadata = {"name": name, **({"namespace": job.namespace} if job.namespace else {}), "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_JOB_LABEL: name}},
    }
    indexed_job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.workers,
            "parallelism": job.workers,
            "backoffLimitPerIndex": job.max_restarts,
            "maxFailedIndexes": 0,
            "podReplacementPolicy": "Failed",
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": labels}, "spec": _pod(job, name)},
        },
    }
    return _header(job, name) + _yaml(service) + _yaml(indexed_job)


def apply(text: str, kubectl_arguments: Iterable[str] = ()) -> str:
    """Hands a manifest to `kubectl apply`.

    Args:
      text: what `manifest` returned.
      kubectl_arguments: such as `--context=NAME`.

    Returns:
      What kubectl printed.

    Raises:
      InputError: there is no kubectl, or it reports an error.
    """
    command = ["kubectl", *kubectl_arguments, "apply", "-f", "-"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace")
    except OSError as failure:
        raise InputError(
            f"kubectl cannot be started ({failure.strerror}); install it, or apply the printed manifest elsewhere."
        ) from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        said = "; ".join(line.strip().rstrip(".") for line in lines if line.strip())
        raise InputError(f"kubectl did not take the manifest: {said}.")
    return done.stdout


def _failure_rules() -> list[dict[str, Any]]:
    def exit_codes(codes: list[int]) -> dict[str, Any]:
        return {"containerName": "worker", "operator": "In", "values": codes}

    return [
        {"action": "FailJob", "onExitCodes": exit_codes(_NOT_RETRIED)},
        # Before Kubernetes 1.35, status has no default.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": exit_codes([STOPPED_AND_SAVED])},
    ]


def _pod(job: KubernetesJob, name: str) -> dict[str, Any]:
    volumes, mounts = [], []
    if job.claim:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": job.claim}})
        mounts.append({"name": "work", "mountPath": job.mount_path})
    if job.gpus:
        # NCCL shares memory between the GPUs of a pod, for which the 64 MiB that a container has are too few.
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    environment = {
        "PYTHONUNBUFFERED": "1",
        **job.environment,
        **kubernetes.pod_variables(name, name, job.workers, job.port),
    }
    # No limit on cores: it would slow down reading without leaving more to others.
    requests = {"cpu": job.cpu, "memory": job.memory}
    limits = {"memory": job.memory, "nvidia.com/gpu": str(job.gpus) if job.gpus else None}
    container = {
        "name": "worker",
        "image": job.image,
        "imagePullPolicy": job.pull_policy,
        "command": [_literal(part) for part in job.command],
        "env": [{"name": variable, "value": _literal(value)} for variable, value in environment.items()],
        "ports": [{"containerPort": job.port}],
        "resources": _given({"requests": _given(requests), "limits": _given(limits)}),
        "volumeMounts": mounts,
    }
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if job.gpus else []
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace),
        # Or else every Service of the namespace adds its variables, such as NAME_PORT.
        "enableServiceLinks": False,
        "nodeSelector": dict(job.node_selector),
        "tolerations": tolerations,
        "containers": [_given(container)],
        "volumes": volumes,
    }
    return _given(pod)


def _literal(text: str) -> str:
    # Kubernetes would put a variable's value for "$(NAME)"; "$$" stands for one "$".
    return text.replace("$", "$$")


def _given(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value not in (None, [], {})}


def _header(job: KubernetesJob, name: str) -> str:
    kubectl = f"kubectl --namespace={job.namespace}" if job.namespace else "kubectl"
    pods = f"--selector={_JOB_LABEL}={name}"
    lines = [
        f"Trains with {job.workers} pods; needs Kubernetes 1.31 or later. With this text in FILE:",
        "",
        f"  {kubectl} apply -f FILE",
        f"  {kubectl} get pods {pods}",
        f"  {kubectl} logs --follow --tail=-1 {pods},{_INDEX_LABEL}=0",
        f"  {kubectl} delete -f FILE",
        "",
        "A Job cannot be changed, and stays when it has finished: delete it before the name is used again.",
        "All pods must fit at once, or those that run wait for the others.",
        f"Pods on several nodes need a claim {job.claim} that is ReadWriteMany."
        if job.claim
        else "There is no claim: what the pods write is lost with them, and a restart begins from nothing.",
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


class _Dumper(yaml.SafeDumper):
    """Quotes what kubectl's YAML, unlike PyYAML's, reads as something else than text, such as y and 1e3."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        plain = re.fullmatch("[A-Za-z][A-Za-z0-9_./-]+", data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_str)


def _yaml(document: dict[str, Any]) -> str:
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=float("inf"))
    lines = ["---"]
    for line in text.splitlines():
        start = line.partition(":")[0] + ":"
        if start in _COMMENTS:
            lines.append(f"  # {_COMMENTS[start]}")
        lines.append(line)
    return "\n".join(lines) + "\n"
