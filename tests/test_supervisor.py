"""The supervisor with real processes: stubs of a few lines, without TensorFlow."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from tf_largebatch.distribution import cluster
from tf_largebatch.supervisor import gpus, job, local_ports, local_processes, watch, worker_output
from tf_largebatch.supervisor.job import Job, Worker
from tf_largebatch.validation import InputError

REPOSITORY = Path(__file__).resolve().parents[1]
# No test waits this long unless it fails.
HARD_TIMEOUT_SECS = 60
# Stubs that wait for their end give up by themselves, so that a failing test leaves nothing for ever.
WAITS = "import time; print('ready', flush=True); time.sleep(90)"
FAILS_WITH_3 = "import sys, time; time.sleep(0.2); print('no such file'); sys.exit(3)"
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITS
IGNORES_ALL = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + IGNORES_SIGTERM
ENDS_WELL = "print('done')"


@pytest.fixture(autouse=True)
def hard_timeout():
    def fail(number, frame):
        raise TimeoutError(f"the test took more than {HARD_TIMEOUT_SECS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(HARD_TIMEOUT_SECS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def stub_job(*programs: str) -> Job:
    workers = tuple(Worker(rank, (sys.executable, "-c", program)) for rank, program in enumerate(programs))
    return Job(workers, tuple(f"127.0.0.1:{2000 + worker.rank}" for worker in workers))


def run(folder: Path, *programs: str, **options) -> tuple[int, str]:
    output = io.StringIO()
    code = local_processes.run(stub_job(*programs), folder, output, **options)
    return code, output.getvalue()


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
def launcher(folder: Path, *programs: str, output=subprocess.PIPE, **options):
    """A process of its own that runs a job of these stubs, once they are all ready."""
    program = f"""
import sys
from tf_largebatch.supervisor import local_processes
from tf_largebatch.supervisor.job import Job, Worker
programs = {[writes_pid(folder, program) for program in programs]!r}
workers = tuple(Worker(rank, (sys.executable, "-c", text)) for rank, text in enumerate(programs))
sys.exit(local_processes.run(Job(workers, ("localhost:1",) * len(workers)), {str(folder)!r}, **{options!r}))
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


def all_ready(folder: Path, count: int):
    def ready() -> bool:
        logs = [log.read_text() for log in folder.glob("worker_*.log")]
        return sum("ready" in log for log in logs) == count

    wait_until(ready, f"{count} workers to be ready")


# The pure part.


def test_each_worker_gets_its_own_tf_config_and_its_share_of_the_gpus():
    addresses = ["127.0.0.1:2001", "127.0.0.1:2002"]
    made = job.local_job(["train", "--x"], addresses, ("0", "1", "2", "3"), {"NAME": "value"})
    for rank, share in enumerate(["0,1", "2,3"]):
        environment = made.workers[rank].full_environment({"HOME": "/home", "TF_CONFIG": "of another job"})
        assert environment["CUDA_VISIBLE_DEVICES"] == share
        assert environment["NAME"] == "value" and environment["HOME"] == "/home"
        seen = cluster.from_environment(environment)
        assert (seen.num_workers, seen.rank, seen.address) == (2, rank, addresses[rank])
        assert made.workers[rank].argv == ("train", "--x")


def test_one_worker_has_no_tf_config_not_even_an_inherited_one():
    worker = job.local_job(["train"], ["127.0.0.1:2001"]).workers[0]
    assert worker.full_environment({"TF_CONFIG": "of another job", "A": "b"}) == {"A": "b"}


