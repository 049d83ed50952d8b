"""What workers tell their supervisor in between what they print: all of it is heard, none of it is seen."""

from __future__ import annotations

import io
import json
import os
import textwrap
import threading
import time

import pytest
from stub_workers import TELLS, logs, read_terminal, record, run, run_live

from tf_largebatch import worker_events
from tf_largebatch.supervisor import worker_output

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(60)
MARK = "\x1etf_largebatch "


def event(name: str, **facts) -> str:
    return MARK + json.dumps({"event": name, **facts}) + "\n"


class Read:
    """What a reader makes of a worker's output that comes in these pieces."""

    def __init__(self, folder, *pieces: str | bytes, live: bool = False, timeout_secs: float = 20.0):
        class Stream(io.StringIO):
            def isatty(self):
                return live

        reading_end, writing_end = os.pipe()
        stream = Stream()
        self.output = worker_output.WorkerOutput(
            "worker 0", reading_end, folder / "log", worker_output.Terminal(stream), live
        )
        self.took_secs = -time.monotonic()
        self.output.start()

        def write():
            for piece in pieces:
                data = piece.encode() if isinstance(piece, str) else piece
                while data:
                    data = data[os.write(writing_end, data) :]
                time.sleep(0.002 if len(pieces) < 1000 else 0)
            os.close(writing_end)

        threading.Thread(target=write, daemon=True).start()
        self.output.join(timeout_secs)
        self.took_secs += time.monotonic()
        assert not self.output.is_alive(), f"still reading after {timeout_secs} s"
        self.shown = stream.getvalue()
        self.logged = (folder / "log").read_text()


def one_by_one(text: str) -> list[str]:
    return list(text)


