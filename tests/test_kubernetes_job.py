"""The manifest of a job: what it says, what is refused, and what becomes of it in the hands of kubectl."""

from __future__ import annotations

import copy
import os
import re

import pytest
from kubernetes_cases import EVERYTHING, container_of, documents, job, pod_of
from one_sentence import assert_one_sentence, refusal

from tf_largebatch.supervisor import kubernetes_job, supervise, watch
from tf_largebatch.supervisor.kubernetes_job import manifest
from tf_largebatch.supervisor.kubernetes_settings import job_name
from tf_largebatch.validation import InputError


def expanded(text: str) -> str:
    """What Kubernetes makes of a command or a variable: `$$` is a dollar, and `$(NAME)` another variable."""
    assert not re.search(r"\$\(", text.replace("$$", "")), f"another variable would be put into {text!r}"
    return text.replace("$$", "$")


def test_each_end_of_a_pod_is_treated_as_the_supervisor_does():
    spec = documents(max_restarts=4)[1]["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (4, 0)
    final, evicted, stopped = spec["podFailurePolicy"]["rules"]
    assert final["action"] == "FailJob" and evicted["action"] == stopped["action"] == "Ignore"
    assert {0, *final["onExitCodes"]["values"]} == set(supervise._NOT_RETRIED)
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert stopped["onExitCodes"]["values"] == [watch.STOPPED_AND_SAVED]
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_the_pod_has_what_was_asked_for():
    service, made = documents(**EVERYTHING)
    pod, container = pod_of(made), container_of(made)
    environment = {variable["name"]: expanded(variable["value"]) for variable in container["env"]}
    assert environment.items() >= EVERYTHING["environment"].items()
    assert (container["image"], container["imagePullPolicy"]) == ("a/b:1", "Always")
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "1.5Ti"},
        "limits": {"memory": "1.5Ti", "nvidia.com/gpu": "8"},
    }
    assert pod["terminationGracePeriodSeconds"] == 91
    assert pod["nodeSelector"] == EVERYTHING["node_selector"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    volumes = {volume.pop("name"): volume for volume in copy.deepcopy(pod["volumes"])}
    assert volumes == {
        "work": {"persistentVolumeClaim": {"claimName": "results.of-team"}},
        "shared-memory": {"emptyDir": {"medium": "Memory"}},
    }
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "work": "/mnt/my results",
        "shared-memory": "/dev/shm",
    }
    for labelled in (service, made, made["spec"]["template"]):
        assert labelled["metadata"]["labels"].items() >= EVERYTHING["labels"].items()
    assert service["metadata"]["namespace"] == made["metadata"]["namespace"] == "team-a"


def test_what_was_not_asked_for_is_left_to_kubernetes():
    service, made = documents()
    assert not {"volumes", "nodeSelector", "tolerations"} & set(pod_of(made))
    assert not {"resources", "volumeMounts", "imagePullPolicy"} & set(container_of(made))
    assert "namespace" not in service["metadata"] and "namespace" not in made["metadata"]


def test_a_command_reaches_the_container_as_it_was_given():
    command = ["train", "--set=a.b=1", "$(HOME)", "$$", "$", "y", "1e3", "", "two\nlines", "- x: #"]
    assert [expanded(part) for part in container_of(documents(command=command)[1])["command"]] == command


@pytest.mark.parametrize("value", ["y", "N", "1e3", "0x1F", "on", "null", "~", "1_000", "12:30", ".inf", "", " "])
def test_text_that_another_yaml_would_read_as_something_else_is_quoted(value):
    # PyYAML leaves y and 1e3 bare; kubectl reads a truth value and a number.
    text = manifest(job(environment={"A": value}))
    assert f'value: "{value}"\n' in text or f"value: '{value}'\n" in text


def test_the_users_variables_do_not_hide_the_jobs_own():
    container = container_of(documents(environment={"TFLB_KUBERNETES_WORKERS": "7", "PYTHONUNBUFFERED": ""})[1])
    names = [variable["name"] for variable in container["env"]]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert len(names) == len(set(names))
    assert (environment["TFLB_KUBERNETES_WORKERS"], environment["PYTHONUNBUFFERED"]) == ("2", "")


