"""Which hosts a job uses, as the user names them, and how ssh gets there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tf_largebatch.validation import InputError

# ssh's own name or alias of a host, perhaps with the user's name there; and how many workers.
_HOST = re.compile(r"((?:[\w.+-]+@)?[A-Za-z0-9_](?:[\w.-]*\w)?)(?::([0-9]{1,4}))?", flags=re.ASCII)
_SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]{1,4})")
_FORM = "must be HOST, USER@HOST or HOST:WORKERS"


@dataclass(frozen=True)
class Host:
    """A host, and how many workers of the job run there.

    Attributes:
      name: as ssh takes it: a name, an alias of its configuration, an IPv4 address; or `user@` before one.
      workers: 1 or more.
    """

    name: str
    workers: int = 1


@dataclass(frozen=True)
class SshOptions:
    """What the user says about ssh; ssh's own configuration says the rest.

    Attributes:
      config_file: instead of ~/.ssh/config.
      port: of the ssh servers.
      identity: the file of a private key.
      extra: each `Name=value`, as `ssh -o` takes it; these win over what is set here.
      connect_timeout: seconds.
      alive_interval: seconds after which a silent connection is tested; it has failed after three such times.
    """

    config_file: str | None = None
    port: int | None = None
    identity: str | None = None
    extra: tuple[str, ...] = ()
    connect_timeout: int = 10
    alive_interval: int = 10


def parse_hosts(text: str, argument: str = "--hosts") -> tuple[Host, ...]:
    """Reads `a,user@b:2`: hosts in rank order, each with its number of workers, by default 1.

    Args:
      text: the hosts.
      argument: what the user knows them by.

    Raises:
      InputError: an entry is no host, or two are the same.
    """
    return _hosts(text.split(","), argument)


def parse_hostfile(file: str | Path, argument: str = "--hostfile") -> tuple[Host, ...]:
    """Reads a file with a host on each line, as `host`, `host:2` or `host slots=2`; `#` begins a comment.

    Raises:
      InputError: the file cannot be read, names no host or one twice, or a line is no host.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as failure:
        why = failure.strerror if isinstance(failure, OSError) else "it is no text"
        raise InputError(f"{argument} is '{file}', which cannot be read: {why}; name a file of hosts.") from None
    entries = [line.partition("#")[0].strip() for line in lines]
    named = [_SLOTS.sub(r"\1:\2", entry) for entry in entries if entry]
    if not named:
        raise InputError(f"{argument} is '{file}', which names no host; write one on each line.")
    return _hosts(named, f"{argument} '{file}'")


def ssh_command(host: str, options: SshOptions) -> list[str]:
    """The ssh command that gets to a host; the remote command, as one argument, is to be appended."""
    return [*_ssh(options), host]


def address(host: str, options: SshOptions) -> str:
    """Where ssh finds a host: the HostName of its configuration, which other hosts know too, not an alias.

    Raises:
      InputError: ssh is missing, or does not take the options.
    """
    try:
        done = subprocess.run(
            [*_ssh(options), "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as failure:
        raise InputError(f"--hosts needs ssh, which cannot be started here: {failure.strerror}.") from None
    found = re.search(r"^hostname (\S+)$", done.stdout, flags=re.MULTILINE)
    if done.returncode or not found:
        raise InputError(f"--hosts: ssh does not take its options for {host}: {last_line(done.stderr)}.")
    # An IPv6 address must stand in brackets before a port.
    return f"[{found[1]}]" if ":" in found[1] else found[1]


def last_line(text: str) -> str:
    """The last line in which a program says why it failed, to be put into a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"[.!?]( +[A-Z])", r";\1", lines[-1].rstrip(".!?")) if lines else "it does not say why"


def _ssh(options: SshOptions) -> list[str]:
    command = ["ssh", "-T", "-x"]
    command += ["-F", options.config_file] if options.config_file else []
    command += ["-p", str(options.port)] if options.port else []
    command += ["-i", options.identity] if options.identity else []
    # Of an option that comes twice, ssh takes the first.
    settings = [
        "BatchMode=yes",
        *options.extra,
        f"ConnectTimeout={options.connect_timeout}",
        f"ServerAliveInterval={options.alive_interval}",
        "ServerAliveCountMax=3",
        # What the user's configuration may hold for work by hand: a connection that several share, which can
        # outlive this one; forwarded ports, which only one connection can have; a command of its own.
        "ControlPath=none",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
    ]
    return [*command, *(part for setting in settings for part in ("-o", setting))]


def _hosts(entries: Iterable[str], argument: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for entry in entries:
        parts = _HOST.fullmatch(entry.strip())
        if not parts:
            raise InputError(f"{argument} holds {entry.strip()!r}, but every entry {_FORM}.")
        host = Host(parts[1], int(parts[2] or 1))
        if not host.workers:
            raise InputError(f"{argument} holds {entry.strip()!r}, but a host has 1 worker or more; leave it out.")
        machine = host.name.rpartition("@")[2]
        if machine in hosts:
            raise InputError(f"{argument} names {machine} twice; write {machine}:2 for two workers there.")
        hosts[machine] = host
    return tuple(hosts.values())
