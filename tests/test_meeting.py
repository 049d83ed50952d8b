"""How workers meet: the wait for one another has an end, hears signals, and a silent worker is noticed."""

from __future__ import annotations

import dataclasses
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
from tensorflow.python.eager import context

from tf_largebatch import worker_events
from tf_largebatch._keras import tf
from tf_largebatch.distribution import cluster, meeting, strategies
from tf_largebatch.distribution.cluster import Cluster, of_workers
from tf_largebatch.supervisor import attempt

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
    for worker in (other, chief):
        worker.process.send_signal(number)
        # After SIGINT Python takes leave of TensorFlow, which looks for the worker that has gone.
        code = worker.end(timeout_secs=2 if number == signal.SIGTERM else 8)
        assert code == -number, worker.output[-3000:]
        assert ("KeyboardInterrupt" in worker.output) == (number == signal.SIGINT)


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
    # By its last lines the supervisor sees that it is not the one to blame.
    tail = both[1 - silent].output.splitlines()[-100:]
    assert any(attempt._LOST_PEER.search(line) for line in tail), tail


@pytest.mark.parametrize("killed", [0, 1], ids=["chief", "other"])
def test_a_killed_worker_is_noticed_and_the_survivor_shows_that_it_is_one(killed, start):
    both = pair(start, SUMS)
    for worker in both:
        worker.until("summed\n")
    both[killed].process.kill()
    assert both[1 - killed].end(timeout_secs=20) != 0
    tail = both[1 - killed].output.splitlines()[-100:]
    assert any(attempt._LOST_PEER.search(line) for line in tail), tail


def test_a_silent_worker_is_waited_for_as_long_as_the_heartbeat_limit_says(start):
    """TensorFlow's own limit is 10 s; a host that swaps, or a file system that hangs, may need more."""
    chief, other = pair(start, SUMS, TFLB_HEARTBEAT_TIMEOUT="60")
    for worker in (chief, other):
        worker.until("summed\n")
    os.kill(other.process.pid, signal.SIGSTOP)
    with pytest.raises(AssertionError, match="still running"):
        chief.end(timeout_secs=16)
    os.kill(other.process.pid, signal.SIGCONT)
    chief.until("summed\n")


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


@pytest.mark.smoke
def test_an_error_of_tensorflows_is_the_same_whether_other_threads_can_run_or_not():
    context.ensure_initialized()
    handle, binding = context.context()._handle, context.pywrap_tfe
    held = binding.TFE_EnableCollectiveOps
    messages = []
    with meeting._threads_run():
        released = binding.TFE_EnableCollectiveOps
        assert released is not held, "TensorFlow's library was not found"
        for enable in (held, released):
            with pytest.raises(tf.errors.InvalidArgumentError) as raised:
                enable(handle, b"no server")
            messages.append(raised.value.message)
    assert messages[0] == messages[1] and "ServerDef" in messages[0]
    assert binding.TFE_EnableCollectiveOps is held


@pytest.mark.smoke
@pytest.mark.parametrize(("secs", "expected"), [(2.5, 2500), (1e-9, 1), (1e300, 2**31 - 1)])
def test_a_heartbeat_limit_of_any_length_is_one_that_tensorflow_takes(secs, expected, monkeypatch):
    told = {}
    # Of the whole context only what is called: the limit must be set before TensorFlow starts.
    kind = type(context.context())
    monkeypatch.setattr(kind, "configure_coordination_service", lambda _, **facts: told.update(facts))
    there = dataclasses.replace(of_workers(["127.0.0.1:1", "127.0.0.1:2"], 1), heartbeat_timeout_secs=secs)
    meeting.set_heartbeat(there, strategies.cluster_resolver(there))
    assert told["heartbeat_timeout_in_ms"] == expected
    context.coordination_config_pb2.CoordinationServiceConfig(heartbeat_timeout_in_ms=expected)
    assert [(job.name, job.num_tasks) for job in told["coordinated_jobs"]] == [("worker", 2)]
    assert told["service_leader"] == "/job:worker/replica:0/task:0"
    told.clear()
    meeting.set_heartbeat(Cluster(), None)
    assert not told
