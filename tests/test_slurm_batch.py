"""Batch files for Slurm: their text, and how they are submitted to a fake sbatch."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fake_commands import fake
from one_sentence import refusal

from tf_largebatch.supervisor import slurm_batch
from tf_largebatch.supervisor.slurm_batch import BatchRequest

FULL = BatchRequest("train", 3, "a100:4", 16, "64G", "gpu", "4:00:00", 90, "logs/%j.out")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_a_batch_file_says_what_it_asks_for():
    request = replace(FULL, options=("--account=me", "-C a100"))
    text = slurm_batch.sbatch_text(
        ["python", "-P", "launcher.py", "--set=a=b c"], request, "/home/me/runs", {"A": "b c"}
    )
    assert directives(text) == [
        "--job-name=train",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=16",
        "--mem=64G",
        "--partition=gpu",
        "--time=4:00:00",
        "--chdir=/home/me/runs",
        "--output=logs/%j.out",
        "--signal=B:USR1@90",
        "--requeue",
        "--open-mode=append",
        "--account=me",
        "-C a100",
    ]
    lines = text.splitlines()
    assert lines[0] == "#!/bin/sh" and text.endswith("\n")
    assert lines[-1] == "exec python -P launcher.py '--set=a=b c'"
    assert "export A='b c'" in lines
    # Slurm reads options only before the first command.
    assert max(i for i, line in enumerate(lines) if line.startswith("#SBATCH")) < lines.index("export A='b c'")


def test_what_is_not_asked_for_is_left_to_the_site():
    text = slurm_batch.sbatch_text(["train"], BatchRequest("train"), "/runs")
    named = [directive.split("=")[0] for directive in directives(text)]
    expected = ["--job-name", "--nodes", "--ntasks-per-node", "--chdir", "--output", "--signal"]
    assert named == [*expected, "--requeue", "--open-mode"]
    assert "of the user" not in text and "export" not in text


def test_a_batch_file_is_a_shell_script_that_becomes_its_command(tmp_path):
    odd = 'it\'s $HOME `x`\n"two" lines # no comment'
    says = ["sh", "-c", 'printf "%s|%s|%s" "$1" "$ODD" "$$"', "sh", odd]
    file = tmp_path / "job.sbatch"
    file.write_text(slurm_batch.sbatch_text(says, BatchRequest("a job"), str(tmp_path), {"ODD": odd}))
    with subprocess.Popen(["sh", str(file)], stdout=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=20)[0]
    assert said == f"{odd}|{odd}|{process.pid}"


@pytest.mark.parametrize("name", ["two words", "a#b", "it's"])
def test_values_that_sbatch_would_cut_are_quoted(name):
    text = slurm_batch.sbatch_text(["train"], BatchRequest(name), "/runs")
    assert directives(text)[0] in (f"--job-name='{name}'", "--job-name='it'\"'\"'s'")


@pytest.mark.parametrize("option", ["", "account=me", "-", "--", "--a\n--b", "#", "- a"])
def test_what_is_no_option_of_sbatch_is_refused(option):
    sentence = refusal(slurm_batch.sbatch_text, ["train"], replace(FULL, options=[option]), "/runs")
    assert sentence == f"{option!r} is no option of sbatch; write it as in --account=NAME."


def test_options_of_several_lines_are_refused():
    assert "has several lines" in refusal(slurm_batch.sbatch_text, ["train"], BatchRequest("a\nb"), "/runs")


@pytest.mark.parametrize("printed", ["4711", "4711;cluster"])
def test_submitting_gives_the_number_of_the_job(tmp_path, capsys, printed):
    script = f'echo "sbatch: warning: be careful" >&2; test "$*" = "--parsable job.sbatch" && echo "{printed}"'
    environment = {"PATH": fake(tmp_path, "sbatch", script)}
    assert slurm_batch.submit(Path("job.sbatch"), environment) == "4711"
    assert capsys.readouterr().err == "sbatch: warning: be careful\n"


def test_a_batch_file_that_is_refused_gives_sbatchs_words(tmp_path):
    words = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition."
    )
    environment = {"PATH": fake(tmp_path, "sbatch", f"echo '{words}' >&2; exit 1")}
    assert refusal(slurm_batch.submit, Path("job.sbatch"), environment) == (
        "'sbatch --parsable job.sbatch' failed with exit code 1: invalid partition specified: x; "
        "Batch job submission failed: Invalid partition."
    )


def test_without_slurm_nothing_can_be_submitted(tmp_path):
    sentence = refusal(slurm_batch.submit, Path("job.sbatch"), {"PATH": str(tmp_path)})
    assert sentence.startswith("sbatch, a command of Slurm, is not on PATH here")


def scontrol_of_a_job(folder: Path, state: str, requeue: str) -> dict[str, str]:
    script = f'test "$1" = show && echo "   JobState={state} Reason=None" && exit 0\n{requeue}'
    return {"PATH": fake(folder, "scontrol", script)}


def test_a_running_job_is_requeued(tmp_path):
    environment = scontrol_of_a_job(tmp_path, "RUNNING", f'echo "$*" > {tmp_path}/asked')
    assert slurm_batch.requeue("4711", environment)
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED"])
def test_a_job_that_slurm_is_ending_is_not_requeued(tmp_path, state):
    assert not slurm_batch.requeue("4711", scontrol_of_a_job(tmp_path, state, "exit 9"))


def test_a_job_that_cannot_be_requeued_gives_scontrols_words(tmp_path):
    environment = scontrol_of_a_job(tmp_path, "RUNNING", "echo 'Requested operation is disabled' >&2; exit 1")
    assert "Requested operation is disabled" in refusal(slurm_batch.requeue, "4711", environment)
