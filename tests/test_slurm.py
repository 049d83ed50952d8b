"""The variables of srun -> addresses, rank and GPUs; and each way in which they can be wrong."""

from __future__ import annotations

import shlex

import pytest
from fake_commands import fake
from one_sentence import refusal

from tf_largebatch.distribution import cluster, slurm, slurm_commands

LISTS = {
    "node[8-10]": ["node8", "node9", "node10"],
    "node[8-9]": ["node8", "node9"],
    "node9": ["node9"],
    "rack[0-1]n[0-1]": ["rack0n0", "rack0n1", "rack1n0", "rack1n1"],
}


@pytest.fixture
def path(tmp_path):
    """With a scontrol that knows the lists above, and nothing else."""
    known = "\n".join(f"{shlex.quote(text)}) printf '%s\\n' {' '.join(names)};;" for text, names in LISTS.items())
    script = f'test "$1 $2" = "show hostnames" || exit 9\ncase "$3" in {known} *) echo unknown list >&2; exit 1;; esac'
    return fake(tmp_path, "scontrol", script)


def step(
    path: str,
    places: str,
    rank: int,
    nodes: str = "node[8-10]",
    per_node: str = "2(x3)",
    distribution: str = "",
    **variables: str,
) -> dict[str, str]:
    """What srun tells task `rank`, where `places` has the node of each rank, such as "0 0 1"."""
    node_of_rank = [int(node) for node in places.split()]
    node = node_of_rank[rank]
    told = {
        "PATH": path,
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NUM_TASKS": str(len(node_of_rank)),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(node_of_rank[:rank].count(node)),
        "SLURM_GTIDS": ",".join(str(other) for other, place in enumerate(node_of_rank) if place == node),
        "SLURMD_NODENAME": LISTS[nodes][node],
    }
    if distribution:
        told["SLURM_DISTRIBUTION"] = distribution
    return {**told, **variables}


def test_without_slurm_there_are_no_addresses(path):
    assert slurm.worker_addresses({}) is None
    assert slurm.worker_addresses(step(path, "0", 0, "node9", "1")) is None
    # A batch script, or what salloc starts, is no task of a step.
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert slurm.worker_addresses(batch) is None
    assert slurm.gpus_of_task({**batch, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}) is None


@pytest.mark.parametrize(
    ("distribution", "size", "per_node", "places"),
    [
        ("", "", "1(x3)", "0 1 2"),
        ("", "", "2(x2),1", "0 0 1 1 2"),
        ("block", "", "4,1(x2)", "0 0 0 0 1 2"),
        ("block:cyclic", "", "2(x3)", "0 0 1 1 2 2"),
        ("Block,NoPack", "", "1,2,1", "0 1 1 2"),
        ("*:cyclic", "", "1,2,1", "0 1 1 2"),
        ("cyclic", "", "2(x3)", "0 1 2 0 1 2"),
        ("cyclic", "", "4,1(x2)", "0 1 2 0 0 0"),
        ("cyclic:block,pack", "", "1,3,2", "0 1 2 1 2 1"),
        ("plane", "2", "4,1(x2)", "0 0 1 2 0 0"),
        ("plane", "2", "3(x3)", "0 0 1 1 2 2 0 1 2"),
        ("plane=3", "", "4,1(x2)", "0 0 0 1 2 0"),
        # What an outer sbatch has left says nothing about other distributions.
        ("block", "1", "2(x3)", "0 0 1 1 2 2"),
    ],
)
def test_every_task_finds_all_tasks_where_slurm_has_put_them(path, distribution, size, per_node, places):
    variables = {"SLURM_DIST_PLANESIZE": size} if size else {}
    numbers = [int(node) for node in places.split()]
    seen = [
        slurm.worker_addresses(step(path, places, rank, per_node=per_node, distribution=distribution, **variables))
        for rank in range(len(numbers))
    ]
    assert [rank for _, rank in seen] == list(range(len(numbers)))
    addresses = seen[0][0]
    assert all(others == addresses for others, _ in seen)
    assert [address.split(":")[0] for address in addresses] == [f"node{8 + number}" for number in numbers]
    assert len(set(addresses)) == len(numbers)
    # TensorFlow takes them.
    tf_config = cluster.of_workers(addresses, 0).tf_config()
    assert cluster.from_environment({"TF_CONFIG": tf_config}).num_workers == len(numbers)