def test_the_header_says_how_to_use_it():
    text = manifest(job(namespace="team-a", claim="results"))
    header, _, rest = text.partition("---\n")
    assert all(line.startswith("#") for line in header.splitlines())
    assert "kubectl --namespace=team-a apply -f FILE" in header
    assert "kubectl --namespace=team-a delete -f FILE" in header
    assert "logs --follow --tail=-1 --selector=batch.kubernetes.io/job-name=lars-b1k," in header
    assert "claim results" in header and "There is no claim" in manifest(job())
    # The comments stand where their keys are.
    for start in kubernetes_job._COMMENTS:
        assert re.search(rf"^  # .*\n{re.escape(start)}", rest, re.MULTILINE), start
    assert "one incident costs each pod one failure" in rest


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fashion_mnist_LARS.b1k", "fashion-mnist-lars-b1k"),
        ("_-x-_", "x"),
        ("32k", "job-32k"),
        ("a  ü b", "a-b"),
        ("A", "a"),
    ],
)
def test_a_recipes_name_becomes_a_valid_one(name, label):
    assert job_name(name, 2) == label


@pytest.mark.parametrize("workers", [1, 10, 11, 100000])
def test_a_long_name_leaves_room_for_the_pods_and_stays_its_own(workers):
    names = {job_name(f"{'resnet_' * 12}{ending}", workers) for ending in ("a", "b", "c")}
    assert len(names) == 3
    for name in names:
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(f"{name}-{workers - 1}") <= 63
    longest = "x" * (63 - len(f"-{workers - 1}"))
    assert job_name(longest, workers) == longest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "image is missing"),
        ({"image": "a b"}, "image is 'a b', but must be"),
        ({"name": "___"}, "name is '___', but must hold a letter from a to z or a digit"),
        ({"workers": 0}, "workers is 0, but must be greater than 0."),
        ({"gpus": -1}, "gpus is -1, but must be at least 0."),
        ({"max_restarts": -1}, "max_restarts is -1, but must be at least 0."),
        ({"grace": float("inf")}, "grace is inf, but must be a finite number."),
        ({"port": 0}, "port is 0, but must be greater than 0."),
        ({"port": 65536}, "port is 65536, but must be at most 65535."),
        ({"command": []}, "command is empty"),
        ({"pull_policy": "always"}, "unknown pull_policy 'always' (did you mean 'Always'?); allowed are Always,"),
        ({"cpu": "8 cores"}, "cpu is '8 cores', but must be a number of cores"),
        ({"memory": "64"}, "memory is '64', but must be an amount such as 64Gi."),
        ({"memory": "64m"}, "memory is '64m'"),
        ({"memory": "64GB"}, "memory is '64GB'"),
        ({"namespace": "Team_A"}, "namespace is 'Team_A', but must be at most 63 small letters"),
        ({"claim": "My Claim"}, "claim is 'My Claim', but must be the name of a PersistentVolumeClaim"),
        ({"mount_path": "work"}, "mount_path is 'work', but must be an absolute path"),
        ({"mount_path": "/"}, "mount_path is '/'"),
        ({"environment": {"A=B": "1"}}, "the name of a variable in environment is 'A=B'"),
        ({"labels": {"a": "b c"}}, "labels['a'] is 'b c', but must be at most 63 letters"),
        ({"labels": {"/a": "b"}}, "a key of labels is '/a', but must be such as"),
        ({"node_selector": {"a": "x" * 64}}, "node_selector['a'] is 'xxx"),
    ],
)
def test_bad_input_is_refused(options, said):
    assert refusal(manifest, job(**options)).startswith(said)


def fake_kubectl(folder, monkeypatch, script: str) -> None:
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_kubectl_gets_the_manifest_and_its_own_arguments(tmp_path, monkeypatch):
    fake_kubectl(tmp_path, monkeypatch, f'echo "$*" > {tmp_path}/arguments; cat > {tmp_path}/input; echo created')
    text = manifest(job(**EVERYTHING))
    assert kubernetes_job.apply(text, ["--context=lab", "-n", "team-a"]) == "created\n"
    assert (tmp_path / "arguments").read_text() == "--context=lab -n team-a apply -f -\n"
    assert (tmp_path / "input").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "error: jobs.batch is forbidden." >&2; exit 1', "error: jobs.batch is forbidden."),
        ("echo a >&2; echo >&2; echo b >&2; exit 1", "a; b."),
        ("exit 3", "exit code 3."),
        ("cat > /dev/null; echo told; exit 1", "told."),
    ],
)
def test_what_kubectl_objects_to_is_told_in_its_own_words(tmp_path, monkeypatch, script, said):
    fake_kubectl(tmp_path, monkeypatch, script)
    assert refusal(kubernetes_job.apply, manifest(job())) == f"kubectl did not take the manifest: {said}"


def test_without_kubectl_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="kubectl cannot be started") as raised:
        kubernetes_job.apply("")
    assert_one_sentence(str(raised.value))
