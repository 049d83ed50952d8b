"""Batch files for Slurm: their text, and the commands that submit one or put its job back into the queue."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf_largebatch.distribution import slurm_commands
from tf_largebatch.validation import InputError


@dataclass(frozen=True)
class BatchRequest:
    """What a batch job asks of Slurm; None leaves it to the site's defaults.

    Attributes:
      name: of the job.
      nodes: how many.
      gpus_per_node: such as 4 or "a100:4"; 0: none.
      cpus_per_node: how many.
      memory_per_node: such as "64G"; "0" is all of it.
      partition: which.
      time_limit: such as "4:00:00".
      stop_secs: so long before the time limit the launcher is told, for the workers to save and end.
      output: the file for the launcher's output; Slurm puts the job's number for %j.
      options: options of sbatch, which win over those above.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int | str = 0
    cpus_per_node: int | None = None
    memory_per_node: str | None = None
    partition: str | None = None
    time_limit: str | None = None
    stop_secs: int = 120
    output: str = "slurm-%j.out"
    options: Sequence[str] = ()


def sbatch_text(
    command: Sequence[str], request: BatchRequest, folder: str, environment: Mapping[str, str] | None = None
) -> str:
    """A batch file that runs `command` once, on the first node of its job.

    Args:
      command: the launcher and its arguments; it starts the workers on all nodes.
      request: what the job gets.
      folder: the absolute path of the current folder of `command`.
      environment: variables for it, beside those of whoever submits the file.

    Raises:
      InputError: an option is none, or something has several lines.
    """
    for option in request.options:
        if not re.fullmatch(r"--?[A-Za-z].*", option):
            raise InputError(f"{option!r} is no option of sbatch; write it as in --account=NAME.")
    settings = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": request.gpus_per_node or None,
        "cpus-per-task": request.cpus_per_node,
        "mem": request.memory_per_node,
        "partition": request.partition,
        "time": request.time_limit,
        "chdir": folder,
        "output": request.output,
    }
    chosen = [f"--{name}={_quoted(str(value))}" for name, value in settings.items() if value is not None]
    return "\n".join(
        [
            "#!/bin/sh",
            "# A training job for Slurm, written by tf_largebatch; submit it with: sbatch THIS_FILE",
            "#",
            "# One task per node, because the launcher below runs once and starts the workers of all nodes itself.",
            *(f"#SBATCH {option}" for option in chosen),
            "#",
            f"# Before the time limit ({request.stop_secs} s, or up to a minute more) the launcher alone is told. Its",
            "# workers save and end, and it puts the job back into the queue, to go on from there.",
            f"#SBATCH --signal=B:USR1@{request.stop_secs}",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            *(["#", "# Options of the user."] if request.options else []),
            *(f"#SBATCH {option}" for option in request.options),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()),
            "# exec: the launcher takes the place of this shell, so that signals reach it.",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def submit(file: Path, environment: Mapping[str, str]) -> str:
    """Submits a batch file and gives the number of its job.

    Args:
      file: what `sbatch_text` says.
      environment: such as `os.environ`.

    Raises:
      InputError: Slurm does not take it, or is not here.
    """
    told = slurm_commands.output_of("sbatch", "--parsable", str(file), environment=environment)
    # Of several clusters it names the one that took the job: NUMBER;CLUSTER.
    return told.strip().partition(";")[0]


def requeue(job_id: str, environment: Mapping[str, str]) -> bool:
    """Puts a running job back into the queue, from where it starts anew; Slurm ends what is left of it now.

    Args:
      job_id: its number.
      environment: such as `os.environ`.

    Returns:
      False if Slurm is ending the job already, because someone cancelled it or something else needs its nodes.

    Raises:
      InputError: Slurm does not, for example because the job was submitted with --no-requeue.
    """
    told = slurm_commands.output_of("scontrol", "show", "job", job_id, environment=environment)
    # Slurm would also start a cancelled job again.
    if not re.search(r"\bJobState=RUNNING\b", told):
        return False
    slurm_commands.output_of("scontrol", "requeue", job_id, environment=environment)
    return True


def _quoted(value: str) -> str:
    """For a line of #SBATCH, where a blank and a # would end the value."""
    if "\n" in value:
        raise InputError(f"{value!r} has several lines, which an option of sbatch cannot have; write it in one.")
    return value if re.fullmatch(r"[^\s#'\"\\]+", value) else shlex.quote(value)
