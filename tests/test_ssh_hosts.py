"""Hosts for ssh: how they are named, what is asked of them and said of their failures. The ssh here is a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys

import pytest
from one_sentence import refusal

from tf_largebatch.supervisor import gpus, remote_probe
from tf_largebatch.supervisor.ssh_hosts import Host, SshOptions, address, parse_hostfile, parse_hosts, ssh_command
from tf_largebatch.supervisor.ssh_job import forwarded, ssh_job
from tf_largebatch.supervisor.ssh_probe import Found, probe

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """Puts a shell script in the place of ssh: `$host` is the host; `as_there` runs the remote command here."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(script: str) -> None:
        (folder / "ssh").write_text(f"""#!/bin/bash
for last; do before=$host; host=$last; done
if [[ " $* " == *" -G "* ]]; then echo "hostname ${{host#*@}}.example"; exit 0; fi
command=$host host=$before
as_there() {{ sh -c "$command"; }}
{script}
""")
        (folder / "ssh").chmod(0o755)

    return put


def ask(*hosts: str, **options) -> dict[str, Found]:
    given = {"python": sys.executable, "folder": "/tmp", "timeout": 20, **options}
    return probe([parse_hosts(host)[0] for host in hosts], SshOptions(connect_timeout=1), **given)


def test_hosts_with_their_workers():
    assert parse_hosts("a, me@b.example-1.com:2,10.0.0.1") == (
        Host("a"),
        Host("me@b.example-1.com", 2),
        Host("10.0.0.1"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--hosts holds '', but every entry must be HOST, USER@HOST or HOST:WORKERS"),
        ("a,", "--hosts holds ''"),
        ("a b", "holds 'a b'"),
        ("-oProxyCommand=x", "holds '-oProxyCommand=x'"),
        ("me@-x", "holds 'me@-x'"),
        ("a:x", "holds 'a:x'"),
        ("a:0", "a host has 1 worker or more"),
        ("a,b,a", "names a twice; write a:2 for two workers there"),
        ("a,me@a", "names a twice"),
        ("$(x)", "holds '$(x)'"),
        ("::1", "holds '::1'"),
    ],
)
def test_what_is_no_list_of_hosts(text, words):
    assert words in refusal(parse_hosts, text)


def test_hosts_in_a_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# all of rack 1\nhost1 slots=4\n\n  host2:2   # slow\nme@host3\nhost4  slots = 1\n")
    assert parse_hostfile(file) == (Host("host1", 4), Host("host2", 2), Host("me@host3"), Host("host4"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "which cannot be read: No such file or directory; name a file of hosts"),
        (b"\xff\xfe", "it is no text"),
        (b"# none\n\n", "which names no host"),
        (b"host1 slots=two\n", "holds 'host1 slots=two', but every entry must be"),
        (b"host1\nhost1 slots=2\n", "names host1 twice"),
    ],
)
def test_what_is_no_file_of_hosts(text, words, tmp_path):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_bytes(text)
    sentence = refusal(parse_hostfile, file)
    assert words in sentence and sentence.startswith(f"--hostfile {'is ' if ' which ' in sentence else ''}'{file}'")


def test_the_users_options_of_ssh_come_before_ours():
    options = SshOptions("my config", 2200, "key", ("ServerAliveInterval=3", "User=me"), connect_timeout=4)
    command = ssh_command("a", options)
    assert command[:9] == ["ssh", "-T", "-x", "-F", "my config", "-p", "2200", "-i", "key"]
    settings = command[10:-1:2]
    assert settings[0] == "BatchMode=yes" and "ConnectTimeout=4" in settings and command[-1] == "a"
    assert settings.index("ServerAliveInterval=3") < settings.index("ServerAliveInterval=10")


def test_the_address_of_an_alias(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "Host first\n  HostName 10.1.2.3\nHost *.short\n  HostName %h.example\nHost six\n  HostName fe::1\n"
    )
    options = SshOptions(str(config))
    found = [address(name, options) for name in ("first", "me@first", "x.short", "other", "six")]
    assert found == ["10.1.2.3", "10.1.2.3", "x.short.example", "other", "[fe::1]"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": ("NoSuchOption=1",)}, "Bad configuration option: nosuchoption"),
        ({"config_file": "/no/such/config"}, "/no/such/config: No such file or directory"),
    ],
)
def test_options_that_ssh_does_not_take(options, words):
    sentence = refusal(address, "a", SshOptions(**options))
    assert sentence.startswith("--hosts: ssh does not take its options for a: ") and words in sentence


