"""Tasks that a real srun starts: who trains with whom, and with which GPUs."""

from __future__ import annotations

import json
import sys

import pytest
from slurm_site import GPUS_PER_NODE, Site, slurm_site

pytestmark = pytest.mark.timeout(180)

# What a task concludes, and the truth about itself. No name of a node is known to the system's resolver.
SAYS_ADDRESSES = """
import json, os
from tf_largebatch.distribution import slurm
told = {"rank": int(os.environ["SLURM_PROCID"]), "node": os.environ["SLURMD_NODENAME"]}
told["shown"] = os.environ.get("CUDA_VISIBLE_DEVICES")
try:
    told["addresses"], told["own"] = slurm.worker_addresses(os.environ)
    told["gpus"] = slurm.gpus_of_task(os.environ)
except ValueError as refused:
    told["refused"] = str(refused)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def site():
    with slurm_site() as running:
        yield running


def tasks(site: Site, *options: str, **environment: str) -> list[dict]:
    """What each task of an srun says, in the order of their ranks."""
    done = site.run("srun", "--immediate=60", *options, sys.executable, "-c", SAYS_ADDRESSES, **environment)
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda told: told["rank"])


@pytest.mark.parametrize(
    "options",
    [
        "--nodes=3 --ntasks=3",
        "--nodes=2 --ntasks=4 --ntasks-per-node=2",
        *(f"--nodes=3 --ntasks=6 {how}" for how in ("", "-m block", "-m cyclic", "-m plane=2", "-m plane=3")),
        "--nodes=3 --ntasks=9 --ntasks-per-node=3 -m plane=2",
        "--nodes=3 --ntasks=6 --ntasks-per-node=2 -m cyclic:block,pack",
        "--nodelist=node10,node8 --ntasks=4 -m cyclic",
        "--nodes=1 --ntasks=3",
    ],
)
def test_all_tasks_agree_on_where_each_of_them_is(site, options):
    told = tasks(site, *options.split())
    assert [task["own"] for task in told] == list(range(len(told)))
    addresses = told[0]["addresses"]
    assert [task["addresses"] for task in told] == [addresses] * len(told)
    assert [address.split(":")[0] for address in addresses] == [task["node"] for task in told]
    assert len(set(addresses)) == len(told)
    assert {task["gpus"] for task in told} == {None}


def test_tasks_in_an_order_that_slurm_does_not_tell_are_refused(site):
    (site.folder / "hosts").write_text("node9\nnode8\nnode9\n")
    told = tasks(site, "-m", "arbitrary", "--nodes=2", "--ntasks=3", SLURM_HOSTFILE=str(site.folder / "hosts"))
    assert len(told) == 3
    assert all("SLURM_DISTRIBUTION is 'arbitrary'" in task["refused"] for task in told)


@pytest.mark.parametrize(
    ("options", "is_cut_by_us"),
    [
        ("--gres=gpu:2", True),
        ("--gpus-per-node=2 -m cyclic", True),
        ("--gpus=4", True),
        ("--gpus-per-task=1", False),
        ("--gres=gpu:2 --gpu-bind=single:1", False),
        ("--gres=gpu:2 --gpu-bind=map_gpu:1,0", False),
    ],
)
def test_tasks_of_a_node_have_gpus_of_their_own(site, options, is_cut_by_us):
    told = tasks(site, "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *options.split())
    assert [task["gpus"] is not None for task in told] == [is_cut_by_us] * 4
    used = [(task["node"], task["gpus"] or task["shown"]) for task in told]
    # Which nodes these are is up to Slurm: one may still be busy with ending the job before.
    nodes = {task["node"] for task in told}
    assert len(nodes) == 2
    assert sorted(used) == sorted((node, str(gpu)) for node in nodes for gpu in range(GPUS_PER_NODE))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ntasks-per-node=2 --gres=gpu:1", "cannot be shared evenly"),
        ("--ntasks-per-node=2 --gres=gpu:2 --gpu-bind=none", "CUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_gpus_that_tasks_would_share_are_refused(site, options, said):
    told = tasks(site, "--nodes=2", "--ntasks=4", *options.split())
    assert [said in task["refused"] for task in told] == [True] * 4


def test_one_task_for_each_node_has_all_gpus_of_it(site):
    told = tasks(site, "--nodes=2", "--ntasks=2", "--gres=gpu:2")
    assert [(task["gpus"], task["shown"]) for task in told] == [(None, "0,1")] * 2
