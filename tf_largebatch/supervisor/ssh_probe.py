"""Asks all hosts, before a job starts, what is there for its workers; what is missing is told in one sentence."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from absl import logging

from tf_largebatch.supervisor import remote_probe
from tf_largebatch.supervisor.remote_processes import CONNECTION_FAILED, program_line, remote_command
from tf_largebatch.supervisor.ssh_hosts import Host, SshOptions, address, last_line, ssh_command
from tf_largebatch.validation import InputError

_LAST_PORT = 65535
# Beside the time for connecting; nvidia-smi takes long on a host that has not used its GPUs.
_TIMEOUT_SECS = 60
_HOSTS_AT_ONCE = 64


@dataclass(frozen=True)
class Found:
    """What a host has.

    Attributes:
      address: by which other hosts reach it.
      gpus: as CUDA_VISIBLE_DEVICES names them.
      ports: free ones, one for each worker there.
    """

    address: str
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


def probe(
    hosts: Sequence[Host],
    options: SshOptions,
    python: str,
    folder: str,
    first_port: int | None = None,
    environment: Mapping[str, str | None] | None = None,
    timeout: float = _TIMEOUT_SECS,
) -> dict[str, Found]:
    """What every host has, by its name; all are asked at the same time.

    A port is only seen to be free: another program can still take it before TensorFlow does.

    Args:
      hosts: whom to ask.
      options: how ssh gets there.
      python: the Python that must run there.
      folder: the folder that must be there.
      first_port: the port of a host's first worker, the others following it; None or 0: any free ones.
      environment: what the workers will be given; its CUDA_VISIBLE_DEVICES decides which GPUs count.
      timeout: seconds for the answer of a host, beside those for connecting.

    Raises:
      InputError: a host cannot be reached or lacks something.
    """
    for host in hosts:
        if first_port and first_port + host.workers - 1 > _LAST_PORT:
            raise InputError(
                f"--port is {first_port}, but {host.name} needs {host.workers} ports from there on; "
                f"use {_LAST_PORT - host.workers + 1} or less, or 0 for any free ones."
            )

    def ask(host: Host) -> dict | str:
        request = {
            "folder": folder,
            "ports": host.workers,
            "first_port": first_port,
            "cuda_visible_devices": (environment or {}).get("CUDA_VISIBLE_DEVICES"),
        }
        try:
            return _answer(host, options, python, request, timeout + options.connect_timeout)
        except _Lacking as failure:
            return str(failure)

    addresses = {host.name: address(host.name, options) for host in hosts}
    with ThreadPoolExecutor(_HOSTS_AT_ONCE) as pool:
        answers = dict(zip([host.name for host in hosts], pool.map(ask, hosts)))
    failures = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    if failures:
        (_, sentence), *others = failures.items()
        also = f" ({', '.join(name for name, _ in others)} failed too)" if others else ""
        raise InputError(f"{sentence}{also}.")
    return {
        name: Found(addresses[name], tuple(answer["gpus"]), tuple(answer["ports"])) for name, answer in answers.items()
    }


class _Lacking(Exception):
    """What a host lacks, as a sentence without its end."""


def _answer(host: Host, options: SshOptions, python: str, request: dict, timeout: float) -> dict:
    """What the program there finds.

    Raises:
      _Lacking: it cannot be run, or does not find what the job needs.
    """
    name = host.name
    command = [*ssh_command(name, options), *remote_command(python, through_shell=True)]
    given = program_line("remote_probe.py") + json.dumps(request).encode() + b"\n"
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise _Lacking(f"--hosts: {name} gave no answer through ssh within {timeout:g} s; leave it out") from None
    except OSError as failure:
        raise _Lacking(f"--hosts needs ssh, which cannot be started here: {failure.strerror}") from None
    words = last_line(done.stderr.decode(errors="replace"))
    if done.returncode == CONNECTION_FAILED:
        raise _Lacking(f"--hosts: ssh cannot get to {name}: {words}; see that `ssh {name} true` works by itself")
    _, mark, text = done.stdout.decode(errors="replace").rpartition(remote_probe.MARK)
    if done.returncode or not mark:
        raise _Lacking(f"--hosts: {name} cannot run the Python '{python}': {words}; install it there in the same place")
    found = json.loads(text.partition("\n")[0])
    if not found["folder"]:
        raise _Lacking(
            f"--hosts: {name} has no folder '{request['folder']}', where its workers are to start; make it there, or "
            "start the job in a folder that all hosts have"
        )
    if found["busy"]:
        port, why = found["busy"]
        raise _Lacking(
            f"--port is {request['first_port']}, but port {port} of {name} cannot be used ({why}); use another, "
            "or 0 for any free ones"
        )
    if found["warning"]:
        logging.warning("nvidia-smi does not work on %s, so no GPU is used there: %s", name, found["warning"])
    return found
