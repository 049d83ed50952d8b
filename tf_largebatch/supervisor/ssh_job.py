"""A job of workers on several hosts that ssh reaches: pure text as `job.py`, and how its workers are started."""

from __future__ import annotations

import ipaddress
import os
import re
import termios
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from tf_largebatch.distribution import cluster
from tf_largebatch.supervisor.attempt import Start
from tf_largebatch.supervisor.job import Job, Worker, gpu_shares
from tf_largebatch.supervisor.remote_processes import SILENCE_SECS, RemoteProcess
from tf_largebatch.supervisor.ssh_hosts import Host, SshOptions, ssh_command
from tf_largebatch.supervisor.ssh_probe import Found
from tf_largebatch.validation import InputError

# What changes how TensorFlow and its libraries work should be the same for all workers, wherever they run.
_ALONG = ("NCCL_*", "TF_*", "XLA_*", "TFLB_*", "CUDA_*", "LD_LIBRARY_PATH", "PYTHONPATH")
# Said of one process, or of one host, or to Terraform.
_NOT_ALONG = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_CLI_CONFIG_FILE")
_GIVEN = re.compile(r"([A-Za-z_]\w*)=(.*)", flags=re.ASCII | re.DOTALL)


def forwarded(environment: Mapping[str, str], names: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """The variables of the launcher that workers on other hosts get too.

    Args:
      environment: the launcher's, such as `os.environ`.
      names: variables to forward beside the usual ones, of --forward_env.
      given: `NAME=VALUE` each, of --env; these win.

    Raises:
      InputError: a name is not set, or an entry has another form.
    """
    along = {
        name: value
        for name, value in environment.items()
        if name not in _NOT_ALONG and any(fnmatchcase(name, pattern) for pattern in _ALONG)
    }
    for name in names:
        if name not in environment:
            raise InputError(f"--forward_env is {name!r}, which is not set here; set it, or give --env={name}=VALUE.")
        along[name] = environment[name]
    for entry in given:
        parts = _GIVEN.fullmatch(entry)
        if not parts:
            raise InputError(f"--env is {entry!r}, but must be NAME=VALUE.")
        along[parts[1]] = parts[2]
    if "TF_CONFIG" in along:
        raise InputError("--env and --forward_env cannot name TF_CONFIG, which every worker gets for itself; leave it.")
    return along


def ssh_job(
    argv: Sequence[str],
    hosts: Sequence[Host],
    found: Mapping[str, Found],
    environment: Mapping[str, str | None] | None = None,
    folder: str | None = None,
) -> Job:
    """A job with the workers of every host, in the order of the hosts.

    Args:
      argv: the command of every worker.
      hosts: where they run.
      found: what `ssh_probe.probe` found there, by name.
      environment: variables for every worker.
      folder: where they start; None: in the launcher's current folder.

    Raises:
      InputError: the workers would not have equally many GPUs, or would not find each other.
    """
    _check_gpus(hosts, found)
    if len(hosts) > 1:
        _check_addresses(hosts, found)
    addresses = [f"{found[host.name].address}:{port}" for host in hosts for port in found[host.name].ports]
    workers: list[Worker] = []
    for host in hosts:
        for share in gpu_shares(found[host.name].gpus, host.workers):
            rank = len(workers)
            # A process on its own has no cluster, so a TF_CONFIG that is set there must not reach it.
            tf_config = cluster.of_workers(addresses, rank).tf_config() if len(addresses) > 1 else None
            variables = {"TF_CONFIG": tf_config, **(environment or {})}
            if share and host.workers > 1:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(share)
            workers.append(Worker(rank, tuple(argv), tuple(variables.items()), host.name, folder))
    return Job(tuple(workers), tuple(addresses))


def ssh_start(options: SshOptions, python: str, silence_secs: float | None = SILENCE_SECS) -> Start:
    """How a worker of an `ssh_job` is started.

    Args:
      options: how ssh gets to the hosts.
      python: the Python there for what runs beside the worker.
      silence_secs: see `RemoteProcess`.
    """

    def start(worker: Worker, output: int) -> RemoteProcess:
        # Only a worker that sees a terminal draws a progress bar; it gets one like the launcher's.
        terminal = termios.tcgetwinsize(output) if os.isatty(output) else None
        transport = ssh_command(worker.host, options)
        return RemoteProcess(worker, output, transport, terminal, True, python, silence_secs)

    return start


def _check_gpus(hosts: Sequence[Host], found: Mapping[str, Found]) -> None:
    counts = {host.name: len(found[host.name].gpus) for host in hosts}
    per_worker = {counts[host.name] / host.workers for host in hosts}
    if len(per_worker) > 1 or any(counts[host.name] % host.workers for host in hosts):
        listed = [
            f"{host.name} has {_number(counts[host.name], 'GPU')} for {_number(host.workers, 'worker')}"
            for host in hosts
        ]
        raise InputError(
            f"--hosts: every worker needs the same number of GPUs, but {', '.join(listed)}; change the workers of a "
            "host as in HOST:2, or leave a host out."
        )


def _check_addresses(hosts: Sequence[Host], found: Mapping[str, Found]) -> None:
    for host in hosts:
        if _is_loopback(found[host.name].address):
            raise InputError(
                f"--hosts: {host.name} has the address {found[host.name].address}, at which other hosts find "
                "themselves; name it as they know it."
            )


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
