"""How workers meet: the wait for one another has an end, hears signals, and a silent worker is noticed."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time

import pytest
from conftest import tf_configs
from one_sentence import refusal

from tf_largebatch import worker_events
from tf_largebatch.distribution import cluster, meeting
from tf_largebatch.distribution.cluster import Cluster, of_workers

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(180)
MEETS = """
import time
from tf_largebatch.distribution import strategies, worker_sums
strategy = strategies.strategy()
print("met", flush=True)
"""
SLEEPS = MEETS + "time.sleep(120)"
SUMS = (
    MEETS
    + """
until = time.monotonic() + 120
while time.monotonic() < until:
    worker_sums.total(strategy, [1])
    print("summed", flush=True)
    time.sleep(0.02)
"""
)


class Watched:
    """A worker and what it has printed so far."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.output = process, ""

    def until(self, text: str, timeout_secs: float = 90.0) -> None:
        """Reads until it has printed the text once more."""
        begin, deadline = len(self.output), time.monotonic() + timeout_secs
        descriptor = self.process.stdout.fileno()
        while text not in self.output[begin:]:
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_secs} s: {self.output[-3000:]}"
            if select.select([descriptor], [], [], 0.1)[0]:
                chunk = os.read(descriptor, 65536)
                assert chunk, f"ended without {text!r}: {self.output[-3000:]}"
                self.output += chunk.decode()

    def end(self, timeout_secs: float) -> int:
        """Its exit code; fails if it has not ended by itself after so long."""
        deadline = time.monotonic() + timeout_secs
        descriptor = self.process.stdout.fileno()
        while time.monotonic() < deadline:
            if select.select([descriptor], [], [], 0.05)[0] and (chunk := os.read(descriptor, 65536)):
                self.output += chunk.decode()
            elif self.process.poll() is not None:
                return self.process.returncode
        raise AssertionError(f"still running after {timeout_secs} s: {self.output[-3000:]}")


@pytest.fixture
def start(workers):
    def started(program: str, tf_config: str, **environment: str) -> Watched:
        return Watched(workers.start("-c", program, TF_CONFIG=tf_config, **environment))

    return started


def pair(start, program: str, **environment: str) -> list[Watched]:
    """Two workers that have met."""
    both = [start(program, config, **environment) for config in tf_configs(2)]
    for worker in both:
        worker.until("met\n")
    return both


# A worker whose peer never comes.


def test_a_worker_whose_peer_never_starts_gives_up_and_says_so(start):
    """Whichever of them it is: the chief runs the service at which all meet, the other one looks for it."""
    alone = [start(MEETS, tf_configs(2)[rank], TFLB_START_TIMEOUT="3", TFLB_EVENTS="1") for rank in (0, 1)]
    for rank, worker in enumerate(alone):
        worker.until('{"event": "waiting"}\n')
        began = time.monotonic()
        assert worker.end(timeout_secs=15) == 124
        sentence = f"worker {rank}: the other workers had not started after 3 s; giving up\n"
        assert worker.output.count(sentence) == 1, worker.output
        assert '"ready"' not in worker.output and "met" not in worker.output
        assert "Traceback" not in worker.output
        if rank == 0:
            assert 2.0 < time.monotonic() - began < 8.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_ends_a_worker_that_waits(number, start):
    alone = [start(MEETS, tf_configs(2)[rank], TFLB_EVENTS="1") for rank in (0, 1)]
    for worker in alone:
        worker.until('{"event": "waiting"}\n')
    time.sleep(1.5)  # TensorFlow takes SIGTERM for itself when it has begun to wait
    for worker in alone:
        worker.process.send_signal(number)
        assert worker.end(timeout_secs=2) == -number


def test_a_worker_that_starts_late_but_in_time_is_met(start):
    configs = tf_configs(2)
    environment = {"TFLB_START_TIMEOUT": "60", "TFLB_EVENTS": "1"}
    first = start(MEETS, configs[0], **environment)
    first.until('{"event": "waiting"}\n')
    late = start("import time; time.sleep(1)\n" + MEETS, configs[1], **environment)
    for worker in (first, late):
        assert worker.end(timeout_secs=60) == 0
        assert re.search(r'"waiting"}\n(.*\n)*.*"ready"}\n(.*\n)*met\n', worker.output), worker.output


