"""Google Cloud's notice that a machine is to go: a metadata server of this test's own stands in for theirs."""

from __future__ import annotations

import http.server
import threading
import time
import urllib.request

import pytest

from tf_largebatch.distribution import maintenance_notice
from tf_largebatch.distribution.maintenance_notice import MaintenanceNotice

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(60)
PREFIX = "/computeMetadata/v1/instance/"
PERIOD_SECS = 0.05


class MetadataServer:
    """Answers as `answers` says, name -> list of what is answered in turn, the last for ever.

    An answer is a text, a status code, seconds to wait before "NONE", or bytes that are sent as they are.
    """

    def __init__(self):
        self.answers = {"preempted": ["FALSE"], "maintenance-event": ["NONE"]}
        self.asked: list[tuple[str, str | None]] = []
        told = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                told.asked.append((self.path, self.headers["Metadata-Flavor"]))
                turns = told.answers.get(self.path.removeprefix(PREFIX), [404])
                answer = turns.pop(0) if len(turns) > 1 else turns[0]
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                    return
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = "NONE"
                text = answer.encode() if isinstance(answer, str) else b"no"
                self.send_response(200 if isinstance(answer, str) else answer)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda *arguments: None
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def server(monkeypatch):
    made = MetadataServer()
    monkeypatch.setenv("GCE_METADATA_HOST", made.address)
    yield made
    made.close()


@pytest.fixture
def notice():
    """A notice that counts how often it came; ends with the test."""

    class Counted(MaintenanceNotice):
        def __init__(self):
            self.count, self.came = 0, threading.Event()
            super().__init__(self._note, PERIOD_SECS)

        def _note(self):
            self.count += 1
            self.came.set()

    made = Counted()
    yield made
    made.stop()
    for thread in asking():
        thread.join(10)
        assert not thread.is_alive()


def asking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "maintenance notice"]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("preempted", ["FALSE", "FALSE", "TRUE"]),
        ("preempted", ["FALSE", "TRUE\n"]),
        ("maintenance-event", ["NONE", "NONE", "TERMINATE_ON_HOST_MAINTENANCE"]),
        # A machine lives on through a migration.
        ("maintenance-event", ["MIGRATE_ON_HOST_MAINTENANCE", "NONE", "TERMINATE_ON_HOST_MAINTENANCE"]),
    ],
)
def test_a_notice_is_told_once_and_then_no_more_is_asked(name, answers, server, notice):
    server.answers[name] = list(answers)
    notice.start()
    assert notice.came.wait(10)
    assert len([path for path, _ in server.asked if path == PREFIX + name]) == len(answers)
    asked = len(server.asked)
    time.sleep(5 * PERIOD_SECS)
    assert notice.count == 1 and len(server.asked) == asked
    # Without this header a real server refuses.
    assert {flavor for _, flavor in server.asked} == {"Google"}


@pytest.mark.parametrize("answer", ["MIGRATE_ON_HOST_MAINTENANCE", "NONE", "", "terminate?", "<html>TERMINATE</html>"])
def test_nothing_else_is_a_notice(answer, server, notice):
    server.answers["maintenance-event"] = [answer]
    server.answers["preempted"] = ["FALSE"] if answer else ["true story"]
    notice.start()
    time.sleep(10 * PERIOD_SECS)
    assert notice.count == 0 and len(server.asked) > 4


@pytest.mark.parametrize(
    "fault",
    [
        500,
        503,
        404,
        403,
        b"",
        b"rubbish\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nTRU",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: gopher://x\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["500", "503", "404", "403", "hangs up", "no HTTP", "too short", "bad chunk", "no text", "dead end", "no way"],
)
def test_a_server_that_fails_now_and_then_is_asked_again(fault, server, notice):
    server.answers["preempted"] = [fault, fault, "TRUE"]
    notice.start()
    assert notice.came.wait(10)


def test_a_server_that_is_slow_now_and_then_is_asked_again(server, notice, monkeypatch):
    monkeypatch.setattr(maintenance_notice, "_TIMEOUT_SECS", 0.2)
    server.answers["preempted"] = [1.0, 1.0, "TRUE"]
    began = time.monotonic()
    notice.start()
    assert notice.came.wait(10)
    assert time.monotonic() - began < 1.9


def test_a_server_that_is_away_for_a_while_is_asked_again(server, notice, monkeypatch):
    addresses = iter(["127.0.0.1:1", "no.such.host.invalid", "not a host", ":", server.address])
    ask = maintenance_notice._read
    last = [server.address]

    def elsewhere(_, name):
        last[0] = next(addresses, last[0])
        return ask(last[0], name)

    monkeypatch.setattr(maintenance_notice, "_read", elsewhere)
    server.answers["preempted"] = ["TRUE"]
    notice.start()
    assert notice.came.wait(30)


def test_a_proxy_for_the_web_is_not_asked(server, notice, monkeypatch):
    """The metadata server is on this machine's own link; a proxy has another one, or none."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of the first request
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.answers["preempted"] = ["TRUE"]
    notice.start()
    assert notice.came.wait(10)


def test_after_stop_nothing_is_asked_or_told(server, notice):
    notice.start()
    deadline = time.monotonic() + 10
    while len(server.asked) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    notice.stop()
    for thread in asking():
        thread.join(10)
    asked = len(server.asked)
    server.answers["preempted"] = ["TRUE"]
    time.sleep(5 * PERIOD_SECS)
    assert notice.count == 0 and len(server.asked) == asked and not asking()


def test_an_answer_that_comes_after_stop_is_not_told(server, notice):
    answering, go = threading.Event(), threading.Event()

    class Late(list):
        def __getitem__(self, index):
            answering.set()
            go.wait(10)
            return "TRUE"

    server.answers["preempted"] = Late(["?"])
    notice.start()
    assert answering.wait(10)
    (thread,) = asking()
    notice.stop()
    go.set()
    thread.join(10)
    assert not thread.is_alive() and notice.count == 0


def test_stop_without_a_start_is_no_error(notice):
    notice.stop()
    notice.stop()


@pytest.mark.parametrize("hardware", ["Standard PC (i440FX + PIIX, 1996)\n", "", None])
def test_elsewhere_nothing_is_asked(hardware, notice, monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(maintenance_notice, "_HARDWARE", tmp_path / "product_name")
    if hardware is not None:
        (tmp_path / "product_name").write_text(hardware)
    assert maintenance_notice.metadata_server() is None
    notice.start()
    assert not asking()


def test_a_machine_of_google_cloud_is_known_by_its_hardware(monkeypatch, tmp_path):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(maintenance_notice, "_HARDWARE", tmp_path / "product_name")
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert maintenance_notice.metadata_server() == "metadata.google.internal"
    monkeypatch.setenv("GCE_METADATA_HOST", "169.254.169.254")
    assert maintenance_notice.metadata_server() == "169.254.169.254"
