"""Bad input in one sentence: the key, the value received, what is allowed, the nearest name.

pydantic finds the faults; this file words them. Bottom layer: no TensorFlow.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError


class InputError(ValueError):
    """Something the user gave is wrong. The message is one sentence; launchers exit with code 2."""

    exit_code = 2
    # As the class has it anyway, but TensorFlow re-raises from a tf.function only what has it by itself as this.
    __init__ = Exception.__init__


def _number(value: Any) -> Any:
    # bool is an int in Python, so "epochs: true" would otherwise be one epoch.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def _whole_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a whole number")
    # YAML has 1e3 as text, and pydantic makes an int of 1.0e3, but not of that.
    if isinstance(value, str) and "e" in value.lower():
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _folder_name(value: str) -> str:
    if value in ("", ".", "..") or re.search(r"[/\\\0\n]", value):
        raise ValueError("the name of a folder, without '/'")
    return value


# How recipes and arguments are read: no key that is not theirs, no infinity.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
# Types of recipe values and of the options of networks and data sets.
Int = Annotated[int, BeforeValidator(_whole_number)]
Float = Annotated[float, BeforeValidator(_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, lt=1)]
# What NumPy takes as a seed.
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
FolderName = Annotated[str, AfterValidator(_folder_name)]


def nearest(name: Any, names: Iterable[str]) -> str:
    """` (did you mean 'X'?)` with the closest of `names`, or nothing where none is close."""
    names, name = list(names), str(name)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    # An abbreviation ("peak") is short against what it stands for, so the ratio misses it.
    close = close or [known for known in names if len(name) > 2 and name in known]
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown(kind: str, name: Any, names: Iterable[str]) -> str:
    """`unknown KIND 'NAME' (did you mean ...?); allowed are ...`."""
    names = list(names)
    allowed = f"allowed are {', '.join(names)}" if names else "none are allowed here"
    return f"unknown {kind} {name!r}{nearest(name, names)}; {allowed}"


def fault_of_value(key: str, fault: dict[str, Any]) -> str:
    """`KEY is VALUE, but must be ...`, from one entry of pydantic's `ValidationError.errors()`."""
    return f"{key} is {fault['input']!r}, but must be {_allowed(fault)}"


def checked(name: str, value: Any, allowed: Any) -> Any:
    """`value` read as the type `allowed`, such as `PositiveInt`.

    Raises:
      InputError: it is none: `NAME is VALUE, but must be ...`.
    """
    try:
        return TypeAdapter(allowed, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as failure:
        fault = failure.errors(include_url=False)[0]
        name = ".".join([name, *map(str, fault["loc"])])
        raise InputError(f"{fault_of_value(name, fault)}.") from None


def _allowed(fault: dict[str, Any]) -> str:
    context = fault.get("ctx", {})
    limits = {
        "greater_than": "greater than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
        "value_error": "{error}",
        "finite_number": "a finite number",
        "too_short": "a list of {min_length} or more",
    }
    if fault["type"] == "literal_error":
        return context["expected"] + nearest(fault["input"], re.findall(r"'(.+?)'", context["expected"]))
    if fault["type"] in limits:
        return limits[fault["type"]].format(**context)
    types = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "tuple": "a list",
        "list": "a list",
        "dict": "a mapping of keys to values",
        "dataclass": "a mapping of keys to values",
        "model": "a mapping of keys to values",
        "none": "null",
    }
    kind = fault["type"].split("_")[0]
    return types.get(kind, fault["msg"])
