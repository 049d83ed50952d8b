"""Stub workers of a few lines, without TensorFlow, and how tests run and watch them."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

from tf_largebatch.supervisor import local_processes, supervise, watch
from tf_largebatch.supervisor.job import Job, Worker

REPOSITORY = Path(__file__).resolve().parents[1]
# Stubs that wait for their end give up by themselves, so that a failing test leaves nothing for ever.
WAITS = "import time; print('ready', flush=True); time.sleep(90)"
FAILS_WITH_3 = "import sys, time; time.sleep(0.2); print('no such file'); sys.exit(3)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
IGNORES_ALL = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + IGNORES_SIGTERM
ENDS_WELL = "print('done')"
# These have the package of this checkout.
TELLS = "from tf_largebatch.worker_events import tell\n"
# As training under `save_and_resume.py`: SIGTERM makes it save and end with 75.
SAVES = f"""{TELLS}
import signal, sys, time
def save(number, frame):
    print("saving", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
for event in ("waiting", "ready", "stoppable"): tell(event)
print("ready", flush=True)
time.sleep(90)
"""


def stub_job(*programs: str) -> Job:
    workers = tuple(Worker(rank, (sys.executable, "-c", program)) for rank, program in enumerate(programs))
    return Job(workers, tuple(f"127.0.0.1:{2000 + worker.rank}" for worker in workers))


def run(folder: Path, *programs: str, options: supervise.Options | None = None, **limits) -> tuple[int, str]:
    """(exit code, what the launcher shows) of a job of these programs; `limits` are those of `watch.Limits`."""
    output = io.StringIO()
    code = run_onto(output, folder, *programs, options=options or supervise.Options(watch.Limits(**limits)))
    return code, output.getvalue()


def run_onto(output, folder: Path, *programs: str, options: supervise.Options | None = None) -> int:
    """Runs a job of these programs, whose lines go to the file `output`; gives its exit code."""
    return supervise.run(lambda attempt: stub_job(*programs), local_processes.LocalProcess, folder, options, output)


def logs(folder: Path, attempt: int = 0) -> Path:
    """The log folder of an attempt of the one job in `folder`."""
    (job,) = folder.glob("20*-*_*")
    return job / f"attempt_{attempt}"


def record(folder: Path) -> dict:
    """What job.json of the one job in `folder` says."""
    (file,) = folder.glob("20*-*_*/job.json")
    return json.loads(file.read_text())


def is_running(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition, what: str, timeout_secs: float = 30.0):
    deadline = time.monotonic() + timeout_secs
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_secs} s for {what}"
        time.sleep(0.02)
    return value


def writes_pid(folder: Path, program: str) -> str:
    """A stub that leaves its process id in `folder`, then does what `program` says."""
    return textwrap.dedent(f"""
        import os
        open({str(folder)!r} + "/" + str(os.getpid()) + ".pid", "w").close()
    """) + textwrap.dedent(program)


def pids(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.pid")]


@contextlib.contextmanager
def launcher(
    folder: Path, *programs: str, output=subprocess.PIPE, options: dict | None = None, setup: str = "", **limits
):
    """A process of its own that runs a job of these stubs.

    `options` are those of `supervise.Options` beside its limits, `setup` is what it runs first.
    """
    program = f"""
import pathlib, sys
from tf_largebatch.supervisor import local_processes, supervise, watch
from tf_largebatch.supervisor.job import Job, Worker
programs = {[writes_pid(folder, program) for program in programs]!r}
workers = tuple(Worker(rank, (sys.executable, "-c", text)) for rank, text in enumerate(programs))
job = Job(workers, ("localhost:1",) * len(workers))
options = supervise.Options(watch.Limits(**{limits!r}), **{options or {}!r})
{setup}
sys.exit(supervise.run(lambda attempt: job, local_processes.LocalProcess, pathlib.Path({str(folder)!r}), options))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=output,
        stderr=subprocess.STDOUT if output == subprocess.PIPE else output,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        for pid in pids(folder):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=30)
        if process.stdout:
            process.stdout.close()


@contextlib.contextmanager
def run_live(folder: Path, *programs: str, columns: int = 61, **limits):
    """As `launcher`, on a pseudo-terminal: (the launcher's process, the descriptor to read its terminal from)."""
    master, slave = os.openpty()
    try:
        termios.tcsetwinsize(slave, (24, columns))
        with launcher(folder, *programs, output=slave, **limits) as process:
            os.close(slave)
            yield process, master
    finally:
        os.close(master)


def read_terminal(master: int, until: str, and_then: str = "", timeout_secs: float = 30.0) -> str:
    """What a terminal shows, up to where it has shown both texts."""
    seen, deadline = "", time.monotonic() + timeout_secs
    decoder = codecs.getincrementaldecoder("utf-8")()
    while until not in seen or and_then not in seen:
        assert time.monotonic() < deadline, f"no {until!r} on the terminal in {timeout_secs} s: {seen!r}"
        if select.select([master], [], [], 0.1)[0]:
            seen += decoder.decode(os.read(master, 65536))
    return seen


def all_ready(folder: Path, count: int):
    def ready() -> bool:
        texts = [log.read_text() for log in folder.glob("20*/attempt_*/worker_*.log")]
        return sum("ready" in text for text in texts) == count

    wait_until(ready, f"{count} workers to be ready")
