"""A job as pure text: commands, environments, shares of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tf_largebatch.distribution import cluster
from tf_largebatch.supervisor import job
from tf_largebatch.validation import InputError


def test_each_worker_gets_its_own_tf_config_and_its_share_of_the_gpus():
    addresses = ["127.0.0.1:2001", "127.0.0.1:2002"]
    made = job.local_job(["train", "--x"], addresses, ("0", "1", "2", "3"), {"NAME": "value"})
    for rank, share in enumerate(["0,1", "2,3"]):
        environment = made.workers[rank].full_environment({"HOME": "/home", "TF_CONFIG": "of another job"})
        assert environment["CUDA_VISIBLE_DEVICES"] == share
        assert environment["NAME"] == "value" and environment["HOME"] == "/home"
        seen = cluster.from_environment(environment)
        assert (seen.num_workers, seen.rank, seen.address) == (2, rank, addresses[rank])
        assert made.workers[rank].argv == ("train", "--x")


def test_one_worker_has_no_tf_config_not_even_an_inherited_one():
    worker = job.local_job(["train"], ["127.0.0.1:2001"]).workers[0]
    assert worker.full_environment({"TF_CONFIG": "of another job", "A": "b"}) == {"A": "b"}


def test_without_gpus_an_inherited_cuda_visible_devices_stays():
    worker = job.local_job(["train"], ["a:1", "b:1"]).workers[1]
    assert worker.full_environment({"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_that_cannot_be_shared_evenly_are_refused_with_the_counts_that_can():
    with pytest.raises(InputError, match=r"4 visible GPUs \(0, 1, 2, 3\).*use 1 or 2 or 4 workers"):
        job.local_job(["train"], ["a:1", "b:1", "c:1"], ("0", "1", "2", "3"))


def test_the_description_can_be_pasted_into_a_shell():
    argv = [sys.executable, "-c", "import os; print(os.environ.get('TF_CONFIG'), os.environ['A'])"]
    for addresses in (["127.0.0.1:2001"], ["127.0.0.1:2001", "127.0.0.1:2002"]):
        made = job.local_job(argv, addresses, (), {"A": 'it\'s "quoted" $HOME'})
        printed = subprocess.run(
            ["sh", "-c", job.describe(made)],
            env={**os.environ, "TF_CONFIG": "inherited"},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        expected = [dict(worker.environment)["TF_CONFIG"] for worker in made.workers]
        assert printed.splitlines() == [f'{tf_config} it\'s "quoted" $HOME' for tf_config in expected]


def test_the_package_in_use_comes_first_and_the_current_folder_last():
    assert job.worker_python_path("/package", "/theirs::/more", "/here") == "/package:/theirs:/more:/here"
    assert job.worker_python_path("/checkout", "", "/checkout") == "/checkout"
