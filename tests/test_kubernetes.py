"""What a pod finds in its environment -> the addresses of all pods and its own index."""

from __future__ import annotations

import pytest
import yaml
from one_sentence import refusal

from tf_largebatch.distribution import cluster, kubernetes
from tf_largebatch.supervisor.kubernetes_job import manifest
from tf_largebatch.supervisor.kubernetes_settings import KubernetesJob

THREE = {"JOB_COMPLETION_INDEX": "1", **kubernetes.pod_variables("lars", "lars-pods", 3, 2222)}


def test_addresses_are_those_of_all_pods_in_order():
    addresses, index = kubernetes.worker_addresses({"HOME": "/root", **THREE})
    assert addresses == ["lars-0.lars-pods:2222", "lars-1.lars-pods:2222", "lars-2.lars-pods:2222"]
    assert index == 1


def test_twelve_pods_are_in_the_order_of_numbers_and_not_of_texts():
    """KubernetesClusterResolver sorts names as texts, which puts pod 10 before pod 2."""
    environment = {"JOB_COMPLETION_INDEX": "11", **kubernetes.pod_variables("a", "a", 12, 1)}
    addresses, index = kubernetes.worker_addresses(environment)
    assert [int(address.split(".")[0].split("-")[1]) for address in addresses] == list(range(12))
    assert addresses[index] == "a-11.a:1"


@pytest.mark.parametrize("workers", [2, 11])
@pytest.mark.parametrize("namespace", [None, "team-a"])
def test_every_pod_of_a_manifest_finds_the_same_cluster_and_its_own_place(workers, namespace):
    job = KubernetesJob("My_Recipe", ["train"], workers, "image", namespace=namespace, port=3333)
    service, made = yaml.safe_load_all(manifest(job))
    pod = made["spec"]["template"]["spec"]
    environment = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    # What Kubernetes calls the pods, in DNS: `hostname.subdomain`, and the hostname of pod N is `JOB-N`.
    names = [f"{made['metadata']['name']}-{index}.{pod['subdomain']}" for index in range(workers)]
    assert pod["subdomain"] == service["metadata"]["name"]
    for index in range(workers):
        addresses, rank = kubernetes.worker_addresses({**environment, "JOB_COMPLETION_INDEX": str(index)})
        seen = cluster.of_workers(addresses, rank)
        assert (seen.num_workers, seen.rank, seen.is_chief) == (workers, index, index == 0)
        assert addresses == [f"{name}:3333" for name in names]
        # Addresses that TF_CONFIG may hold are what TensorFlow gets in the end.
        assert cluster.from_environment({"TF_CONFIG": seen.tf_config()}) == seen


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in THREE.items() if name not in names}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # An Indexed Job of somebody else.
        {"JOB_COMPLETION_INDEX": "1"},
        without("JOB_COMPLETION_INDEX"),
        {**THREE, "JOB_COMPLETION_INDEX": ""},
        {"JOB_COMPLETION_INDEX": "0", **kubernetes.pod_variables("lars", "lars", 1, 2222)},
    ],
)
def test_elsewhere_and_in_a_job_of_one_pod_there_is_no_cluster(environment):
    assert kubernetes.worker_addresses(environment) is None


@pytest.mark.parametrize("index", ["3", "-1", "1.0", "one", "1_0", "²", "9" * 5000])
def test_an_index_that_no_pod_of_the_job_has_is_refused(index):
    said = refusal(kubernetes.worker_addresses, {**THREE, "JOB_COMPLETION_INDEX": index})
    assert said == f"JOB_COMPLETION_INDEX is {index!r}, but must be a whole number from 0 to 2."


@pytest.mark.parametrize("workers", ["0", "-2", "3.0", "three"])
def test_a_wrong_number_of_pods_is_refused(workers):
    said = refusal(kubernetes.worker_addresses, {**THREE, "TFLB_KUBERNETES_WORKERS": workers})
    assert f"TFLB_KUBERNETES_WORKERS is {workers!r}, but must be a whole number from 1 " in said


def test_one_pod_with_an_index_of_several_is_refused():
    said = refusal(kubernetes.worker_addresses, {**THREE, "TFLB_KUBERNETES_WORKERS": "1"})
    assert said == "JOB_COMPLETION_INDEX is '1', but must be a whole number from 0 to 0."


@pytest.mark.parametrize("port", ["0", "65536", "tcp://10.0.0.1:80"])
def test_a_wrong_port_is_refused(port):
    said = refusal(kubernetes.worker_addresses, {**THREE, "TFLB_KUBERNETES_PORT": port})
    assert said == f"TFLB_KUBERNETES_PORT is {port!r}, but must be a whole number from 1 to 65535."


@pytest.mark.parametrize("variable", ["TFLB_KUBERNETES_JOB", "TFLB_KUBERNETES_SERVICE"])
@pytest.mark.parametrize("name", ["My_Job", "a b", "-a", "a:1"])
def test_a_name_that_dns_does_not_know_is_refused(variable, name):
    said = refusal(kubernetes.worker_addresses, {**THREE, variable: name})
    assert said.startswith(f"{variable} is {name!r}, but must be a DNS name")


@pytest.mark.parametrize("variable", [name for name in THREE if name != "JOB_COMPLETION_INDEX"])
def test_half_of_what_the_manifest_gives_is_refused(variable):
    # Or else every pod would train on its own.
    for environment in (without(variable), {**THREE, variable: " "}):
        assert refusal(kubernetes.worker_addresses, environment).startswith(f"{variable} is missing beside")
