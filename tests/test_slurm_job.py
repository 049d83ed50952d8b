"""Jobs inside a Slurm allocation: their text, and what is refused. No Slurm is needed."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fake_commands import fake
from one_sentence import refusal

from tf_largebatch.supervisor import slurm_job
from tf_largebatch.supervisor.slurm_job import Allocation

THREE = Allocation("4711", ("node8", "node9", "node10"), 4)
# As scontrol shows them, of the part that counts.
DETAILS = """\
JobId=4711 JobName=train
   NumNodes=3 NumCPUs=12 NumTasks=3 CPUs/Task=4 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:6
{nodes}
   TresPerNode=gres:gpu:2
"""
NODE = "     Nodes={} CPU_IDs=0-3 Mem=0 GRES={}\n"


def inside(folder: Path, gres: dict[str, str], **variables: str) -> dict[str, str]:
    """The environment of a batch script, whose nodes have these GPUs."""
    details = DETAILS.format(nodes="".join(NODE.format(*node) for node in gres.items()))
    (folder / "details").write_text(details)
    script = f"""
    case "$*" in
        "show hostnames node[8-10]") printf 'node8\\nnode9\\nnode10\\n';;
        "show job --details 4711") cat {folder}/details;;
        *) echo "scontrol: error: what is $*" >&2; exit 1;;
    esac
    """
    path = fake(folder, "scontrol", script)
    return {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[8-10]", **variables}


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ({"node[8-10]": "gpu:2(IDX:0-1)"}, 2),
        ({"node8": "gpu:1(IDX:1)", "node9": "gpu:1(IDX:0)", "node10": "gpu:1(IDX:3)"}, 1),
        ({"node[8-10]": "gpu:a100:4(IDX:0-3)"}, 4),
        ({"node[8-10]": "gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)"}, 3),
        ({"node[8-10]": "nic:2(IDX:0-1),gpu:2(IDX:0,3)"}, 2),
        ({"node[8-10]": ""}, 0),
        ({"node[8-10]": "license:5"}, 0),
    ],
)
def test_an_allocation_is_what_scontrol_says_of_the_job(tmp_path, gres, count):
    seen = slurm_job.allocation(inside(tmp_path, gres))
    assert seen == Allocation("4711", ("node8", "node9", "node10"), count)


def test_nodes_with_unequal_gpus_are_refused(tmp_path):
    environment = inside(tmp_path, {"node[8-9]": "gpu:2(IDX:0-1)", "node10": "gpu:1(IDX:0)"})
    assert "(2 of node[8-9], 1 of node10)" in refusal(slurm_job.allocation, environment)
    assert "(2 of node[8-9], 0 of node10)" in refusal(
        slurm_job.allocation, inside(tmp_path, {"node[8-9]": "gpu:2(IDX:0-1)", "node10": ""})
    )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is '', so this is not part of a Slurm job"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "SLURM_STEP_NUM_TASKS is '3': srun has started"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE is '2'"),
        ({"SLURM_JOB_NODELIST": "node[1-"}, "what is show hostnames node[1-"),
        ({"SLURM_JOB_ID": "4712"}, "what is show job --details 4712"),
        ({"PATH": "/nowhere"}, "scontrol, a command of Slurm, is not on PATH"),
    ],
)
def test_what_is_no_allocation_is_refused(tmp_path, variables, said):
    environment = inside(tmp_path, {"node[8-10]": ""}, **variables)
    assert said in refusal(slurm_job.allocation, environment)


def test_a_launcher_that_srun_has_started_once_is_in_an_allocation(tmp_path):
    environment = inside(tmp_path, {"node[8-10]": ""}, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1")
    assert slurm_job.allocation(environment).job_id == "4711"


def test_workers_are_in_the_order_of_the_nodes(tmp_path):
    job = slurm_job.slurm_job(["train"], THREE, 2, 7000, {"A": "b"}, str(tmp_path))
    assert job.addresses == ("node8:7000", "node8:7001", "node9:7000", "node9:7001", "node10:7000", "node10:7001")
    assert [worker.host for worker in job.workers] == [address.split(":")[0] for address in job.addresses]
    assert [worker.rank for worker in job.workers] == list(range(6))
    for worker in job.workers:
        environment = dict(worker.environment)
        config = json.loads(environment["TF_CONFIG"])
        assert config["cluster"] == {"worker": list(job.addresses)}
        assert config["task"] == {"type": "worker", "index": worker.rank}
        assert (environment["A"], worker.argv, worker.folder) == ("b", ("train",), str(tmp_path))


def test_a_worker_on_its_own_has_no_cluster():
    (worker,) = slurm_job.slurm_job(["train"], Allocation("1", ("node8",))).workers
    assert dict(worker.environment) == {"TF_CONFIG": None}


def test_without_a_port_the_jobs_number_gives_one():
    first, second = (slurm_job.slurm_job(["train"], replace(THREE, job_id=number)) for number in ("4711", "4712"))
    assert not set(first.addresses) & set(second.addresses)
    assert all(20000 <= int(address.split(":")[1]) <= 29999 for address in first.addresses)


def test_ports_beyond_the_last_are_refused():
    assert slurm_job.slurm_job(["train"], THREE, 2, 65534).addresses[1] == "node8:65535"
    assert refusal(slurm_job.slurm_job, ["train"], THREE, 2, 65535) == "port is 65535, but must be at most 65534."


@pytest.mark.parametrize(("gpus", "workers"), [(4, 3), (1, 2), (2, 4)])
def test_gpus_that_cannot_be_shared_are_refused(gpus, workers):
    sentence = refusal(slurm_job.slurm_job, ["train"], replace(THREE, gpus_per_node=gpus), workers)
    assert sentence.startswith(f"workers_per_node is {workers}, but {gpus} GPU")


def shares(workers_per_node: int, gpus: int) -> list[str]:
    here = replace(THREE, gpus_per_node=gpus)
    job = slurm_job.slurm_job(["train"], here, workers_per_node)
    return [slurm_job.srun_command(worker, here, workers_per_node)[-1] for worker in job.workers]


def test_workers_of_a_node_have_equal_shares_of_its_gpus():
    assert shares(2, 4) == ["1-2", "3-4"] * 3
    assert shares(4, 4) == ["1-1", "2-2", "3-3", "4-4"] * 3
    # Alone on a node, or without GPUs, there is nothing to share.
    assert shares(1, 4) == shares(2, 0)[:3] == ["--quiet"] * 3


def test_an_srun_runs_on_the_workers_node_beside_others():
    job = slurm_job.slurm_job(["train"], THREE)
    command = slurm_job.srun_command(job.workers[2], THREE)
    assert command[0] == "env" and "--unset=SLURM_GPUS_PER_TASK" in command
    options = command[command.index("srun") + 1 :]
    assert {"--jobid=4711", "--nodelist=node10", "--overlap", "--gpus-per-node=4", "--export=ALL"} <= set(options)
    assert not any(
        "gpus" in option for option in slurm_job.srun_command(job.workers[2], replace(THREE, gpus_per_node=0))
    )


@pytest.mark.parametrize(
    ("shown", "got"), [("0,1,2,3", "2,3"), ("4,5,6,7", "6,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")]
)
def test_a_share_is_cut_on_the_node_from_what_slurm_shows_there(tmp_path, shown, got):
    done = worker_1_of_2(tmp_path, CUDA_VISIBLE_DEVICES=shown)
    assert (done.returncode, done.stdout) == (0, f"{got} SLURM_GPUS=unset\n")


def test_a_node_that_shows_no_gpus_fails_instead_of_training_on_its_cpu(tmp_path):
    done = worker_1_of_2(tmp_path)
    assert done.returncode and "is not set by Slurm, although the job has GPUs" in done.stderr


def worker_1_of_2(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    path = fake(folder, "srun", 'while [ "$1" != sh ]; do shift; done; exec "$@"')
    job = slurm_job.slurm_job(["train"], THREE, 2)
    says = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES SLURM_GPUS=${SLURM_GPUS-unset}"']
    return subprocess.run(
        [*slurm_job.srun_command(job.workers[1], THREE, 2), *says],
        env={"PATH": path, "SLURM_GPUS": "8", **variables},
        capture_output=True,
        text=True,
        timeout=20,
    )