def test_without_gpus_an_inherited_cuda_visible_devices_stays():
    worker = job.local_job(["train"], ["a:1", "b:1"]).workers[1]
    assert worker.full_environment({"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_that_cannot_be_shared_evenly_are_refused_with_the_counts_that_can():
    with pytest.raises(InputError, match=r"4 visible GPUs \(0, 1, 2, 3\).*use 1 or 2 or 4 workers"):
        job.local_job(["train"], ["a:1", "b:1", "c:1"], ("0", "1", "2", "3"))


def test_the_description_can_be_pasted_into_a_shell():
    argv = [sys.executable, "-c", "import os; print(os.environ.get('TF_CONFIG'), os.environ['A'])"]
    for addresses in (["127.0.0.1:2001"], ["127.0.0.1:2001", "127.0.0.1:2002"]):
        made = job.local_job(argv, addresses, (), {"A": 'it\'s "quoted" $HOME'})
        printed = subprocess.run(
            ["sh", "-c", job.describe(made)],
            env={**os.environ, "TF_CONFIG": "inherited"},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        expected = [dict(worker.environment)["TF_CONFIG"] for worker in made.workers]
        assert printed.splitlines() == [f'{tf_config} it\'s "quoted" $HOME' for tf_config in expected]


def test_the_package_in_use_comes_first_and_the_current_folder_last():
    assert job.worker_python_path("/package", "/theirs::/more", "/here") == "/package:/theirs:/more:/here"
    assert job.worker_python_path("/checkout", "", "/checkout") == "/checkout"


# Ports and GPUs.


def test_free_ports_are_all_different_and_free():
    addresses = local_ports.free_addresses(20)
    ports = [int(address.removeprefix("127.0.0.1:")) for address in addresses]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as server:
            server.bind(("0.0.0.0", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_busy_port_is_passed_over_and_named(host, caplog):
    first, second, third = _three_free_ports_in_a_row()
    with socket.socket() as busy:
        busy.bind((host, second))
        busy.listen()
        addresses = local_ports.free_addresses(2, first)
    assert addresses == [f"127.0.0.1:{first}", f"127.0.0.1:{third}"]
    assert f"Port {second} " in caplog.text


def test_too_few_ports_are_a_mistake_of_the_user():
    with pytest.raises(InputError, match="--port is 65534"):
        local_ports.free_addresses(3, 65534)


def _three_free_ports_in_a_row() -> tuple[int, int, int]:
    for first in range(20011, 30000, 7):
        ports = (first, first + 1, first + 2)
        try:
            for port in ports:
                with socket.socket() as server:
                    server.bind(("0.0.0.0", port))
        except OSError:
            continue
        return ports
    raise AssertionError("no three free ports in a row")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2, 3", ("2", "3")),
        ("0,-1,1", ("0",)),
        ("GPU-8932f937,MIG-1", ("GPU-8932f937", "MIG-1")),
    ],
)
def test_cuda_visible_devices_decides(value, expected, tmp_path):
    _fake_nvidia_smi(tmp_path, "echo 'GPU 0: A (UUID: GPU-1)'")
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": value, "PATH": str(tmp_path)}) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: Tesla V100 (UUID: GPU-1)'; echo 'GPU 1: Tesla V100 (UUID: GPU-2)'", ("0", "1")),
        ("echo 'GPU 0: A100 (UUID: GPU-1)'; echo '  MIG 1g.5gb Device 0: (UUID: MIG-1)'", ("0",)),
        ("echo 'No devices found.'", ()),
        ("echo 'cannot talk to the driver'; exit 9", ()),
    ],
)
def test_nvidia_smi_is_asked_otherwise(script, expected, tmp_path):
    # No GPU exists where these tests run: the program on the PATH is a fake.
    _fake_nvidia_smi(tmp_path, script)
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == expected


def test_an_nvidia_smi_that_hangs_means_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_TIMEOUT_SECS", 0.3)
    _fake_nvidia_smi(tmp_path, "exec /bin/sleep 30")
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == ()


def test_without_nvidia_smi_there_is_no_gpu(tmp_path):
    assert gpus.visible_gpus({"PATH": str(tmp_path)}) == ()


def _fake_nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 7\n{script}\n')
    program.chmod(0o755)


