"""Jobs for Kubernetes that its tests share, and their manifests read back."""

from __future__ import annotations

from typing import Any

import yaml

from tf_largebatch.supervisor.kubernetes_job import manifest
from tf_largebatch.supervisor.kubernetes_settings import KubernetesJob

EVERYTHING: dict[str, Any] = {
    "pull_policy": "Always",
    "environment": {"NCCL_DEBUG": "INFO", "EMPTY": "", "NUMBER": "1e3", "ANSWER": "y", "TEXT": 'é: "#\n- $(HOME) $$'},
    "max_restarts": 3,
    "grace": 90.5,
    "port": 12345,
    "gpus": 8,
    "cpu": "500m",
    "memory": "1.5Ti",
    "claim": "results.of-team",
    "mount_path": "/mnt/my results",
    "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100", "pool": "1e3"},
    "namespace": "team-a",
    "labels": {"team": "a_B.c", "example.com/cost": ""},
}
OPTION_SETS = [
    {},
    EVERYTHING,
    {"workers": 1},
    {"gpus": 1, "grace": 0},
    {"cpu": "8"},
    {"memory": "64Gi"},
    {"claim": "results"},
    {"name": "9" * 80, "workers": 1000},
    {"command": ["sh", "-c", "exec train '$HOME' > \"$(date)\"\n"]},
]


def job(**options: Any) -> KubernetesJob:
    return KubernetesJob(**{"name": "lars_b1k", "command": ["train", "--x"], "workers": 2, "image": "a/b:1", **options})


def documents(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    service, made = yaml.safe_load_all(manifest(job(**options)))
    return service, made


def pod_of(made: dict[str, Any]) -> dict[str, Any]:
    return made["spec"]["template"]["spec"]


def container_of(made: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod_of(made)["containers"]
    return container
