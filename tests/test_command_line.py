"""How a launcher starts and ends: small launchers in processes of their own."""

from __future__ import annotations

import textwrap

import pytest
from conftest import python
from one_sentence import assert_one_sentence

LAUNCHER = '''
"""Counts to --count, 100% of the way.

    counter --count=3
"""
import sys
from absl import flags
from tf_largebatch import command_line
from tf_largebatch.validation import InputError

FLAGS = flags.FLAGS
flags.DEFINE_integer("count", 1, "How far to count.", lower_bound=1)
flags.DEFINE_bool("aloud", False, "Whether to say so.")
flags.DEFINE_string("end", "return", "How to end.")


def main(argv):
    if FLAGS.end == "refuse":
        raise InputError("--end is 'refuse', but must be another.")
    if FLAGS.end == "fail":
        raise RuntimeError("the machine stopped")
    if FLAGS.end == "code":
        return FLAGS.count
    print(argv[1:], FLAGS.count, FLAGS.aloud)


def run():
    command_line.run(main, FLAGS, sys.modules[__name__])


if __name__ == "__main__":
    run()
'''
# What pip writes for a console command; the launcher is then a module, not the file that was started.
STUB = """
    import sys
    from counter import run
    if __name__ == "__main__":
        sys.exit(run())
"""


both_ways = pytest.mark.parametrize("started", ["counter.py", "tflb-counter"])


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "counter.py").write_text(LAUNCHER)
    (tmp_path / "tflb-counter").write_text(textwrap.dedent(STUB))
    return lambda *arguments, started="counter.py": python(tmp_path / started, *arguments, timeout=60)


def assert_refused(done, said: str) -> None:
    """Code 2 and one sentence, headed by the program's name, and nothing else."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("counter: ") and said in done.stderr
    assert done.stderr.count("\n") == 1
    assert_one_sentence(done.stderr.removesuffix("\n"))


@both_ways
def test_flags_and_arguments_arrive(started, launch):
    done = launch("--count=3", "rest", "--aloud", started=started)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['rest'] 3 True\n", "")


@pytest.mark.parametrize("code", [2, 7])
def test_a_number_that_main_returns_is_the_exit_code(code, launch):
    assert launch("--end=code", f"--count={code}").returncode == code


@both_ways
def test_wrong_input_is_one_sentence_and_code_2(started, launch):
    assert_refused(launch("--end=refuse", started=started), "--end is 'refuse', but must be another.")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--cuont=3", "Unknown command line flag 'cuont' (did you mean 'count'?)"),
        ("--zzzzzz", "Unknown command line flag 'zzzzzz'; --help lists the flags"),
        ("--count=x", "--count=x"),
        ("--count=0", "--count=0"),
        ("--count", "--count"),
        ("--noaloud=3", "--noaloud=3 does not take an argument"),
        ("--flagfile=/no/such/file", "/no/such/file"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_code_2(flag, said, launch):
    assert_refused(launch(flag), said)


def test_a_failure_shows_where_it_came_from_and_is_code_1(launch):
    done = launch("--end=fail")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert 'raise RuntimeError("the machine stopped")' in done.stderr


@both_ways
def test_help_tells_what_the_launcher_does_and_its_flags(started, launch):
    done = launch("--help", started=started)
    # Asked for and given: absl's own 1 would say that a run failed.
    assert (done.returncode, done.stderr) == (0, "")
    assert "Counts to --count, 100% of the way." in done.stdout
    for flag, meaning in (("--count:", "How far to count."), ("--[no]aloud:", "say so"), ("--end:", "How to end.")):
        assert flag in done.stdout and meaning in done.stdout