def test_without_a_supervisor_nothing_is_told(capsys, monkeypatch):
    for value in (None, ""):
        monkeypatch.delenv(worker_events.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(worker_events.VARIABLE, value)
        worker_events.tell("ready")
        assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(worker_events.VARIABLE, "1")
    worker_events.tell("saved", step=7)
    assert capsys.readouterr() == (event("saved", step=7), "")


@pytest.mark.parametrize("live", [False, True])
def test_an_event_is_heard_wherever_the_output_is_cut(live, tmp_path):
    text = "before\n" + event("waiting") + "1/3" + event("saved", step=12) + "\r2/3" + event("ready") + " end\nlast"
    for cut in range(1, len(text)):
        folder = tmp_path / str(cut)
        folder.mkdir()
        read = Read(folder, text[:cut], text[cut:], live=live)
        assert (read.output.told, read.output.step) == ({"waiting", "saved", "ready"}, 12), cut
        assert read.logged == "before\n2/3 end\nlast\n", cut
        assert "\x1e" not in read.shown and "tf_largebatch" not in read.shown, cut
    folder = tmp_path / "one by one"
    folder.mkdir()
    read = Read(folder, *one_by_one(text), live=live)
    assert read.output.told == {"waiting", "saved", "ready"} and read.logged == "before\n2/3 end\nlast\n"
    assert list(read.output.tail) == ["before", "2/3 end", "last"]


def test_on_a_live_terminal_no_part_of_an_event_is_ever_drawn(tmp_path):
    read = Read(tmp_path, *one_by_one("\r7/9 loss" + event("saved", step=7) + "\r8/9 loss"), live=True)
    drawn = [drawing.strip("\n") for drawing in read.shown.split("\r\x1b[K")]
    assert set(drawn) <= {f"[worker 0] {text}" for text in ("7/9 loss"[:n] for n in range(9))} | {
        f"[worker 0] {text}" for text in ("8/9 loss"[:n] for n in range(9))
    } | {""}
    assert read.shown.endswith("[worker 0] 8/9 loss\n") and read.output.step == 7


@pytest.mark.parametrize(
    "told",
    [
        "",
        "{",
        "null",
        "[]",
        "7",
        "{}",
        '{"event": 1}',
        '{"event": null}',
        '{"event": ["saved"]}',
        '{"event": "saved", "step": "many"}',
        '{"event": "saved"}',
        '{"event": "saved", "step": null}',
        '{"event": "saved", "step": 1.5}',
        '{"event": "saved", "step": ' + "9" * 5000 + "}",
        "[" * 20000,
        "\ud83d".encode("utf-8", "surrogatepass"),
        b"\xff\xfe\x00",
    ],
)
def test_a_broken_event_hurts_nothing_and_is_not_shown(told, tmp_path):
    line = MARK.encode() + (told if isinstance(told, bytes) else told.encode()) + b"\n"
    read = Read(tmp_path, b"before\n" + line + event("saved", step=3).encode() + b"after\n")
    assert read.output.step == 3
    assert (read.logged, read.shown) == ("before\nafter\n", "[worker 0] before\n[worker 0] after\n")


@pytest.mark.parametrize("size", [3, 20, 40])
def test_half_an_event_of_a_worker_that_was_killed_is_not_shown(size, tmp_path):
    read = Read(tmp_path, "1/3" + event("saved", step=1234567)[:size])
    assert (read.logged, read.shown) == ("1/3\n", "[worker 0] 1/3\n")


def test_what_only_begins_like_an_event_is_shown(tmp_path):
    text = "a\x1eb\n\x1etf_large\n\x1e"
    read = Read(tmp_path, *one_by_one(text + "x"))
    assert read.logged == "a\x1eb\n\x1etf_large\n\x1ex\n" and not read.output.told


def test_a_step_told_later_replaces_the_earlier_one_and_others_tell_none(tmp_path):
    read = Read(tmp_path, event("resumed", step=5) + event("stoppable", step=9) + event("saved", step=8))
    assert read.output.step == 8
    (tmp_path / "2").mkdir()
    assert Read(tmp_path / "2", event("stoppable", step=9)).output.step is None


@pytest.mark.parametrize("start", ["", "\x1e", MARK], ids=["plain", "stray mark", "event without end"])
@pytest.mark.parametrize("live", [False, True])
def test_thousands_of_redraws_of_one_line_are_read_fast(live, start, tmp_path):
    """Each is small; a reader that kept them all would get slower with every one."""
    bar = "\b" * 60 + "\r\x1b[1m{}/10000\x1b[0m loss: 0.1234 " + "━" * 40
    read = Read(tmp_path, start, *(bar.format(step) for step in range(10000)), event("ready"), live=live)
    assert read.output.told == {"ready"}
    assert read.took_secs < 6
    assert read.logged.splitlines() == ["\x1b[1m9999/10000\x1b[0m loss: 0.1234 " + "━" * 40]


def test_one_job_of_chatty_workers_is_heard(tmp_path):
    program = TELLS + textwrap.dedent("""
        import sys, threading
        def draw():
            for step in range(5000):
                sys.stdout.write(f"\\r{step}/5000 loss")
        drawing = threading.Thread(target=draw)
        drawing.start()
        for step in range(500):
            tell("saved", step=step)
        drawing.join()
        print("\\nlast")
    """)
    code, shown = run(tmp_path, program, program)
    assert code == 0
    assert shown.count("4999/5000 loss\n") == 2 and "tf_largebatch" not in shown and "\x1e" not in shown
    for rank in (0, 1):
        logged = (logs(tmp_path) / f"worker_{rank:05}.log").read_text()
        assert logged == "4999/5000 loss\nlast\n"


def test_a_worker_whose_output_is_buffered_tells_in_the_order_it_prints(tmp_path):
    program = TELLS + "import sys; sys.stdout.reconfigure(line_buffering=False, write_through=False)\n"
    program += "sys.stdout.write('a'); tell('waiting'); sys.stdout.write('b'); tell('ready'); print('c')"
    assert run(tmp_path, program) == (0, "[worker 0] abc\n")


def test_an_event_in_a_live_progress_bar_is_heard_and_not_drawn(tmp_path):
    """On a pseudo-terminal, which ends lines with a carriage return too; the event comes in two pieces."""
    draws = TELLS + textwrap.dedent(f"""
        import os, sys, time
        def until(name):
            while not os.path.exists({str(tmp_path)!r} + "/" + name): time.sleep(0.02)
        sys.stdout.write("\\r1/2 loss")
        sys.stdout.flush()
        until("go1")
        tell("saved", step=1)
        os.write(1, b"\\x1etf_largebatch {{\\"event\\": ")
        until("go2")
        os.write(1, b"\\"saved\\", \\"step\\": 2}}\\n")
        sys.stdout.write("\\r2/2 loss\\n")
    """)
    with run_live(tmp_path, draws) as (process, terminal):
        seen = read_terminal(terminal, until="[worker 0] 1/2 loss")
        (tmp_path / "go1").touch()
        time.sleep(0.5)  # for the half event to be there
        (tmp_path / "go2").touch()
        seen += read_terminal(terminal, until="2/2 loss\r\n")
        assert process.wait(timeout=30) == 0
    assert "\x1e" not in seen and "event" not in seen and "largebatch" not in seen
    assert seen.count("\n") == 1, seen
    assert (logs(tmp_path) / "worker_00000.log").read_text() == "2/2 loss\n"
    assert record(tmp_path)["attempts"][0]["step"] == 2
