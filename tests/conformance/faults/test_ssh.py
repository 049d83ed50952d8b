"""Jobs on three hosts through real ssh servers: how they end, and that nothing is left on any host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import launcher as launcher_file
from network import Network, require, ssh_servers, three_hosts
from one_sentence import refusal
from stub_workers import IGNORES_ALL, REPOSITORY, all_ready, is_running, pids, wait_until, writes_pid

import tf_largebatch
from tf_largebatch.supervisor.job import Worker
from tf_largebatch.supervisor.ssh_hosts import SshOptions, parse_hosts
from tf_largebatch.supervisor.ssh_job import ssh_start
from tf_largebatch.supervisor.ssh_probe import probe

pytestmark = pytest.mark.timeout(240)
# A launcher as a process of its own. Its standard input is what it needs, as JSON.
_LAUNCHER = """
import json, pathlib, sys
from tf_largebatch.supervisor import ssh_hosts, ssh_job, ssh_probe, supervise, watch
given = json.load(sys.stdin)
hosts = ssh_hosts.parse_hosts(given["hosts"])
options = ssh_hosts.SshOptions(given["config"], connect_timeout=5, alive_interval=2)
folder, python = given["folder"], sys.executable
def plan(attempt):
    found = ssh_probe.probe(hosts, options, python, folder, environment=given["environment"])
    job = ssh_job.ssh_job(given["argv"], hosts, found, given["environment"], folder)
    return job