def test_without_ssh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs ssh, which cannot be started here" in refusal(address, "a", SshOptions())


def test_what_hosts_have(fake_ssh, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi = tmp_path / "programs" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'; [ $HOST = a ] || echo 'GPU 1: A (UUID: GPU-2)'\n")
    smi.chmod(0o755)
    fake_ssh("echo 'a greeting'; echo 'another' >&2; export HOST=$host; as_there; echo bye")
    found = ask("a", "me@b:3")
    assert found["a"].gpus == ("0",) and found["me@b"].gpus == ("0", "1")
    assert (found["a"].address, found["me@b"].address) == ("a.example", "b.example")
    assert len(found["a"].ports) == 1 and len(set(found["me@b"].ports)) == 3
    assert ask("b", environment={"CUDA_VISIBLE_DEVICES": "5"})["b"].gpus == ("5",)


def test_all_hosts_are_asked_at_the_same_time(fake_ssh):
    # Each waits until it sees that all have been asked.
    fake_ssh("""
here=$(dirname "$0"); touch $here/$host.asked
for try in $(seq 400); do [ $(ls $here/*.asked | wc -l) = 4 ] && break; sleep 0.05; done
[ $(ls $here/*.asked | wc -l) = 4 ] && as_there""")
    assert list(ask("a", "b", "c", "d")) == ["a", "b", "c", "d"]


def test_wanted_ports(fake_ssh):
    fake_ssh("as_there")
    with contextlib.ExitStack() as stack:
        first, second = None, None
        while second is None:
            first = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
            with contextlib.suppress(OSError, OverflowError):
                second = stack.enter_context(socket.create_server(("0.0.0.0", first.getsockname()[1] + 1)))
        port = first.getsockname()[1]
        first.close()
        sentence = refusal(ask, "a:2", first_port=port)
        busy = f"--port is {port}, but port {port + 1} of a cannot be used (Address already in use); use another"
        assert busy in sentence
        second.close()
        assert ask("a:2", first_port=port)["a"].ports == (port, port + 1)
    assert "a needs 2 ports from there on; use 65534 or less" in refusal(ask, "a:2", first_port=65535)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "printf 'hm\\r\\nssh: Could not resolve hostname b: Name or service not known\\r\\n' >&2; exit 255",
            "ssh cannot get to b: ssh: Could not resolve hostname b: Name or service not known; see that `ssh b true`",
        ),
        (
            "echo 'me@b: Permission denied (publickey).' >&2; exit 255",
            "ssh cannot get to b: me@b: Permission denied (publickey); see",
        ),
        (
            "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255",
            "ssh cannot get to b: ssh: connect to host b port 22: Connection refused; see",
        ),
        ("exit 255", "ssh cannot get to b: it does not say why; see"),
        ("exec sleep 30", "b gave no answer through ssh within 2 s"),
        (
            "echo 'sh: 1: /env/python: not found' >&2; exit 127",
            f"b cannot run the Python '{sys.executable}': sh: 1: /env/python: not found; install it there",
        ),
        ("echo 'No. Only git here.' >&2; exit 1", "b cannot run the Python"),
        ("exit 0", "b cannot run the Python"),
    ],
)
def test_what_is_said_of_a_host_that_fails(script, words, fake_ssh):
    fake_ssh(f"if [ $host = b ]; then\n{script}\nfi\nas_there")
    sentence = refusal(ask, "a", "b", timeout=1)
    assert words in sentence and sentence.startswith("--hosts: ") and "failed too" not in sentence


def test_several_hosts_that_fail_are_all_named(fake_ssh):
    fake_ssh("[ $host = b ] && as_there || exit 255")
    assert refusal(ask, "a", "b", "c", "d").endswith("(c, d failed too).")


