"""Which variables are left out of layer-wise adaptation and of weight decay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tf_largebatch._keras import variable_path
from tf_largebatch.validation import InputError, nearest

# Scales and shifts of normalisation layers, and biases, also where they have more than one axis
# (LayerNormalization over two axes, biases of attention and of recurrent layers).
_BIAS_OR_NORMALISATION = re.compile(r"(^|/)(bias|beta|gamma)$|normalization[^/]*/scale$")


class Exclusions:
    """A rule that excludes variables, given in one of the ways that the optimizers take.

    Args:
      rule: None for the default: rank at most 1, a bias, or a variable of a normalisation layer;
        or a list whose entries are regular expressions, searched for in variable paths such as
        "block_1/conv/kernel", and variables; `[]` excludes nothing; or a function of a variable
        that says whether to exclude it.
      argument: name of the optimizer's argument, for errors.

    Raises:
      InputError: an entry is none of these, or a pattern is no regular expression.
    """

    def __init__(self, rule: Sequence[Any] | Callable[[Any], bool] | None, argument: str):
        self._argument = argument
        self._function = rule if callable(rule) else None
        self._patterns: tuple[str, ...] | None = None
        if rule is not None and self._function is None:
            if isinstance(rule, str) or not isinstance(rule, (list, tuple)):
                raise InputError(f"{argument} is {rule!r}, but must be None, a list or a function of a variable.")
            self._patterns = tuple(self._pattern(entry) for entry in rule)

    def flags(self, variables: Sequence[Any]) -> tuple[bool, ...]:
        """One flag a variable, true where it is excluded.

        Raises:
          InputError: a pattern matches no variable.
        """
        if self._function is not None:
            flags = tuple(bool(self._function(variable)) for variable in variables)
            # From here on the rule is what it decided: a function cannot be saved with a model.
            self._patterns = tuple(_exactly(v) for v, flag in zip(variables, flags) if flag)
            return flags
        paths = [variable_path(variable) for variable in variables]
        if self._patterns is None:
            ranks = [len(variable.shape) for variable in variables]
            return tuple(rank <= 1 or bool(_BIAS_OR_NORMALISATION.search(path)) for path, rank in zip(paths, ranks))
        for pattern in self._patterns:
            if not any(re.search(pattern, path) for path in paths):
                parts = [*paths, *(part for path in paths for part in path.split("/"))]
                raise InputError(
                    f"{self._argument}: {pattern!r} matches no variable{nearest(pattern, parts)}; "
                    f"there are {', '.join(paths)}."
                )
        return tuple(any(re.search(pattern, path) for pattern in self._patterns) for path in paths)

    def config(self) -> tuple[str, ...] | None:
        """The rule as None or patterns, to be saved.

        Raises:
          InputError: the rule is a function that has not been asked about any variable yet.
        """
        if self._function is not None and self._patterns is None:
            raise InputError(
                f"{self._argument} is a function, which can be saved only after the optimizer was built: what it "
                "decided is saved then."
            )
        return self._patterns

    def _pattern(self, entry: Any) -> str:
        if hasattr(entry, "shape") and hasattr(entry, "name"):
            return _exactly(entry)
        try:
            re.compile(entry)
        except (re.error, TypeError) as failure:
            raise InputError(f"{self._argument}: {entry!r} is not a regular expression: {failure}.") from None
        return entry


def _exactly(variable: Any) -> str:
    return f"^{re.escape(variable_path(variable))}$"
