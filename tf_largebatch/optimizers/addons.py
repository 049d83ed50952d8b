"""The optimizers of tensorflow-addons by name: checked without TensorFlow, then built.

They are Keras 2 legacy optimizers and run on TensorFlow 2.15 alone, the extra `addons`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from tf_largebatch.validation import Float, InputError, Int, PositiveFloat, checked, nearest, unknown

_INSTALL = "pip install 'tf_largebatch[addons]', which needs Python 3.11"
# What every one of them takes by **kwargs.
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
# Its rate weights a mean of w and of a point of a ball, and it takes no schedule for it (version 0.23).
_WITHOUT_SCHEDULE = "ConditionalGradient"
_TYPES = {"float": Float, "int": Int, "bool": bool, "str": str, "Optional[List[str]]": list[str] | None}


class Option(NamedTuple):
    type: Any
    required: bool


def check(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer such as "addons.LAMB", read by the types of its arguments.

    Classes and options are read from the package's source: importing it would load TensorFlow.

    Raises:
      InputError: tensorflow-addons is not installed; it has no such optimizer; an option is unknown,
        missing or of a wrong type.
    """
    spec = importlib.util.find_spec("tensorflow_addons")
    if spec is None or spec.origin is None:
        raise InputError(f"optimizer.name is {name!r}, but tensorflow-addons is not installed here: {_INSTALL}.")
    classes = optimizers(Path(spec.origin).parent / "optimizers")
    if name not in classes:
        raise InputError(f"{unknown('optimizer', name, classes)}.")
    known = classes[name]
    for key in options:
        if key not in known:
            raise InputError(
                f"unknown key 'optimizer.options.{key}'{nearest(key, known)}; allowed are {', '.join(known)}."
            )
    for key, option in known.items():
        if option.required and key not in options:
            raise InputError(f"the key 'optimizer.options.{key}' is missing.")
    return {key: checked(f"optimizer.options.{key}", value, known[key].type) for key, value in options.items()}


def optimizers(folder: Path) -> dict[str, dict[str, Option]]:
    """The options of each optimizer of the package whose source is in `folder`, by names such as "addons.LAMB".

    Left out are wrappers around another optimizer, and what takes no schedule as learning rate.
    """
    found = {}
    for statement in ast.parse((folder / "__init__.py").read_bytes()).body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        public = {alias.name for alias in statement.names} - {_WITHOUT_SCHEDULE}
        file = folder / f"{statement.module.rpartition('.')[2]}.py"
        for definition in ast.parse(file.read_bytes()).body:
            if isinstance(definition, ast.ClassDef) and definition.name in public:
                options = _options(definition)
                if options.pop("learning_rate", None):
                    found[f"addons.{definition.name}"] = options
    return found


def build(name: str, options: dict[str, Any], schedule: Any) -> Any:
    """The optimizer, with the schedule as its learning rate.

    Raises:
      InputError: tensorflow-addons does not import here, or refuses an option.
    """
    options = check(name, options)
    try:
        package = importlib.import_module("tensorflow_addons")
    except ImportError as failure:
        raise InputError(
            f"optimizer.name is {name!r}, but tensorflow_addons does not import here: {_line(failure)}: {_INSTALL}."
        ) from failure
    try:
        return getattr(package.optimizers, name.partition(".")[2])(learning_rate=schedule, **options)
    except (TypeError, ValueError) as failure:
        raise InputError(f"optimizer.options: {name} refuses them: {_line(failure)}.") from failure


def _options(definition: ast.ClassDef) -> dict[str, Option]:
    for method in definition.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            arguments = method.args.args
            first_default = len(arguments) - len(method.args.defaults)
            options = {
                argument.arg: Option(_type(argument.annotation), position < first_default)
                for position, argument in enumerate(arguments)
                if argument.arg not in ("self", "name")
            }
            return options | {key: Option(PositiveFloat, False) for key in _CLIPPING}
    return {}


def _type(annotation: ast.expr | None) -> Any:
    text = ast.unparse(annotation) if annotation else ""
    # Where theirs may be a function of the step too, a recipe has the number.
    return Float if "FloatTensorLike" in text else _TYPES.get(text, Any)


def _line(failure: Exception) -> str:
    return " ".join(str(failure).split()).rstrip(".")