start = ssh_job.ssh_start(options, python, silence_secs=given["silence"])
limits = watch.Limits(**given["limits"])
sys.exit(supervise.run(plan, start, pathlib.Path(folder), supervise.Options(limits, given["restarts"])))
"""


@pytest.fixture(scope="module")
def network():
    require("ip", "unshare", "ssh", "sshd", "ssh-keygen")
    with three_hosts() as network:
        yield network


@pytest.fixture(scope="module")
def ssh_config(network, tmp_path_factory):
    with ssh_servers(network, tmp_path_factory.mktemp("ssh")) as config:
        yield config


@pytest.fixture
def job(network, ssh_config, tmp_path):
    """Starts a job of three workers that all run one stub; afterwards nothing may be left on any host."""
    started: list[subprocess.Popen] = []

    def start(*argv: str, environment: dict[str, str] | None = None, restarts: int = 0, **limits) -> subprocess.Popen:
        given = {
            "config": str(ssh_config),
            "hosts": ",".join(network.hosts),
            "folder": str(tmp_path),
            "argv": argv,
            "environment": {"CUDA_VISIBLE_DEVICES": "", **(environment or {})},
            "silence": 6,
            "restarts": restarts,
            "limits": limits,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        process.stdin = None
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        process.stdout.close()
    for host in network.hosts:
        network.mend(host)
    try:
        wait_until(
            lambda: all(len(network.pids(host)) == 1 for host in network.hosts), "only ssh servers to be left", 20
        )
    finally:
        for pid in pids(tmp_path):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_all_end_well(job, network, tmp_path):
    shows = "print(json.dumps([host, os.getcwd(), os.environ['SECRET'], os.environ['TF_CONFIG']]), flush=True)"
    code, shown = ended(job(*stub(tmp_path, shows), environment={"SECRET": "two words"}))
    assert code == 0, shown
    told = dict(re.findall(r"^\[worker (\d)\] (\[.*\])$", shown, flags=re.MULTILINE))
    assert len(told) == 3
    for rank, host in enumerate(network.hosts):
        *seen, tf_config = json.loads(told[str(rank)])
        assert seen == [host, str(tmp_path), "two words"]
        assert json.loads(tf_config)["task"]["index"] == rank
        assert json.loads(tf_config)["cluster"]["worker"][rank].startswith(network.address(host) + ":")
    assert none_runs(tmp_path)


def test_a_worker_that_is_killed_is_named_and_all_end(job, network, tmp_path):
    process = job(*stub(tmp_path, IGNORES_ALL), failure_grace=1.0)
    all_ready(tmp_path, 3)
    os.kill(of_host(network, "host2", tmp_path), signal.SIGKILL)
    code, shown = ended(process)
    assert code == 137, shown
    assert "worker 1 failed first: killed by SIGKILL" in shown
    assert none_runs(tmp_path)


def test_the_exit_code_of_a_worker_on_another_host(job, tmp_path):
    program = on_host2("print('no such file', flush=True); sys.exit(7)", "time.sleep(90)")
    code, shown = ended(job(*stub(tmp_path, program)))
    assert code == 7
    assert "worker 1 failed first: exit code 7" in shown and "    no such file\n" in shown
    assert "worker 0: killed by SIGTERM" in shown
    assert none_runs(tmp_path)


def test_no_worker_outlives_a_launcher_that_is_killed(job, tmp_path):
    process = job(*stub(tmp_path, IGNORES_ALL))
    all_ready(tmp_path, 3)
    process.kill()
    wait_until(lambda: none_runs(tmp_path), "the workers to end", 5)


def test_ctrl_c_asks_all_workers_and_a_second_one_kills_them(job, tmp_path):
    says_so = "try:\n    print('ready', flush=True); time.sleep(90)\nexcept KeyboardInterrupt:\n    print('asked')"
    process = job(*stub(tmp_path, f"exec({says_so!r} if host != 'host2' else {IGNORES_ALL!r})"), grace=1000.0)
    all_ready(tmp_path, 3)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGINT)
    code, shown = ended(process)
    assert code == 130, shown
    assert "[worker 0] asked" in shown and "[worker 2] asked" in shown and "[worker 1] asked" not in shown
    assert none_runs(tmp_path)


def test_a_host_that_is_cut_off_is_named_and_its_worker_ends_too(job, network, tmp_path):
    process = job(*stub(tmp_path, IGNORES_ALL), failure_grace=1.0)
    all_ready(tmp_path, 3)
    network.cut("host2")
    code, shown = ended(process)
    assert code == 255, shown
    assert "worker 1 failed first: exit code 255" in shown
    assert re.search(r"^    Timeout, server \S+ not responding\.$", shown, flags=re.MULTILINE)
    wait_until(lambda: none_runs(tmp_path), "the worker on the host that is cut off to end", 15)


def test_a_link_that_comes_back_costs_nothing(job, network, tmp_path):
    process = job(*stub(tmp_path, "print('ready', flush=True); time.sleep(9); print('done')"))
    all_ready(tmp_path, 3)
    network.cut("host2")
    time.sleep(3)
    network.mend("host2")
    code, shown = ended(process)
    assert code == 0, shown
    assert shown.count("] done") == 3


def test_after_a_failed_connection_a_restart_brings_all_workers_back(job, network, tmp_path):
    program = "print('ready', flush=True); time.sleep(90 if os.environ['TFLB_ATTEMPT'] == '0' else 0)"
    process = job(*stub(tmp_path, program), failure_grace=1.0, restarts=1)
    all_ready(tmp_path, 3)
    (transport,) = [pid for pid in _children(process.pid) if b"host2" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(transport, signal.SIGKILL)
    code, shown = ended(process)
    assert code == 0, shown
    assert "worker 1 failed first: exit code 255" in shown and "restart 1 of 1" in shown
    assert none_runs(tmp_path, 6)


def test_a_host_that_cannot_be_reached_is_told_before_anything_starts(network, ssh_config, tmp_path):
    config = ssh_config.read_text()
    other_key, changed = tmp_path / "key", tmp_path / "ssh_config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other_key)], check=True, timeout=30)
    said = asked(ssh_config, tmp_path, hosts="host1,nohost")
    assert "ssh cannot get to nohost: ssh: Could not resolve hostname nohost: " in said
    said = asked(ssh_config, tmp_path, port=2201)
    assert re.search(r"ssh cannot get to host1: ssh: connect to host \S+ port 2201: Connection refused", said)
    assert said.endswith("(host2, host3 failed too).")
    changed.write_text(re.sub("IdentityFile .*", f"IdentityFile {other_key}", config))
    assert re.search(r"ssh cannot get to host1: \S+: Permission denied \(publickey\)", asked(changed, tmp_path))
    changed.write_text(re.sub("UserKnownHostsFile .*", "UserKnownHostsFile /dev/null", config))
    assert "ssh cannot get to host1: Host key verification failed" in asked(changed, tmp_path)
    network.cut("host2")
    try:
        said = asked(ssh_config, tmp_path)
    finally:
        network.mend("host2")
    assert re.search(r"ssh cannot get to host2: ssh: .*(timed out|No route to host)", said) and "too" not in said


def test_what_a_host_lacks_is_told_before_anything_starts(network, ssh_config, tmp_path):
    assert "host1 has no folder '/no/such'" in asked(ssh_config, tmp_path, folder="/no/such")
    assert "host1 cannot run the Python '/no/python': " in asked(ssh_config, tmp_path, python="/no/python")
    holds = "import socket, time; held = socket.create_server(('0.0.0.0', 4444)); print(flush=True); time.sleep(60)"
    command = ["ip", "netns", "exec", network.namespace("host2"), sys.executable, "-c", holds]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            said = asked(ssh_config, tmp_path, first_port=4444)
        finally:
            holder.kill()
    assert "--port is 4444, but port 4444 of host2 cannot be used (Address already in use)" in said


def test_a_live_terminal_comes_through_ssh(network, ssh_config, tmp_path):
    reading_end, writing_end = os.openpty()
    termios.tcsetwinsize(writing_end, (24, 91))
    program = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns)"
    worker = Worker(0, (sys.executable, "-c", program), host="host2", folder=str(tmp_path))
    process = ssh_start(SshOptions(str(ssh_config)), sys.executable)(worker, writing_end)
    wait_until(lambda: process.poll() is not None, "the worker to end")
    # Ended, it has left all of its output in the terminal.
    shown = os.read(reading_end, 65536)
    os.close(reading_end)
    os.close(writing_end)
    assert (process.poll(), shown.split()) == (0, [b"True", b"91"])


def test_training_on_three_hosts(job, network, tmp_path):
    train = [sys.executable, "-P", launcher_file("train"), "--config=fashion_mnist_lars_b1k", "--workdir=run"]
    recipe = {
        "dataset": "synthetic",
        "dataset_options": "{num_train: 192, num_test: 48}",
        "global_batch_size": 48,
        "epochs": 1,
        "schedule.warmup_epochs": 0.5,
        "network_options.width": 4,
        "network_options.batch_norm_group_size": 16,
    }
    process = job(
        *train,
        *(f"--set={key}={value}" for key, value in recipe.items()),
        environment={"PYTHONPATH": str(Path(tf_largebatch.__file__).resolve().parents[1])},
    )
    code, shown = ended(process, 200)
    assert code == 0, shown
    assert "over 3 replicas" in shown
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 4


def stub(folder: Path, program: str) -> list[str]:
    """A worker that leaves its process id, then does what the program says; `host` is where it is."""
    named = f"import json, os, socket, sys, time\nhost = socket.gethostname()\n{program}"
    return [sys.executable, "-c", writes_pid(folder, named)]


def on_host2(does: str, others: str) -> str:
    return f"exec({does!r} if host == 'host2' else {others!r})"


def ended(process: subprocess.Popen, timeout_secs: float = 60) -> tuple[int, str]:
    """(exit code, what it has shown)."""
    shown = process.communicate(timeout=timeout_secs)[0]
    return process.returncode, shown


def none_runs(folder: Path, count: int = 3) -> bool:
    assert len(pids(folder)) == count
    return not any(is_running(pid) for pid in pids(folder))


def of_host(network: Network, host: str, folder: Path) -> int:
    """The process id of the worker on a host."""
    (pid,) = set(network.pids(host)) & set(pids(folder))
    return pid


def asked(config: Path, here: Path, **wanted) -> str:
    """How the probe of the three hosts refuses."""
    given = {"hosts": "host1,host2,host3", "port": None, "python": sys.executable, "folder": str(here), **wanted}
    options = SshOptions(str(config), given.pop("port"), connect_timeout=3)
    return refusal(probe, parse_hosts(given.pop("hosts")), options, **given)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