# Output.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("plain", "plain"),
        ("1/3\r2/3\r3/3", "3/3"),
        ("1/3\b\b\b\r2/3\b\b\b\r3/3\r", "3/3"),
        ("\r", ""),
        ("working |\b/\b-", "working -"),
        ("\b\bx", "x"),
    ],
)
def test_a_redrawn_line_is_kept_in_its_last_state(line, expected):
    assert worker_output.folded(line) == expected


def test_colours_take_no_room():
    assert worker_output.cut("\x1b[1mabc\x1b[0mdef", 4) == "\x1b[1mabc\x1b[0md"
    assert worker_output.cut("abc\x1b[0m", 2) == "ab\x1b[0m"
    assert worker_output.cut("abc", -1) == ""


def test_every_line_has_its_prefix_and_every_worker_its_log(tmp_path):
    # The pauses make a redrawn line and a character of two bytes arrive in pieces.
    program = textwrap.dedent("""
        import os, sys, time
        print("out")
        print("err", file=sys.stderr)
        for piece in (b"1/2\\r", b"2/2  \\n\\xc3", b"\\xbc end"):
            os.write(1, piece)
            time.sleep(0.3)
    """)
    code, shown = run(tmp_path, program, program)
    assert code == 0
    for rank in (0, 1):
        lines = ["out", "err", "2/2", "ü end"]
        assert (tmp_path / f"worker_{rank}.log").read_text("utf-8").splitlines() == lines
        prefix = f"[worker {rank}] "
        assert [line for line in shown.splitlines() if line.startswith(prefix)] == [prefix + line for line in lines]


def test_logs_are_appended_and_the_record_is_of_the_last_run(tmp_path):
    for _ in range(2):
        assert run(tmp_path, ENDS_WELL)[0] == 0
    assert (tmp_path / "worker_0.log").read_text() == "done\ndone\n"
    record = json.loads((tmp_path / "job.json").read_text())
    assert record["addresses"] == ["127.0.0.1:2000"]
    assert record["start"] <= record["end"]
    assert record["exit_code"] == 0 and record["workers"][0]["exit_code"] == 0
    assert record["workers"][0]["command"] == [sys.executable, "-c", ENDS_WELL]


