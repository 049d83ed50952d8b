"""Our launcher in batch jobs of a real Slurm: exit codes, GPUs, and that nothing of a job outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from one_sentence import refusal
from slurm_site import Site, slurm_site
from stub_workers import IGNORES_SIGTERM, WAITS, pids, wait_until, writes_pid

from tf_largebatch.supervisor import slurm_batch

pytestmark = pytest.mark.timeout(180)

# A job of our launcher: its stubs are those of the file, and GPUs and workers are those of the environment.
LAUNCHER = """
import os, pathlib, sys
from tf_largebatch.supervisor import slurm_job, supervise, watch
here = slurm_job.allocation(os.environ)
per_node = int(os.environ.get("WORKERS_PER_NODE", "1"))
folder = pathlib.Path(sys.argv[1])
program = folder.joinpath("stub.py").read_text()
job = slurm_job.slurm_job([sys.executable, "-c", program], here, per_node)
start = slurm_job.slurm_start(here, per_node, sys.executable)
options = supervise.Options(watch.Limits(grace=float(os.environ.get("GRACE", "3"))))
folder.joinpath("launcher.txt").write_text(str(os.getpid()))
code = supervise.run(lambda attempt: job, start, folder, options)
folder.joinpath("code.txt").write_text(str(code))
if code == 75 and "REQUEUE" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    from tf_largebatch.supervisor import slurm_batch
    slurm_batch.requeue(here.job_id, os.environ)
