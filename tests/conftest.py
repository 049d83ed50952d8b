"""What several tests need: child processes with a hard limit, and free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Importable from test files in subfolders too.
sys.path.insert(0, str(ROOT / "tests"))


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment for a child that imports the same package, without a cluster."""
    import tf_largebatch

    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    package_parent = str(Path(tf_largebatch.__file__).resolve().parents[1])
    environment.update(PYTHONPATH=package_parent, TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", **extra)
    return environment


def launcher(name: str) -> str:
    """File of a launcher, of the installed package where that is under test."""
    import tf_largebatch

    package = Path(tf_largebatch.__file__).resolve().parent
    inside = package / "launchers" / f"{name}.py"
    return str(inside if inside.exists() else ROOT / "launchers" / f"{name}.py")


def python(*arguments: str, timeout: float = 300, cwd: Path | None = None, **environment: str):
    """Runs Python to its end and gives the CompletedProcess, output as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=child_environment(**environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def tf_configs(count: int) -> list[str]:
    """TF_CONFIG of each of `count` workers on this machine."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [
        json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        for index in range(count)
    ]


class Workers:
    """Processes of one job: started together, ended together, output kept."""

    def __init__(self):
        self._processes: list[subprocess.Popen] = []

    def start(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=child_environment(**environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, count: int, *arguments: str, timeout: float = 300) -> list[str]:
        """Runs `count` workers with one TF_CONFIG; gives their outputs, all having exited with 0."""
        processes = [self.start(*arguments, TF_CONFIG=config) for config in tf_configs(count)]
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        for process, output in zip(processes, outputs):
            assert process.returncode == 0, output[-3000:]
        return outputs

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                # A worker under MultiWorkerMirroredStrategy ignores SIGTERM.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def workers():
    job = Workers()
    yield job
    job.end()
