"""TF_CONFIG -> Cluster: ranks, addresses, and each way in which TF_CONFIG can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from one_sentence import refusal

from tf_largebatch.distribution import cluster
from tf_largebatch.distribution.cluster import Cluster

TWO = ["a:2222", "b:2222"]


def read(config: Any) -> Cluster:
    return cluster.from_environment({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)})


def tf_config(workers: Any = TWO, kind: Any = "worker", index: Any = 0, **jobs: Any) -> dict[str, Any]:
    return {"cluster": {"worker": workers, **jobs}, "task": {"type": kind, "index": index}}


@pytest.mark.parametrize("environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}, {"TF_CONFIG": " {} "}])
def test_without_tf_config_a_process_is_on_its_own(environment):
    alone = cluster.from_environment(environment)
    assert alone == Cluster()
    assert (alone.num_workers, alone.rank, alone.is_chief, alone.address) == (1, 0, True, None)
    assert alone.tf_config() == ""


@pytest.mark.parametrize(
    ("chiefs", "workers"), [(["c:1"], []), (["c:1"], ["w0:1", "w1:1"]), ([], ["w0:1"]), ([], ["w0:1", "w1:1", "w2:1"])]
)
@pytest.mark.parametrize("chief_first", [True, False])
def test_ranks_count_the_chief_and_then_the_workers(chiefs, workers, chief_first):
    """As MultiWorkerMirroredStrategy counts: whatever the order in TF_CONFIG, and one writes files."""
    everyone = chiefs + workers
    jobs = [(name, addresses) for name, addresses in (("chief", chiefs), ("worker", workers)) if addresses]
    jobs = dict(jobs if chief_first else reversed(jobs))
    tasks = [(name, index) for name, addresses in jobs.items() for index in range(len(addresses))]
    members = [read({"cluster": jobs, "task": {"type": name, "index": index}}) for name, index in tasks]
    assert {member.rank: member.address for member in members} == dict(enumerate(everyone))
    assert [member.rank for member in members if member.is_chief] == [0]
    assert {member.num_workers for member in members} == {len(everyone)}


@pytest.mark.parametrize(
    "config",
    [
        tf_config(index=1),
        tf_config(chief=["c:1"], kind="chief"),
        tf_config(chief=["c:1"], index=1),
        tf_config(["[::1]:2222", "[fe80::1%eth0]:2222"], index=1),
    ],
)
def test_a_cluster_writes_the_tf_config_that_it_was_read_from(config):
    seen = read(config)
    assert json.loads(seen.tf_config()) == config
    assert read(seen.tf_config()) == seen


def test_a_cluster_of_workers_is_seen_from_each_of_them():
    for rank in range(2):
        assert cluster.of_workers(TWO, rank) == read(tf_config(index=rank))


def test_what_tf_config_holds_besides_is_left_alone():
    # Schedulers add such keys ("environment": "cloud"), and TensorFlow takes them.
    config = tf_config(index=1) | {"environment": "cloud", "rpc_layer": "grpc"}
    assert read(config) == read(tf_config(index=1))


@pytest.mark.parametrize("index", ["1", 1])
def test_an_index_may_stand_in_quotes(index):
    assert read(tf_config(index=index)).task == ("worker", 1)


@pytest.mark.parametrize("index", [-1, "-1", 1.0, "1.0", " 1", "", True, None, [0], "²", "１", "9" * 5000])
def test_an_index_that_is_no_whole_number_is_refused(index):
    said = f"TF_CONFIG: task.index is {index!r}, but must be a whole number from 0."
    assert refusal(read, tf_config(index=index)) == said


@pytest.mark.parametrize("index", [2, "2", 10**8])
def test_an_index_outside_the_cluster_is_refused(index):
    assert f"task worker {index} is not in the cluster, which has worker 0 to 1" in refusal(
        read, tf_config(index=index)
    )


@pytest.mark.parametrize("text", ["{", "worker", '{"cluster": ', "[" * 100_000, "{'cluster': {}}"])
def test_what_is_no_json_is_refused(text):
    sentence = refusal(read, text)
    assert sentence.startswith("TF_CONFIG is not JSON") and len(sentence) < 300


@pytest.mark.parametrize(
    "config", ["[]", "null", "3", {"task": {"type": "worker", "index": 0}}, {"cluster": {}}, {"cluster": TWO}]
)
def test_what_holds_no_cluster_is_refused(config):
    assert 'must hold {"cluster": {"worker": ["host:port", ...]}' in refusal(read, config)


@pytest.mark.parametrize("task", [None, [], {}, "worker", {"type": "worker"}, {"index": 0}])
def test_a_task_without_type_or_index_is_refused(task):
    assert f"TF_CONFIG: task is {task!r}, but must be" in refusal(read, tf_config() | {"task": task})


@pytest.mark.parametrize("kind", ["chief", "evaluator", None, ["worker"], {}, 0])
def test_a_task_of_a_job_that_is_not_there_is_refused(kind):
    sentence = refusal(read, tf_config(kind=kind))
    assert f"TF_CONFIG: task.type is {kind!r}" in sentence and "but the cluster has worker" in sentence


def test_a_misspelt_task_is_refused_with_the_nearest_name():
    assert "task.type is 'wroker' (did you mean 'worker'?)" in refusal(read, tf_config(kind="wroker"))


@pytest.mark.parametrize("job", ["ps", "evaluator", "master"])
def test_a_job_that_does_not_train_is_refused(job):
    # Synchronous training would wait for it for ever, or not count it.
    sentence = refusal(read, tf_config(**{job: ["p:1"]}))
    assert f"job {job!r}" in sentence and "allowed are chief, worker" in sentence


def test_a_misspelt_job_is_refused_with_the_nearest_name():
    assert "job 'wrker' (did you mean 'worker'?)" in refusal(read, {"cluster": {"wrker": TWO}})


@pytest.mark.parametrize("addresses", [[], "a:1", None, {"0": "a:1"}, 3])
def test_what_is_no_list_of_addresses_is_refused(addresses):
    said = f"TF_CONFIG: cluster.worker is {addresses!r}, but must be a list of 'host:port'."
    assert refusal(read, tf_config(addresses)) == said


@pytest.mark.parametrize(
    "address", ["a:1", "10.0.0.1:65535", "node-3.example.org:2222", "my_host:80", "[::1]:2222", "[2001:db8::7]:2222"]
)
def test_addresses_are_names_or_numbers_with_a_port(address):
    assert read(tf_config([address])).address == address


@pytest.mark.parametrize(
    "address",
    [
        *("a", "a:", ":1", "", None, 2222, ["a:1"], "a:port", "a:-1", "a:1_0", "a:+1", "a:²", "a:１", "a:1.5"),
        *("a:0", "a:65536", "a:" + "9" * 5000),
        *(" a:1", "a:1 ", "a b:1", "http://a:1", "grpc://a:1", "a:1/path"),
        # Without brackets it could not be told where an IPv6 address ends.
        *("::1:2222", "[::1]", "[::1]2222", "[::1:2222", "[]:2222"),
    ],
)
def test_an_address_without_host_or_port_is_refused(address):
    said = f"TF_CONFIG: cluster.worker holds {address!r}, but every entry must be 'host:port'."
    assert refusal(read, tf_config(["good:1", address])) == said


@pytest.mark.parametrize("config", [tf_config(["a:1", "b:1", "a:1"]), tf_config(["a:1"], chief=["a:1"])])
def test_an_address_of_two_tasks_is_refused(config):
    assert "two tasks share the address 'a:1'" in refusal(read, config)


def test_the_same_host_may_run_several_workers():
    assert read(tf_config(["a:1", "a:2"])).num_workers == 2


def test_two_chiefs_are_refused():
    assert "there can be one chief" in refusal(read, tf_config(chief=["c:1", "d:1"]))