sys.exit(code)
"""
SAYS_PLACE = """
import json, os
names = ["SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "TF_CONFIG"]
print("place", json.dumps([os.environ.get(name) for name in names]), flush=True)
"""
SAVES_ON_SIGTERM = """
import signal, sys, time
from tf_largebatch import worker_events
def save(*_):
    print("saving", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.5)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
worker_events.tell("stoppable")
print("ready", flush=True)
time.sleep(90)
"""


@pytest.fixture(scope="module")
def site():
    with slurm_site() as running:
        yield running


def submitted(site: Site, folder: Path, program: str, nodes: int = 3, options=(), gpus: int = 0, **environment) -> str:
    """The number of a batch job whose launcher, in `folder`, starts `program` on all nodes."""
    (folder / "stub.py").write_text(writes_pid(folder, program))
    (folder / "launcher.py").write_text(LAUNCHER)
    request = slurm_batch.BatchRequest(
        "two words # and a sign", nodes, gpus, cpus_per_node=4, output="launcher %j.out", options=options
    )
    environment = {"PYTHONPATH": site.environment["PYTHONPATH"], **environment}
    command = [sys.executable, str(folder / "launcher.py"), str(folder)]
    file = folder / "job.sbatch"
    file.write_text(slurm_batch.sbatch_text(command, request, str(folder), environment))
    return slurm_batch.submit(file, site.environment)


def output(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("launcher *.out"))


def logs(folder: Path) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob("20*/attempt_0/worker_*.log"))]


def until_ready(folder: Path, count: int) -> None:
    wait_until(lambda: sum("ready" in log for log in logs(folder)) == count, "workers", 60)


def until_ended(site: Site, job: str, timeout_secs: float = 60) -> str:
    """Waits until the job has ended and nothing of any job runs; gives its exit code, as Slurm has it."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    wait_until(lambda: site.state(job) in ended, f"the end of job {job}", timeout_secs)
    wait_until(lambda: not site.processes(), "no process of a job", 15)
    return site.job(job)["ExitCode"]


def places(folder: Path) -> list[list]:
    return [json.loads(re.search("^place (.*)$", log, flags=re.MULTILINE)[1]) for log in logs(folder)]


@pytest.mark.parametrize(
    ("options", "gpus", "shares"),
    [
        ([], 2, ["0", "1"]),
        # Options whose variables would give each worker less than all that the job has on a node.
        (["--gpus-per-task=1", "--ntasks-per-node=2", "--cpus-per-task=2"], 0, ["0", "1"]),
        (["--gres=gpu:2", "--gpu-bind=single:1", "--export=NONE"], 0, ["0", "1"]),
        (["--gpus=4", "--distribution=cyclic"], 0, ["0", "1"]),
        ([], 0, [None, None]),
    ],
)
def test_several_workers_of_a_node_run_at_once_and_share_its_gpus(site, tmp_path, options, gpus, shares):
    meet = f"""
    import glob, time
    until = time.monotonic() + 30
    while len(glob.glob({str(tmp_path)!r} + "/*.pid")) < 4:
        assert time.monotonic() < until
        time.sleep(0.05)
    """
    job = submitted(site, tmp_path, SAYS_PLACE + textwrap.dedent(meet), 2, options, gpus, WORKERS_PER_NODE="2")
    assert until_ended(site, job) == "0:0", output(tmp_path)
    nodes, shown, cpus, clusters = zip(*places(tmp_path))
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert list(shown) == shares * 2
    assert set(cpus) == {"4"}
    clusters = [json.loads(text) for text in clusters]
    assert [seen["task"]["index"] for seen in clusters] == [0, 1, 2, 3]
    addresses = clusters[0]["cluster"]["worker"]
    assert [address.split(":")[0] for address in addresses] == list(nodes)
    assert len(set(addresses)) == 4 and all(seen["cluster"]["worker"] == addresses for seen in clusters)


def test_a_worker_that_is_killed_gives_its_code_and_ends_the_others(site, tmp_path):
    job = submitted(site, tmp_path, IGNORES_SIGTERM)
    until_ready(tmp_path, 3)
    os.kill(int(victim(tmp_path)), signal.SIGKILL)
    assert until_ended(site, job) == "137:0"
    assert (tmp_path / "code.txt").read_text() == "137"
    assert "worker 1 failed first: killed by SIGKILL" in output(tmp_path)


def victim(folder: Path) -> str:
    """The process of worker 1."""
    for pid in pids(folder):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"SLURMD_NODENAME=node9" in variables:
            return str(pid)
    raise AssertionError("no worker on node9")


@pytest.mark.parametrize("code", [3, 200])
def test_a_workers_exit_code_is_that_of_the_job(site, tmp_path, code):
    fails = f"""
    import os, sys, time
    time.sleep(0.5 if os.environ["SLURMD_NODENAME"] == "node10" else 60)
    sys.exit({code})
    """
    job = submitted(site, tmp_path, textwrap.dedent(fails))
    assert until_ended(site, job) == f"{code}:0"
    assert (tmp_path / "code.txt").read_text() == str(code)
    assert f"worker 2 failed first: exit code {code}" in output(tmp_path)


@pytest.mark.parametrize("program", [WAITS, IGNORES_SIGTERM], ids=["waits", "ignores_sigterm"])
def test_nothing_is_left_after_scancel(site, tmp_path, program):
    job = submitted(site, tmp_path, program)
    until_ready(tmp_path, 3)
    assert len(site.processes()) >= 7
    site.run("scancel", job)
    until_ended(site, job)
    assert site.state(job) == "CANCELLED"


def test_workers_may_save_when_scancel_asks_them_to_end(site, tmp_path):
    job = submitted(site, tmp_path, SAVES_ON_SIGTERM, REQUEUE="1")
    until_ready(tmp_path, 3)
    site.run("scancel", job)
    until_ended(site, job)
    # Although the launcher, with 75, asked for it.
    assert (tmp_path / "code.txt").read_text() == "75"
    assert site.job(job)["Restarts"] == "0" and site.state(job) == "CANCELLED"
    assert [log.count("saved") for log in logs(tmp_path)] == [1, 1, 1]


def test_nothing_is_left_when_the_launcher_is_killed(site, tmp_path):
    job = submitted(site, tmp_path, IGNORES_SIGTERM)
    until_ready(tmp_path, 3)
    os.kill(int((tmp_path / "launcher.txt").read_text()), signal.SIGKILL)
    until_ended(site, job, 20)
    assert site.state(job) == "FAILED"


def test_the_signal_before_the_time_limit_makes_workers_save_and_the_job_start_again(site, tmp_path):
    # Slurm looks about twice a minute; this signal is due at once.
    options = ["--time=1", "--signal=B:USR1@55"]
    job = submitted(site, tmp_path, SAVES_ON_SIGTERM, options=options, REQUEUE="1", GRACE="10")
    until_ready(tmp_path, 3)
    wait_until(lambda: (tmp_path / "code.txt").exists(), "the signal before the time limit", 90)
    assert (tmp_path / "code.txt").read_text() == "75"
    assert "stopped by SIGUSR1, and saved" in output(tmp_path)
    assert [log.count("saved") for log in logs(tmp_path)] == [1, 1, 1]
    wait_until(lambda: site.job(job)["Restarts"] == "1", "the job to be requeued", 10)
    wait_until(lambda: len(list(tmp_path.glob("20*"))) == 2, "the job to start again", 60)
    site.run("scancel", job)
    until_ended(site, job)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--partition=nowhere"], "nowhere"), (["--gpus-per-node=9"], "not available"), (["--frobnicate"], "frobnicate")],
)
def test_a_batch_file_that_slurm_refuses_is_one_sentence(site, tmp_path, options, said):
    sentence = refusal(submitted, site, tmp_path, "", options=options)
    assert sentence.startswith("'sbatch ") and said in sentence
