"""Where a job can run: on this machine, on ssh hosts, or in a Slurm allocation.

A place knows how many workers it has and how many GPUs each, plans the job of every attempt, and starts a worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from tf_largebatch.supervisor import (
    gpus,
    local_ports,
    local_processes,
    slurm_job,
    ssh_hosts,
    ssh_job,
    ssh_probe,
)
from tf_largebatch.supervisor.attempt import Start
from tf_largebatch.supervisor.job import Job, gpu_shares, local_job

# Of workers that are only shown.
_SHOWN_PORT = 2222
Environment = Mapping[str, str | None]


class Place(Protocol):
    """Where a job runs.

    Attributes:
      num_workers: how many workers.
      gpus_per_worker: 0 where there are none, or where nobody has looked yet.
      start: starts a worker.
    """

    num_workers: int
    gpus_per_worker: int
    start: Start

    def job(self, argv: Sequence[str], environment: Environment, attempt: int) -> Job:
        """The workers with this command and these variables; ports may change from attempt to attempt.

        Raises:
          InputError: the place is not, or no longer, as it must be.
        """


class ThisMachine:
    """Processes of this machine, which share its GPUs.

    Raises:
      InputError: the GPUs cannot be shared evenly, or `port` and those after it are busy.
    """

    def __init__(self, num_workers: int, port: int):
        self.num_workers, self._port = num_workers, port
        self._gpus = gpus.visible_gpus(os.environ)
        self.gpus_per_worker = len(gpu_shares(self._gpus, num_workers)[0])
        self.start: Start = local_processes.LocalProcess

    def job(self, argv: Sequence[str], environment: Environment, attempt: int) -> Job:
        addresses = local_ports.free_addresses(self.num_workers, self._port)
        return local_job(argv, addresses, self._gpus, environment)


class SshHosts:
    """Hosts that ssh reaches without asking for anything.

    Args:
      hosts: in rank order.
      options: how ssh gets there.
      python: the Python there.
      port: of a host's first worker; 0: any free ones.
      connects: whether the hosts are asked what they have, which a dry run does not.

    Raises:
      InputError: a host cannot be reached, or lacks something.
    """

    def __init__(
        self,
        hosts: Sequence[ssh_hosts.Host],
        options: ssh_hosts.SshOptions,
        python: str,
        port: int,
        environment: Environment,
        connects: bool,
    ):
        self._hosts, self._options, self._python, self._port = hosts, options, python, port
        self.num_workers = sum(host.workers for host in hosts)
        self.start = ssh_job.ssh_start(options, python)
        self._connects = connects
        self._found = self._look(environment)
        self.gpus_per_worker = len(self._found[hosts[0].name].gpus) // hosts[0].workers

    def job(self, argv: Sequence[str], environment: Environment, attempt: int) -> Job:
        # A host may be gone since, or a port taken.
        found = self._look(environment) if attempt else self._found
        return ssh_job.ssh_job(argv, self._hosts, found, environment, os.getcwd())

    def _look(self, environment: Environment) -> dict[str, ssh_probe.Found]:
        if self._connects:
            return ssh_probe.probe(
                self._hosts, self._options, self._python, os.getcwd(), self._port or None, environment
            )
        first = self._port or _SHOWN_PORT
        return {
            host.name: ssh_probe.Found(
                ssh_hosts.address(host.name, self._options), (), tuple(range(first, first + host.workers))
            )
            for host in self._hosts
        }


class SlurmAllocation:
    """The nodes of the Slurm job that this process is part of.

    Raises:
      InputError: it is part of none, or its nodes have different numbers of GPUs.
    """

    def __init__(self, workers_per_node: int, port: int):
        self._allocation = slurm_job.allocation(os.environ)
        self._workers_per_node, self._port = workers_per_node, port
        self.job_id = self._allocation.job_id
        self.num_workers = workers_per_node * len(self._allocation.nodes)
        self.gpus_per_worker = self._allocation.gpus_per_node // workers_per_node
        self.start = slurm_job.slurm_start(self._allocation, workers_per_node, sys.executable)

    def job(self, argv: Sequence[str], environment: Environment, attempt: int) -> Job:
        # On a port of its own: the last attempt's may not be free yet.
        port = self._port and self._port + attempt * self._workers_per_node
        return slurm_job.slurm_job(argv, self._allocation, self._workers_per_node, port, environment, os.getcwd())