def test_names_with_several_lists_are_expanded_by_slurm(path):
    addresses, _ = slurm.worker_addresses(step(path, "0 1 2 3", 1, "rack[0-1]n[0-1]", "1(x4)"))
    assert [address.split(":")[0] for address in addresses] == LISTS["rack[0-1]n[0-1]"]


@pytest.mark.parametrize("distribution", ["arbitrary", "unknown", "cyclic-ish", "plane"])
def test_other_distributions_are_refused_by_name(path, distribution):
    sentence = refusal(slurm.worker_addresses, step(path, "0 1 2", 0, per_node="1(x3)", distribution=distribution))
    assert (repr(distribution) if distribution != "plane" else "SLURM_DIST_PLANESIZE is ''") in sentence


@pytest.mark.parametrize("rank", range(6))
def test_a_distribution_that_is_not_the_real_one_is_noticed_by_every_task(path, rank):
    for real, told in [("0 1 2 0 1 2", ""), ("0 0 1 1 2 2", "cyclic"), ("0 1 1 2 2 0", "block")]:
        sentence = refusal(slurm.worker_addresses, step(path, real, rank, distribution=told))
        assert f"with the distribution {told or 'block'!r}" in sentence and "set TF_CONFIG" in sentence


@pytest.mark.parametrize(
    ("variable", "value"), [("SLURM_NODEID", "2"), ("SLURM_LOCALID", "1"), ("SLURMD_NODENAME", "node10")]
)
def test_what_slurm_says_of_this_task_is_compared(path, variable, value):
    sentence = refusal(slurm.worker_addresses, step(path, "0 0 1 1 2 2", 2, **{variable: value}))
    assert sentence.startswith(f"{variable} is {value!r}, but would be ")


def test_variables_that_a_container_takes_away_are_not_needed(path):
    told = step(path, "0 0 1 1 2 2", 3)
    for variable in ("SLURMD_NODENAME", "SLURM_GTIDS"):
        del told[variable]
    assert slurm.worker_addresses(told)[1] == 3


@pytest.mark.parametrize("per_node", ["", "2", "2(x2)", "2(x4)", "1(x3)", "2(x3),", "2(3)", "two", "2 (x3)", "-2(x3)"])
def test_counts_that_do_not_fit_are_refused(path, per_node):
    sentence = refusal(slurm.worker_addresses, step(path, "0 0 1 1 2 2", 0, per_node=per_node))
    assert sentence.startswith(f"SLURM_STEP_TASKS_PER_NODE is {per_node!r}")


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_JOB_ID"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.0", "²"])
def test_numbers_that_are_none_are_refused(path, variable, value):
    sentence = refusal(slurm.worker_addresses, step(path, "0 0 1 1 2 2", 0, **{variable: value}))
    assert f"{variable} is {value!r}" in sentence


def test_a_rank_beyond_the_step_is_refused(path):
    told = step(path, "0 0 1 1 2 2", 0, SLURM_PROCID="6")
    assert "SLURM_PROCID is 6, but the step has 6 tasks" in refusal(slurm.worker_addresses, told)


def test_without_scontrol_the_sentence_says_so(tmp_path):
    sentence = refusal(slurm.worker_addresses, step(str(tmp_path), "0 0 1 1 2 2", 0))
    assert sentence.startswith("scontrol, a command of Slurm, is not on PATH")


def test_scontrols_own_words_are_in_the_sentence(tmp_path):
    script = "printf 'scontrol: error: Bad list.  Try again.\\nscontrol: It is wrong!\\n' >&2; exit 3"
    told = step(fake(tmp_path, "scontrol", script), "0 0 1 1 2 2", 0)
    said = "'scontrol show hostnames node[8-10]' failed with exit code 3: Bad list, Try again; It is wrong."
    assert refusal(slurm.worker_addresses, told) == said


def test_a_command_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_commands, "_TIMEOUT_SECS", 0.2)
    environment = {"PATH": fake(tmp_path, "scontrol", "exec sleep 20")}
    assert "timed out" in refusal(slurm_commands.hostnames, "node9", environment)


def ports(path: str, **variables: str) -> list[int]:
    addresses, _ = slurm.worker_addresses(step(path, "0 0 1 1 2 2", 0, **variables))
    return [int(address.split(":")[1]) for address in addresses]


