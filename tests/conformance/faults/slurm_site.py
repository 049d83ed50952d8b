"""A real Slurm on this machine: munged, slurmctld and one slurmd for each of three nodes with two GPUs each.

The GPUs are two device files that any machine has; Slurm sets CUDA_VISIBLE_DEVICES for them as on a real
cluster. All nodes are this machine, and only what Slurm starts knows them by their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import free_ports

from tf_largebatch.supervisor.local_processes import die_with

# Sorted as text, node10 would come first.
NODES = ("node8", "node9", "node10")
GPUS_PER_NODE = 2
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
_MUNGE_FILES = ("socket", "key-file", "pid-file", "log-file", "seed-file")
_WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
_START_SECS = 60.0
_END_SECS = 15.0
_REPOSITORY = Path(__file__).resolve().parents[3]

# cred_expire is also how long Slurm holds back a job that is requeued.
_SLURM_CONF = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
SchedulerParameters=sched_interval=5,bf_interval=5
PartitionName=tests Nodes={names} Default=YES MaxTime=00:20:00 State=UP OverTimeLimit=0
"""
_NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
    "CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
)
_GRES_CONF = "NodeName={names} Name=gpu File=/dev/tty[0-1]\n"


@dataclass(frozen=True)
class Site:
    """A running Slurm.

    Attributes:
      folder: of its files; jobs may write beside them.
      environment: with which its commands, and only they, find it.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, timeout: float = 60.0, **environment: str) -> subprocess.CompletedProcess:
        """Runs a command such as srun to its end, or kills it."""
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows about a job: JobState, ExitCode, Restarts and more."""
        told = self.run("scontrol", "show", "job", job_id).stdout
        return dict(entry.split("=", 1) for entry in told.split() if "=" in entry)

    def state(self, job_id: str) -> str:
        return self.job(job_id).get("JobState", "")

    def processes(self) -> list[int]:
        """What runs here because of any job of this Slurm, whichever node it is on."""
        marks = {f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(), b"SLURM_CLUSTER_NAME=tests"}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = set((folder / "environ").read_bytes().split(b"\0"))
                if marks <= variables and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(folder.name))
        return found


@contextlib.contextmanager
def slurm_site() -> Iterator[Site]:
    """Starts the daemons, waits until all nodes are idle, and in the end stops what it and its jobs started."""
    _need_programs()
    # Not under pytest's folder: the path of a socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tflb_slurm_"))
    daemons: list[subprocess.Popen] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TF_CONFIG"))}
    environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(_REPOSITORY)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    site = Site(folder, environment)
    try:
        _configure(folder)
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in _MUNGE_FILES]
        # --force: its folder is in /tmp, which others can write to.
        daemons.append(_daemon(site, "munged", "--foreground", "--force", *munge))
        _wait(lambda: (folder / "munge.socket").exists(), "munged's socket", site)
        daemons.append(_daemon(site, "slurmctld", "-D"))
        daemons.extend(_daemon(site, "slurmd", "-D", "-N", name) for name in NODES)
        _wait(lambda: _idle(site), "three idle nodes", site)
        yield site
    finally:
        _stop(site, daemons)
        shutil.rmtree(folder, ignore_errors=True)


def _need_programs() -> None:
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    why = f"{', '.join(missing)} not installed" if missing else "" if os.geteuid() == 0 else "not run as root"
    if why:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs Slurm: {why}")


def _configure(folder: Path) -> None:
    ports = free_ports(1 + len(NODES))
    names = ",".join(NODES)
    nodes = "\n".join(_NODE.format(name=name, port=port) for name, port in zip(NODES, ports[1:]))
    text = _SLURM_CONF.format(folder=folder, ports=ports, nodes=nodes, names=names)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(_GRES_CONF.format(names=names))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(NODES)}\n")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)


def _daemon(site: Site, *command: str) -> subprocess.Popen:
    log = site.folder / f"{command[0]}{command[-1] if command[0] == 'slurmd' else ''}.out"
    tests = os.getpid()
    if command[0] == "slurmd":
        # In a mount namespace of its own, whose /etc/hosts has the nodes.
        command = ("unshare", "--mount", "sh", "-c", _WITH_HOSTS, "slurmd", str(site.folder / "hosts"), *command)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=site.environment,
            cwd=site.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: die_with(tests),
        )


def _idle(site: Site) -> bool:
    states = site.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
    return states == ["idle"] * len(NODES)


def _wait(condition, what: str, site: Site) -> None:
    deadline = time.monotonic() + _START_SECS
    while not condition():
        if time.monotonic() > deadline:
            logs = {log.name: log.read_text(errors="replace")[-800:] for log in site.folder.glob("*.out")}
            pytest.fail(f"waited {_START_SECS:g} s for {what}; {logs}")
        time.sleep(0.1)


def _stop(site: Site, daemons: Sequence[subprocess.Popen]) -> None:
    if len(daemons) > 1:
        with contextlib.suppress(subprocess.SubprocessError):
            site.run("scancel", "--user=root", timeout=20)
            deadline = time.monotonic() + _END_SECS
            while site.run("squeue", "--noheader").stdout and time.monotonic() < deadline:
                time.sleep(0.2)
    for pid in site.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # munged last: the others speak through it.
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def main() -> None:
    """A shell in which srun and sbatch find such a Slurm, to try things by hand."""
    with slurm_site() as site:
        subprocess.run([os.environ.get("SHELL", "sh")], env=site.environment)


if __name__ == "__main__":
    main()