def test_a_reader_that_goes_away_does_not_stop_the_job(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    assert local_processes.run(stub_job("for i in range(20000): print('line', i)"), tmp_path, Gone()) == 0
    assert len((tmp_path / "worker_0.log").read_text().splitlines()) == 20000


def test_a_terminal_of_another_encoding_gets_question_marks(tmp_path):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert local_processes.run(stub_job("print('━ bar')"), tmp_path, ascii_only) == 0
    assert ascii_only.buffer.getvalue() == b"[worker 0] ? bar\n"


def test_workers_have_no_input_and_a_session_of_their_own(tmp_path):
    program = "import os; print(os.getsid(0) == os.getpid(), os.isatty(1), os.readlink('/proc/self/fd/0'))"
    assert run(tmp_path, program)[1] == "[worker 0] True False /dev/null\n"


# How a job ends.


def test_the_first_failure_ends_the_job_with_its_code_and_is_named(tmp_path):
    code, shown = run(tmp_path, WAITS, FAILS_WITH_3)
    assert code == 3
    assert re.search(r"worker 1 failed first: exit code 3 after [\d.]+ s; the job ends with exit code 3\.$", shown)
    assert f"The last lines of {tmp_path}/worker_1.log:\n    no such file\n" in shown
    assert "worker 0: killed by SIGTERM" in shown
    record = json.loads((tmp_path / "job.json").read_text())
    assert [worker["exit_code"] for worker in record["workers"]] == [143, 3]


def test_a_survivor_that_fails_afterwards_is_not_the_culprit(tmp_path):
    survivor = "import sys, time; time.sleep(1.2); print('UnavailableError'); sys.exit(1)"
    code, shown = run(tmp_path, survivor, "import os; os.kill(os.getpid(), 9)")
    assert code == 137
    assert "worker 1 failed first: killed by SIGKILL" in shown
    assert "worker 0: exit code 1 after" in shown  # it had time to show its own end


def test_of_two_that_are_seen_to_end_together_a_survivor_is_not_the_culprit():
    @dataclasses.dataclass
    class Ended:
        name: str
        exit_code: int
        end: str = "at once"

        def has_ended(self) -> bool:
            return True

    watched = watch.Watch([Ended("worker 0", 1), Ended("worker 1", 4)], [], print, 1.0, 1.0, 1.0)
    watched.until_all_ended()
    assert (watched.exit_code, watched.reason) == (4, "worker 1 failed first: at once")


def test_the_last_worker_to_end_can_be_the_one_that_fails(tmp_path):
    assert run(tmp_path, ENDS_WELL, FAILS_WITH_3)[0] == 3


def test_bad_input_on_every_worker_is_code_2(tmp_path):
    program = "import sys; print('unknown key'); sys.exit(2)"
    assert run(tmp_path, program, program)[0] == 2


def test_only_the_last_twenty_lines_are_repeated(tmp_path):
    shown = run(tmp_path, "for i in range(30): print('line', i)\nraise SystemExit(5)")[1]
    repeated = re.findall(r"^    line (\d+)$", shown, flags=re.MULTILINE)
    assert repeated == [str(number) for number in range(10, 30)]


def test_a_worker_that_ignores_sigterm_is_killed(tmp_path):
    waits_for_ready = f"""
import pathlib, sys, time
while "ready" not in pathlib.Path({str(tmp_path / "worker_0.log")!r}).read_text(): time.sleep(0.02)
sys.exit(3)
"""
    code, shown = run(tmp_path, IGNORES_SIGTERM, waits_for_ready, failure_grace_secs=0.5)
    assert code == 3
    assert "worker 0: killed by SIGKILL" in shown


def test_what_a_worker_started_ends_with_it(tmp_path):
    starts_another = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"])
        open({str(tmp_path)!r} + "/" + str(child.pid) + ".pid", "w").close()
    """
    began = time.monotonic()
    assert run(tmp_path, textwrap.dedent(starts_another))[0] == 0
    (child,) = pids(tmp_path)
    wait_until(lambda: not is_running(child), "the worker's child to end")
    assert time.monotonic() - began < 45


def test_a_worker_that_ends_well_long_before_the_others_has_failed(tmp_path):
    code, shown = run(tmp_path, WAITS, ENDS_WELL, exit_grace_secs=0.5)
    assert code == 1
    assert "worker 1 ended early: exit code 0" in shown
    assert "but worker 0 went on for more than 0.5 s" in shown


def test_workers_may_end_well_one_after_the_other(tmp_path):
    assert run(tmp_path, "import time; time.sleep(0.7)", ENDS_WELL)[0] == 0


def test_a_command_that_does_not_exist_leaves_nothing_running(tmp_path):
    waiting = Worker(0, (sys.executable, "-c", writes_pid(tmp_path, WAITS)))
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        local_processes.run(Job((waiting, Worker(1, ("/no/such/program",))), ("a:1", "b:1")), tmp_path, io.StringIO())
    time.sleep(1.0)  # were worker 0 still there, it would have left its process id by now
    assert not any(is_running(pid) for pid in pids(tmp_path))


def test_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tmp_path, ENDS_WELL)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


# Signals to the launcher.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_asks_all_workers_to_end(number, code, tmp_path):
    says_so = """
        import time
        print("ready", flush=True)
        try:
            time.sleep(90)
        except KeyboardInterrupt:
            print("asked")
    """
    with launcher(tmp_path, says_so, says_so) as process:
        all_ready(tmp_path, 2)
        process.send_signal(number)
        shown = process.communicate(timeout=30)[0].decode()
        assert process.returncode == code
        assert "[worker 0] asked" in shown and "[worker 1] asked" in shown
        assert len(pids(tmp_path)) == 2 and not any(is_running(pid) for pid in pids(tmp_path))
    assert json.loads((tmp_path / "job.json").read_text())["exit_code"] == code


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL, grace_secs=1000.0) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert not any(is_running(pid) for pid in pids(tmp_path))


def test_workers_that_do_not_end_when_asked_are_killed_after_the_grace(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL, grace_secs=0.5) as process:
        all_ready(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert not any(is_running(pid) for pid in pids(tmp_path))


def test_workers_can_be_interrupted_although_the_launcher_began_with_sigint_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with launcher(tmp_path, IGNORES_SIGTERM, grace_secs=1000.0) as process:
            all_ready(tmp_path, 1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 143
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
def test_workers_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    with launcher(tmp_path, IGNORES_ALL, IGNORES_ALL) as process:
        all_ready(tmp_path, 2)
        assert all(is_running(pid) for pid in pids(tmp_path)) and len(pids(tmp_path)) == 2
        process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids(tmp_path)), "the workers to end")


# A real terminal.


def test_a_progress_bar_is_live_on_the_terminal_and_one_line_in_the_log(tmp_path):
    # What Keras writes: backspaces, a carriage return, the bar in colours.
    draws = f"""
        import os, sys, time
        print("terminal", sys.stdout.isatty(), os.get_terminal_size().columns)
        for step in range(1, 4):
            sys.stdout.write("\\b" * 20 + f"\\r\\x1b[1m{{step}}/3\\x1b[0m loss " + "x" * 200)
            sys.stdout.flush()
            while not os.path.exists({str(tmp_path)!r} + f"/go{{step}}"): time.sleep(0.02)
        print()
    """
    other = f"""
        import os, sys, time
        while not os.path.exists({str(tmp_path)!r} + "/go2"): time.sleep(0.02)
        print("terminal", sys.stdout.isatty())
    """
    master, slave = os.openpty()
    try:
        # 61 columns: a drawing must not reach the last one, or the next would start a line below.
        termios.tcsetwinsize(slave, (24, 61))
        with launcher(tmp_path, draws, other, output=slave) as process:
            os.close(slave)
            bar = "[worker 0] \x1b[1m{}/3\x1b[0m loss " + "x" * (60 - len("[worker 0] 1/3 loss "))
            seen = read_terminal(master, until=bar.format(1))
            assert "[worker 0] terminal True 50\r\n" in seen
            (tmp_path / "go1").touch()
            seen = read_terminal(master, until=bar.format(2))
            assert "\r\x1b[K" in seen and "\n" not in seen and "x" * 61 not in seen
            (tmp_path / "go2").touch()
            seen = read_terminal(master, until="[worker 1] terminal False\r\n[worker 0] ", and_then=bar.format(3))
            assert "\x1b[K[worker 1] terminal False\r\n[worker 0] \x1b[1m" in seen
            (tmp_path / "go3").touch()
            seen = read_terminal(master, until="\n")
            assert seen == "\r\x1b[K[worker 0] \x1b[1m3/3\x1b[0m loss " + "x" * 200 + "\r\n"
            assert process.wait(timeout=30) == 0
    finally:
        os.close(master)
    logged = (tmp_path / "worker_0.log").read_text().splitlines()
    assert logged == ["terminal True 50", "\x1b[1m3/3\x1b[0m loss " + "x" * 200]


def read_terminal(master: int, until: str, and_then: str = "", timeout_secs: float = 30.0) -> str:
    seen, deadline = "", time.monotonic() + timeout_secs
    while until not in seen or and_then not in seen:
        assert time.monotonic() < deadline, f"no {until!r} on the terminal in {timeout_secs} s: {seen!r}"
        if select.select([master], [], [], 0.1)[0]:
            seen += os.read(master, 65536).decode()
    return seen
