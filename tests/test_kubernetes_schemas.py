"""Manifests by the schemas that Kubernetes publishes, and by the rules of its API server that no schema tells."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from kubernetes_cases import EVERYTHING, OPTION_SETS, container_of, documents, pod_of


@pytest.fixture(scope="module")
def schemas():
    try:
        import kubernetes_validate
    except ImportError:
        if os.environ.get("CI"):
            pytest.fail("kubernetes-validate is not installed, though this is CI")
        pytest.skip("kubernetes-validate is not installed")
    return kubernetes_validate


# The first version in which all of it works without feature gates, and the last that is known.
@pytest.mark.parametrize("version", ["1.31", None])
@pytest.mark.parametrize("options", OPTION_SETS)
def test_the_published_schemas_know_every_key(schemas, options, version):
    version = version or schemas.latest_version()
    for document in documents(**options):
        assert schemas.validate(document, version, strict=True) == ".".join(version.split(".")[:2])


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("", "spek"),
        ("spec", "backoffLimitPerIndexes"),
        ("spec.podFailurePolicy.rules.0.onExitCodes", "value"),
        ("spec.template.spec", "subDomain"),
        ("spec.template.spec.containers.0", "imagePulPolicy"),
        ("spec.template.spec.volumes.0.persistentVolumeClaim", "claim"),
    ],
)
def test_a_misspelt_key_would_be_found(schemas, path, key):
    made = documents(**EVERYTHING)[1]
    place: Any = made
    for step in filter(None, path.split(".")):
        place = place[int(step) if step.isdigit() else step]
    place[key] = "x"
    with pytest.raises(schemas.ValidationError, match=key):
        schemas.validate(made, schemas.latest_version(), strict=True)


def broken_rules(service: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """What the API server checks and the schemas do not tell (pkg/apis/batch/validation of Kubernetes)."""
    spec, pod = made["spec"], pod_of(made)
    name = made["metadata"]["name"]
    rules = spec["podFailurePolicy"]["rules"]
    indexed = spec.get("completionMode") == "Indexed"
    mounts = container_of(made).get("volumeMounts", [])
    codes = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    label = re.compile("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
    kept = {
        "podFailurePolicy and backoffLimitPerIndex need restartPolicy Never": pod.get("restartPolicy") == "Never",
        "backoffLimitPerIndex needs Indexed": indexed or "backoffLimitPerIndex" not in spec,
        "successPolicy needs Indexed": indexed or "successPolicy" not in spec,
        "Indexed needs completions": not indexed or spec.get("completions", 0) > 0,
        "maxFailedIndexes needs backoffLimitPerIndex": "maxFailedIndexes" not in spec or "backoffLimitPerIndex" in spec,
        "podFailurePolicy needs podReplacementPolicy Failed": spec.get("podReplacementPolicy", "Failed") == "Failed",
        "a rule has one of two conditions": all(("onExitCodes" in r) != ("onPodConditions" in r) for r in rules),
        "a rule names a container": all(c["containerName"] == container_of(made)["name"] for c in codes),
        "exit codes are ordered, and not 0": all(sorted({*c["values"]} - {0}) == c["values"] for c in codes),
        "a condition has a status": all("status" in c for r in rules for c in r.get("onPodConditions", [])),
        "the hostname of the last pod is a label": bool(label.fullmatch(f"{name}-{spec['completions'] - 1}")),
        "a Service begins with a letter": bool(label.fullmatch(service["metadata"]["name"])),
        "pods are named by the Service": pod.get("subdomain") == service["metadata"]["name"],
        "the Service is headless": service["spec"].get("clusterIP") == "None",
        "the Service finds the pods": service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name},
        "both are in one namespace": service["metadata"].get("namespace") == made["metadata"].get("namespace"),
        "all pods run at once": spec["parallelism"] == spec["completions"],
        "every mount has a volume": {m["name"] for m in mounts} == {v["name"] for v in pod.get("volumes", [])},
    }
    return [rule for rule, is_kept in kept.items() if not is_kept]


@pytest.mark.parametrize("options", OPTION_SETS)
def test_the_rules_that_no_schema_tells_are_kept(options):
    assert broken_rules(*documents(**options)) == []


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("spec.template.spec.restartPolicy", "OnFailure", "need restartPolicy Never"),
        ("spec.completionMode", "NonIndexed", "backoffLimitPerIndex needs Indexed"),
        ("spec.podReplacementPolicy", "TerminatingOrFailed", "needs podReplacementPolicy Failed"),
        ("spec.podFailurePolicy.rules.0.onExitCodes.values", [64, 2, 3], "exit codes are ordered"),
        ("spec.podFailurePolicy.rules.0.onExitCodes.containerName", "main", "a rule names a container"),
        ("spec.template.spec.subdomain", "other", "pods are named by the Service"),
    ],
)
def test_a_broken_rule_would_be_found_and_not_by_the_schemas(schemas, path, value, rule):
    service, made = documents(**EVERYTHING)
    *steps, last = path.split(".")
    place: Any = made
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    schemas.validate(made, schemas.latest_version(), strict=True)
    assert any(rule in broken for broken in broken_rules(service, made))
