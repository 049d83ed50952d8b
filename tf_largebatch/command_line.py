"""How every launcher starts and ends: absl's `app.run` with this project's exit codes.

0 done; 1 the run failed; 2 the user's input is wrong, said in one sentence; 3 the training diverged; 75 told to stop,
and saved; 130 stopped by ctrl-C. Of several workers also 124, one had not started in time, and 128 + n, killed by
signal n.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from absl import app, logging

from tf_largebatch import config
from tf_largebatch.validation import InputError, nearest

DIVERGED = 3


def run(main: Callable[[list[str]], int | None], flag_values: Any, module: Any) -> None:
    """Parses the command line and calls `main(arguments)`; does not return.

    Args:
      main: gets the program name and the arguments that are no flags; may return an exit code.
      flag_values: absl's FLAGS.
      module: the launcher's module, whose flags `--help` lists.
    """
    program = Path(module.__file__).stem

    def refuse(failure: Exception | str) -> None:
        print(f"{program}: {failure}", file=sys.stderr)
        sys.exit(getattr(failure, "exit_code", InputError.exit_code))

    def parse(argv: list[str]) -> list[str]:
        # For --help absl takes the text and the flags of the file that was started, and of a console
        # command that is a stub of pip's.
        sys.modules["__main__"].__doc__ = module.__doc__
        for flag in flag_values.get_flags_for_module(module):
            flag_values.register_key_flag_for_module(argv[0], flag)
        try:
            arguments = flag_values(argv)
        except SystemExit:
            # --help is no failed run, though absl ends it with 1.
            sys.exit(0)
        except Exception as failure:
            # absl's flags.Error, which this package does not import; a ValueError for --noflag=value.
            if "absl.flags" not in type(failure).__module__ and not isinstance(failure, ValueError):
                raise
            refuse(_sentence(failure, flag_values))
            raise
        if flag_values["verbosity"].using_default_value:
            # absl raises a verbosity that nobody chose to INFO, which TensorFlow fills.
            flag_values.verbosity = -1
        return arguments

    def guarded(argv: list[str]) -> int | None:
        try:
            return main(argv)
        except InputError as failure:
            # Why, for whoever asks with --verbosity=1.
            logging.debug("%s", failure, exc_info=failure)
            refuse(failure)
            raise
        except BrokenPipeError:
            # Whoever read the output has gone. Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except KeyboardInterrupt:
            print(f"{program}: stopped.", file=sys.stderr)
            return 130

    app.run(guarded, flags_parser=parse)


def recipe(arguments: list[str], flag_values: Any) -> config.Recipe:
    """The recipe that --config and --set give; a network or data set of the user's may lie in the current folder.

    Raises:
      InputError: there is no --config, there are arguments that are no flags, or the recipe is wrong.
    """
    if arguments[1:]:
        raise InputError(f"unexpected argument {arguments[1]!r}; recipes are given with --config.")
    if flag_values.config is None:
        raise InputError("--config is missing: a YAML file, or the name of a shipped config.")
    sys.path.append(os.getcwd())
    return config.load(flag_values.config, flag_values.set)


def _sentence(failure: Exception, names: Iterable[str]) -> str:
    unknown = getattr(failure, "flagname", None)
    if unknown is None:
        return f"{failure}."
    return f"Unknown command line flag {unknown!r}{nearest(unknown, names)}; --help lists the flags."
