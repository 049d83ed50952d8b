"""Which variables are left out of layer-wise adaptation and of weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tf_largebatch.validation import InputError, nearest

# Scales and shifts of normalisation layers, and biases, also where they have more than one axis
# (LayerNormalization over two axes, biases of attention and of recurrent layers).
_BIAS_OR_NORMALISATION = re.compile(r"(^|/)(bias|beta|gamma)$|normalization[^/]*/scale$")


def excluded(patterns: Sequence[str] | None, paths: Sequence[str], ranks: Sequence[int], argument: str) -> list[bool]:
    """One flag a variable: whether the rule excludes it.

    Args:
      patterns: regular expressions, each searched for in the path; None for the default rule: rank
        at most 1, a bias, or a variable of a normalisation layer. `[]` excludes nothing.
      paths: the variables' paths, such as "block_1/conv/kernel".
      ranks: the variables' numbers of axes.
      argument: name of the optimizer's argument, for the error.

    Raises:
      InputError: a pattern is no regular expression or matches no variable.
    """
    if patterns is None:
        return [rank <= 1 or bool(_BIAS_OR_NORMALISATION.search(path)) for path, rank in zip(paths, ranks)]
    flags = [False] * len(paths)
    for pattern in patterns:
        matches = [bool(compiled(pattern, argument).search(path)) for path in paths]
        if not any(matches):
            parts = [*paths, *(part for path in paths for part in path.split("/"))]
            raise InputError(
                f"{argument}: {pattern!r} matches no variable{nearest(pattern, parts)}; there are {', '.join(paths)}."
            )
        flags = [flag or match for flag, match in zip(flags, matches)]
    return flags


def compiled(pattern: str, argument: str) -> re.Pattern[str]:
    """The compiled pattern; InputError where it is no regular expression."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as failure:
        raise InputError(f"{argument}: {pattern!r} is not a regular expression: {failure}.") from None
