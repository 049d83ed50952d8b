"""Three hosts on one machine: network namespaces joined by a bridge, and in each an ssh server.

They share this machine's files and processes, but each has an address, a host name and ports of its own, and its
link can be cut. Needs root, iproute2 and OpenSSH; several can exist at the same time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_HOSTS = (1, 2, 3)
_NETWORKS = 250
_SSH_PORT = 2200
_START_SECS = 20.0
_SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/hostkey{number}
PidFile none
AuthorizedKeysFile {folder}/identity.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PermitRootLogin prohibit-password
StrictModes no
"""
_SSH_CONFIG = """\
Host {hosts}
  Port {port}
  User root
  IdentityFile {folder}/identity
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Network:
    """The hosts `host1`, `host2` and `host3`, seen from outside, from where they can all be reached.

    Attributes:
      number: which of the networks on this machine it is.
    """

    number: int

    @property
    def bridge(self) -> str:
        return f"lb{self.number}"

    @property
    def hosts(self) -> list[str]:
        return [f"host{number}" for number in _HOSTS]

    def namespace(self, host: str) -> str:
        return f"lb{self.number}-{host[-1]}"

    def address(self, host: str) -> str:
        return f"10.77.{self.number}.1{host[-1]}"

    def cut(self, host: str) -> None:
        """Nothing goes in or out any more, and nobody is told."""
        _ip(f"link set v{self.namespace(host)} down")

    def mend(self, host: str) -> None:
        _ip(f"link set v{self.namespace(host)} up")

    def pids(self, host: str) -> list[int]:
        """All processes there, those of the ssh server included."""
        return [int(pid) for pid in _ip(f"netns pids {self.namespace(host)}").split()]


def require(*programs: str) -> None:
    """Skips the test without these programs or without root; where CI is set it fails instead."""
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in programs if not shutil.which(program, path=search)]
    missing += [] if os.geteuid() == 0 else ["root"]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"this test needs {', '.join(missing)}")


@contextlib.contextmanager
def three_hosts() -> Iterator[Network]:
    """The hosts, without any process; at the end all that runs there is killed."""
    require("ip", "unshare")
    network = _claimed()
    try:
        _ip(f"address add 10.77.{network.number}.1/24 dev {network.bridge}")
        _ip(f"link set {network.bridge} up")
        names = "".join(f"{network.address(host)} {host}\n" for host in network.hosts)
        for host in network.hosts:
            space = network.namespace(host)
            _ip(f"netns add {space}")
            _ip(f"link add v{space} type veth peer name eth0 netns {space}")
            _ip(f"link set v{space} master {network.bridge} up")
            _ip(f"-n {space} address add {network.address(host)}/24 dev eth0")
            _ip(f"-n {space} link set eth0 up")
            _ip(f"-n {space} link set lo up")
            # What `ip netns exec` shows as /etc/hosts.
            folder = Path("/etc/netns") / space
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield network
    finally:
        for host in network.hosts:
            _remove(network, host)
        _ip(f"link delete {network.bridge}")


@contextlib.contextmanager
def ssh_servers(network: Network, folder: Path) -> Iterator[Path]:
    """An ssh server on each host; gives the configuration with which ssh gets there, as root.

    Args:
      network: the hosts.
      folder: for keys and logs.
    """
    require("ssh", "sshd", "ssh-keygen")
    folder.chmod(0o700)
    Path("/run/sshd").mkdir(exist_ok=True)
    _new_key(folder / "identity")
    known, servers = "", []
    try:
        for host in network.hosts:
            number, address = host[-1], network.address(host)
            _new_key(folder / f"hostkey{number}")
            known += f"[{address}]:{_SSH_PORT} {(folder / f'hostkey{number}.pub').read_text()}"
            config = folder / f"sshd{number}.conf"
            config.write_text(_SSHD_CONFIG.format(port=_SSH_PORT, address=address, folder=folder, number=number))
            server = f"hostname {host}; exec $(command -v sshd || echo /usr/sbin/sshd) -D -f {config} -E {config}.log"
            command = ["ip", "netns", "exec", network.namespace(host), "unshare", "--uts", "sh", "-c", server]
            servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        (folder / "known_hosts").write_text(known)
        aliases = "".join(f"Host {host}\n  HostName {network.address(host)}\n" for host in network.hosts)
        config = folder / "ssh_config"
        config.write_text(aliases + _SSH_CONFIG.format(hosts="host*", port=_SSH_PORT, folder=folder))
        for host in network.hosts:
            _wait_for_server(network.address(host))
        yield config
    finally:
        for server in servers:
            server.kill()
            server.wait(timeout=10)


def _claimed() -> Network:
    """A network that nobody else has: its bridge can be added only once."""
    for offset in range(_NETWORKS):
        network = Network((os.getpid() + offset) % _NETWORKS)
        done = subprocess.run(
            ["ip", "link", "add", network.bridge, "type", "bridge"], capture_output=True, text=True, timeout=30
        )
        if not done.returncode:
            return network
        if "File exists" not in done.stderr:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no networks here: {done.stderr.strip()}")
    raise AssertionError("all networks are in use")


def _remove(network: Network, host: str) -> None:
    """Ends what runs on a host, then removes it; it may exist in part only."""
    space = network.namespace(host)
    with contextlib.suppress(subprocess.CalledProcessError):
        deadline = time.monotonic() + 10
        while (pids := network.pids(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
    with contextlib.suppress(subprocess.CalledProcessError):
        # Not left to the end of the namespace, which the kernel puts off.
        _ip(f"link delete v{space}")
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip(f"netns delete {space}")
    shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def _new_key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True, timeout=30)


def _wait_for_server(address: str) -> None:
    deadline = time.monotonic() + _START_SECS
    while True:
        try:
            socket.create_connection((address, _SSH_PORT), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"no ssh server at {address}"
            time.sleep(0.05)


def _ip(command: str) -> str:
    done = subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True, timeout=30)
    return done.stdout