def test_a_folder_that_is_not_there(fake_ssh):
    fake_ssh("as_there")
    assert "a has no folder '/no/such', where its workers are to start; make it there" in refusal(
        ask, "a", folder="/no/such"
    )


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "0", "2, 3", "0,-1,1", "GPU-8932f937,MIG-1", None])
@pytest.mark.parametrize("listing", ["echo 'GPU 0: A100'; echo '  MIG 1g.5gb Device 0:'; echo 'GPU 1: A100'", "exit 9"])
def test_gpus_are_found_there_as_they_are_here(value, listing, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{listing}\n")
    smi.chmod(0o755)
    environment = {"PATH": str(tmp_path), **({} if value is None else {"CUDA_VISIBLE_DEVICES": value})}
    found, warning = remote_probe.visible_gpus(environment)
    assert tuple(found) == gpus.visible_gpus(environment)
    assert bool(warning) == (value is None and listing == "exit 9")


def test_a_job_of_the_workers_of_all_hosts():
    found = {"a": Found("10.0.0.1", ("0", "1"), (70, 71)), "me@b": Found("10.0.0.2", ("4",), (80,))}
    job = ssh_job(["train", "x"], parse_hosts("a:2,me@b"), found, {"A": "1", "CUDA_VISIBLE_DEVICES": "7"}, "/here")
    assert job.addresses == ("10.0.0.1:70", "10.0.0.1:71", "10.0.0.2:80")
    assert [(worker.rank, worker.host) for worker in job.workers] == [(0, "a"), (1, "a"), (2, "me@b")]
    variables = [dict(worker.environment) for worker in job.workers]
    configs = [json.loads(given.pop("TF_CONFIG")) for given in variables]
    assert configs[2] == {"cluster": {"worker": list(job.addresses)}, "task": {"type": "worker", "index": 2}}
    assert [given.pop("CUDA_VISIBLE_DEVICES") for given in variables] == ["0", "1", "7"]
    assert variables == [{"A": "1"}] * 3
    assert {worker.argv for worker in job.workers} == {("train", "x")}
    assert {worker.folder for worker in job.workers} == {"/here"}


def test_a_single_worker_has_no_cluster_and_its_gpus_stay():
    job = ssh_job(["train"], parse_hosts("a"), {"a": Found("127.0.0.1", ("0", "1"), (70,))})
    assert job.workers[0].environment == (("TF_CONFIG", None),)


@pytest.mark.parametrize(
    ("hosts", "counts", "words"),
    [
        ("a,b", (4, 2), "a has 4 GPUs for 1 worker, b has 2 GPUs for 1 worker"),
        ("a:2,b:2", (4, 2), "a has 4 GPUs for 2 workers, b has 2 GPUs for 2 workers"),
        ("a:2", (3,), "a has 3 GPUs for 2 workers"),
        ("a,b", (1, 0), "a has 1 GPU for 1 worker, b has 0 GPUs for 1 worker"),
    ],
)
def test_workers_with_unequal_gpus(hosts, counts, words):
    hosts = parse_hosts(hosts)
    found = {
        host.name: Found(host.name, tuple(map(str, range(count))), tuple(range(1, 1 + host.workers)))
        for host, count in zip(hosts, counts)
    }
    assert words in refusal(ssh_job, ["train"], hosts, found)


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "[::1]"])
def test_an_address_that_other_hosts_do_not_reach(address):
    found = {"a": Found("10.0.0.1", (), (1,)), "b": Found(address, (), (2,))}
    assert f"b has the address {address}, at which other hosts find themselves" in refusal(
        ssh_job, ["train"], parse_hosts("a,b"), found
    )
    ssh_job(["train"], parse_hosts("b:2"), {"b": Found(address, (), (2, 3))})


def test_which_variables_go_along():
    here = {
        "NCCL_DEBUG": "INFO",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CONFIG": "{}",
        "XLA_FLAGS": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUDA_CACHE_PATH": "/c",
        "LD_LIBRARY_PATH": "/l",
        "PYTHONPATH": "/p",
        "HOME": "/root",
        "MINE": "m",
        "xla_flags": "",
    }
    usual = {name: here[name] for name in here if re.match("NCCL|TF_CPP|XLA|CUDA_CACHE|LD_|PYTHON", name)}
    assert forwarded(here, [], []) == usual
    given = ["XLA_FLAGS=--a=b", "EMPTY=", "CUDA_VISIBLE_DEVICES=1", "LINES=1\n2"]
    added = {"XLA_FLAGS": "--a=b", "EMPTY": "", "CUDA_VISIBLE_DEVICES": "1", "LINES": "1\n2"}
    assert forwarded(here, ["MINE"], given) == {**usual, "MINE": "m", **added}


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        (["NOPE"], [], "--forward_env is 'NOPE', which is not set here; set it, or give --env=NOPE=VALUE"),
        ([], ["NOPE"], "--env is 'NOPE', but must be NAME=VALUE"),
        ([], ["=x"], "--env is '=x'"),
        ([], ["A B=x"], "--env is 'A B=x'"),
        ([], ["TF_CONFIG={}"], "cannot name TF_CONFIG"),
        (["TF_CONFIG"], [], "cannot name TF_CONFIG"),
    ],
)
def test_variables_that_cannot_go_along(names, given, words):
    assert words in refusal(forwarded, {"TF_CONFIG": "{}"}, names, given)
