"""A full disk and a cut link: need a machine where this user may mount and make network namespaces."""

from __future__ import annotations

import subprocess
import time

import fault_runs
import pytest
from network import require, ssh_servers, three_hosts

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Weights of a run on two workers."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = fault_runs.run(workdir)
    assert done.code == 0, done.output[-3000:]
    return fault_runs.weights(workdir)


def test_a_disk_that_is_full_during_a_save(undisturbed, tmp_path):
    require("mount")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    # Room for several checkpoints, until somebody takes it.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], check=True)
    try:
        done = fault_runs.run(tmp_path / "run", "--max_restarts=1", fault=f"0 12 fill {folder}; 1 23 SIGKILL")
        assert done.code == 0, done.output[-3000:]
        assert "Step 15 could not be saved in" in done.output and "Step 20 could not be saved in" in done.output
        # What was saved before is still whole.
        assert "step_00000010: epoch 2, step 2" in done.output
        assert fault_runs.same(fault_runs.weights(tmp_path / "run"), undisturbed)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_link_that_is_cut_for_a_while(undisturbed, tmp_path):
    require("ip", "unshare", "ssh", "sshd", "ssh-keygen")
    workdir, there = tmp_path / "run", tmp_path / "there"
    with three_hosts() as network, ssh_servers(network, tmp_path) as config:
        where = ["--hosts=host1,host2", f"--ssh_config={config}", "--forward_env=FAULT", "--max_restarts=6"]
        with fault_runs.started(workdir, *where, fault=f"0 18 touch {there}") as launcher:
            fault_runs.wait_for(there)
            network.cut("host2")
            time.sleep(20)
            network.mend("host2")
            done = fault_runs.ended(launcher, workdir)
        assert done.code == 0, done.output[-4000:]
        # Saved every 5 steps, the last time at 15 or, as the link was cut a little later, at 20.
        assert "going on from" in done.output
        assert fault_runs.same(fault_runs.weights(workdir), undisturbed)
        assert not fault_runs.left_over(workdir)
