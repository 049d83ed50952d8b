"""What workers print: prefixes, logs, redrawn lines, and a real pseudo-terminal."""

from __future__ import annotations

import io
import json
import textwrap

import pytest
from stub_workers import ENDS_WELL, logs, read_terminal, run, run_live, run_onto

from tf_largebatch.supervisor import worker_output

# No test waits this long unless it fails.
pytestmark = pytest.mark.timeout(60)


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
        assert (logs(tmp_path) / f"worker_{rank:05}.log").read_text("utf-8").splitlines() == lines
        prefix = f"[worker {rank}] "
        assert [line for line in shown.splitlines() if line.startswith(prefix)] == [prefix + line for line in lines]


def test_every_job_has_a_folder_of_its_own(tmp_path):
    for _ in range(2):
        assert run(tmp_path, ENDS_WELL)[0] == 0
    records = [json.loads(file.read_text()) for file in tmp_path.glob("*/job.json")]
    assert len({record["job"] for record in records}) == 2
    for record in records:
        (attempt,) = record["attempts"]
        assert attempt["exit_code"] == 0 and attempt["end"] >= attempt["start"]
        assert (tmp_path / record["job"] / attempt["folder"] / attempt["workers"][0]["log"]).read_text() == "done\n"


def test_a_reader_that_goes_away_does_not_stop_the_job(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    assert run_onto(Gone(), tmp_path, "for i in range(20000): print('line', i)") == 0
    assert len((logs(tmp_path) / "worker_00000.log").read_text().splitlines()) == 20000


def test_a_terminal_of_another_encoding_gets_question_marks(tmp_path):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert run_onto(ascii_only, tmp_path, "print('━ bar')") == 0
    assert ascii_only.buffer.getvalue() == b"[worker 0] ? bar\n"


def test_workers_have_no_input_and_a_session_of_their_own(tmp_path):
    program = "import os; print(os.getsid(0) == os.getpid(), os.isatty(1), os.readlink('/proc/self/fd/0'))"
    assert run(tmp_path, program)[1] == "[worker 0] True False /dev/null\n"


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
    # 61 columns: a drawing must not reach the last one, or the next would start a line below.
    with run_live(tmp_path, draws, other, columns=61) as (process, master):
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
    logged = (logs(tmp_path) / "worker_00000.log").read_text().splitlines()
    assert logged == ["terminal True 50", "\x1b[1m3/3\x1b[0m loss " + "x" * 200]
