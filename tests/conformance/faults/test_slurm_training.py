"""The launcher submits real training to a real Slurm, which stops it and takes it up again."""

from __future__ import annotations

import re
import subprocess

import fault_runs
import pytest
from slurm_site import slurm_site
from stub_workers import wait_until

pytestmark = pytest.mark.timeout(400)
WHERE = ["--slurm", "--nodes=1", "--workers_per_node=2", "--time=10"]


@pytest.fixture(scope="module")
def site():
    with slurm_site() as site:
        yield site


def submit(site, workdir, *flags: str, fault: str = "") -> subprocess.CompletedProcess:
    variables = {**fault_runs.environment(fault), **site.environment}
    variables["PYTHONPATH"] = fault_runs.environment()["PYTHONPATH"]
    return subprocess.run(
        fault_runs.command(workdir, *WHERE, *flags),
        env=variables,
        cwd=workdir.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_job_that_is_told_of_its_time_limit_goes_on_in_another_turn(site, tmp_path):
    reference = fault_runs.run(tmp_path / "reference")
    assert reference.code == 0, reference.output[-3000:]
    workdir, there = tmp_path / "run", tmp_path / "there"
    # --overwrite must not throw away what the first turn has saved.
    submitted = submit(site, workdir, "--overwrite", fault=f"0 18 touch {there}")
    assert submitted.returncode == 0, submitted.stderr
    job = re.search(r"Slurm job (\d+), submitted with (\S+)", submitted.stdout)
    wait_until(there.exists, "step 18", 120)
    # What --signal=B:USR1@120 does before the time limit.
    site.run("scancel", "--batch", "--signal=USR1", job[1])
    wait_until((workdir / "result.json").exists, "the second turn's end", 200)
    wait_until(lambda: site.state(job[1]) == "COMPLETED", "the job's end", 60)
    assert site.job(job[1])["Restarts"] == "1" and site.job(job[1])["ExitCode"] == "0:0"
    output = (workdir / "logs" / f"slurm-{job[1]}.out").read_text()
    assert re.search(r"stopped by SIGUSR1, and saved; the job ends with exit code 75\.", output), output[-3000:]
    assert re.search(r"going on from \S+step_000000(18|19|2\d): epoch 3", output), output[-3000:]
    assert fault_runs.same(fault_runs.weights(workdir), fault_runs.weights(tmp_path / "reference"))
    wait_until(lambda: not fault_runs.left_over(workdir), "all processes to end", 20)


def test_what_slurm_refuses_is_one_sentence(site, tmp_path):
    refused = submit(site, tmp_path / "run", "--partition=nowhere")
    assert refused.returncode == 2 and refused.stdout == ""
    assert "gpu_cluster: " in refused.stderr and "nvalid partition" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not site.run("squeue", "--noheader").stdout