def test_tasks_of_a_node_have_ports_side_by_side(path):
    first = ports(path)[0]
    assert 20000 <= first <= 29998
    assert ports(path) == [first, first + 1] * 3


def test_the_first_port_can_be_given(path):
    assert ports(path, TFLB_PORT="7000") == [7000, 7001] * 3
    assert ports(path, TFLB_PORT="65534") == [65534, 65535] * 3
    assert ports(path, TFLB_PORT="") == ports(path)


@pytest.mark.parametrize("port", ["0", "65535", "65536", "-1", "x", "7000.0", "1" * 9])
def test_a_port_that_is_none_is_refused(path, port):
    said = f"TFLB_PORT is {port!r}, but must be a port from 1 to 65534."
    assert refusal(slurm.worker_addresses, step(path, "0 0 1 1 2 2", 0, TFLB_PORT=port)) == said


@pytest.mark.parametrize("tasks", [1, 16, 17, 64])
def test_jobs_and_steps_that_may_share_a_node_have_different_ports(tasks):
    near = [(job, number) for job in range(123456, 123464) for number in range(4)]
    first = [slurm.first_port(job, number, tasks) for job, number in near]
    everything = [port + task for port in first for task in range(tasks)]
    assert len(set(everything)) == len(everything)
    assert min(everything) >= 20000 and max(everything) <= 29999


def gpus(path: str, rank: int, shown: str | None, on_node: str | None, places: str = "0 0 1 1 2 2", **told: str):
    given = {"CUDA_VISIBLE_DEVICES": shown, "SLURM_GPUS_ON_NODE": on_node}
    return step(path, places, rank, **{name: value for name, value in given.items() if value is not None}, **told)


@pytest.mark.parametrize(
    ("shown", "shares"),
    [("0,1", ["0", "1"]), ("2,3", ["2", "3"]), ("0,1,2,3", ["0,1", "2,3"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_tasks_that_see_all_gpus_of_their_node_share_them(path, shown, shares):
    """With the names that Slurm gave: number 0 would be another job's."""
    count = str(shown.count(",") + 1)
    assert [slurm.gpus_of_task(gpus(path, rank, shown, count)) for rank in range(6)] == shares * 3


def test_shares_go_by_the_task_of_the_node_and_not_by_the_rank(path):
    cyclic = [gpus(path, rank, "0,1", "2", "0 1 2 0 1 2", distribution="cyclic") for rank in range(6)]
    assert [slurm.gpus_of_task(told) for told in cyclic] == ["0"] * 3 + ["1"] * 3


@pytest.mark.parametrize(
    ("shown", "on_node"),
    [
        # --gpus-per-task, or --gpu-bind; with and without cgroups, which number the visible ones from 0.
        ("1", "2"),
        ("0", "2"),
        ("2,3", "4"),
        # None at all, or no GPUs of Slurm, or shards of one.
        (None, None),
        ("0", None),
        (None, "0"),
        ("", "2"),
        ("-1", "2"),
        ("NoDevFiles", "2"),
    ],
)
def test_what_slurm_has_given_to_each_task_is_left_alone(path, shown, on_node):
    assert slurm.gpus_of_task(gpus(path, 1, shown, on_node)) is None


def test_one_task_on_a_node_has_all_its_gpus(path):
    assert slurm.gpus_of_task(gpus(path, 1, "0,1", "2", "0 1 2", per_node="1(x3)")) is None


@pytest.mark.parametrize(
    ("shown", "on_node", "said"),
    [
        ("0", "1", "cannot be shared evenly"),
        ("0,1,2", "3", "cannot be shared evenly"),
        ("0,1,2", "4", "each task is shown 3 (0,1,2)"),
        (None, "2", "CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_gpus_that_two_tasks_would_share_are_refused(path, shown, on_node, said):
    sentence = refusal(slurm.gpus_of_task, gpus(path, 1, shown, on_node))
    assert f"SLURM_GPUS_ON_NODE is {on_node} for 2 tasks on this node" in sentence and said in sentence


def test_a_node_beyond_the_step_is_refused(path):
    told = gpus(path, 1, "0,1", "2", SLURM_NODEID="3")
    assert "SLURM_NODEID is 3, but the step has 3 nodes" in refusal(slurm.gpus_of_task, told)