# Workers that have met, outside of any training.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_ends_a_worker_that_has_met_the_others(number, start):
    chief, other = pair(start, SLEEPS)
    time.sleep(1.0)  # past the last look of whatever watched the start
    other.process.send_signal(number)
    assert other.end(timeout_secs=5 if number == signal.SIGINT else 2) in (-number, 1)
    chief.process.send_signal(number)
    assert chief.end(timeout_secs=5 if number == signal.SIGINT else 2) in (-number, 1)
    if number == signal.SIGTERM:
        assert (other.process.returncode, chief.process.returncode) == (-number, -number)
    else:
        assert "KeyboardInterrupt" in other.output and "KeyboardInterrupt" in chief.output


@pytest.mark.parametrize("silent", [0, 1], ids=["chief", "other"])
def test_a_silent_worker_is_noticed_after_the_heartbeat_limit(silent, start):
    both = pair(start, SUMS, TFLB_HEARTBEAT_TIMEOUT="5")
    for worker in both:
        worker.until("summed\n")
    os.kill(both[silent].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert both[1 - silent].end(timeout_secs=15) != 0
    took = time.monotonic() - began
    print(f"noticed after {took:.1f} s")
    assert took > 2, "that was no limit of 5 s"


# What needs no second process.


@pytest.mark.parametrize("name", ["TFLB_START_TIMEOUT", "TFLB_HEARTBEAT_TIMEOUT"])
@pytest.mark.parametrize("text", ["soon", "0", "-1", "0.0", "inf", "nan", "1e999", "5 s", "5,0", "0x5", "None"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(name, text):
    assert refusal(cluster.from_environment, {name: text}).startswith(f"{name} is {text!r}, but must be ")


def test_limits_are_read_beside_any_cluster():
    found = cluster.from_environment(
        {
            "TFLB_START_TIMEOUT": " 600 ",
            "TFLB_HEARTBEAT_TIMEOUT": "2.5",
            "TF_CONFIG": of_workers(["a:1"], 0).tf_config(),
        }
    )
    assert (found.start_timeout_secs, found.heartbeat_timeout_secs) == (600.0, 2.5)
    unset = cluster.from_environment({"TFLB_START_TIMEOUT": "", "TFLB_HEARTBEAT_TIMEOUT": " "})
    assert (unset.start_timeout_secs, unset.heartbeat_timeout_secs) == (None, None)


@pytest.fixture
def handlers():
    """The signal handlers of this process, put back at the end."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield before
    for number in numbers:
        signal.signal(number, before[number])


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waiting for workers"]


@pytest.mark.smoke
def test_nothing_of_the_wait_is_left_after_it(handlers, monkeypatch, capfd):
    """Its thread sets handlers behind Python's back: one that came too late would undo that of `StopRequest`."""
    monkeypatch.setenv(worker_events.VARIABLE, "1")
    with meeting.waiting(Cluster()):
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL and len(watchers()) == 1
    assert not watchers() and signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert re.findall('"event": "(.*)"', capfd.readouterr().out) == ["waiting", "ready"]


@pytest.mark.smoke
def test_a_meeting_that_fails_leaves_nothing_and_tells_no_success(handlers, monkeypatch, capfd):
    monkeypatch.setenv(worker_events.VARIABLE, "1")
    with pytest.raises(RuntimeError, match="no server"), meeting.waiting(Cluster()):
        raise RuntimeError("no server")
    assert not watchers() and signal.getsignal(signal.SIGINT) == handlers[signal.SIGINT]
    assert re.findall('"event": "(.*)"', capfd.readouterr().out) == ["waiting"]


@pytest.mark.smoke
def test_workers_can_meet_in_a_thread(handlers):
    met = []

    def meet():
        with meeting.waiting(Cluster()):
            met.append(True)

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join(30)
    assert met and not watchers()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
