"""Finds the function that a recipe names, and checks its options, without importing it.

`network: small_cnn` means `tf_largebatch.networks.small_cnn:build`, and `dataset: fashion_mnist`
means `tf_largebatch.datasets.fashion_mnist:load`; `my_pkg.models:build` is a function of the
user's. Importing a network loads TensorFlow, about three seconds on every worker, so its
signature is read from its source: a misspelt option is reported at once.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tf_largebatch import validation
from tf_largebatch.validation import InputError, fault_of_value, nearest, unknown

# Which function of a shipped module a recipe's key means.
SHIPPED = {"network": ("tf_largebatch.networks", "build"), "dataset": ("tf_largebatch.datasets", "load")}


@dataclass(frozen=True)
class NamedFunction:
    """A function by module and name, with the keyword options a recipe gives it."""

    key: str
    module: str
    function: str
    options: dict[str, Any]

    def resolve(self) -> Callable[..., Any]:
        """Imports the function.

        Raises:
          InputError: the module does not import, or has no such function.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as failure:
            raise InputError(f"{self.key}: {self.module!r} does not import: {failure}.") from failure
        function = getattr(module, self.function, None)
        if not callable(function):
            raise InputError(f"{self.key}: {self.module!r} has no function {self.function!r}.")
        return function


def find(key: str, name: str, options: dict[str, Any], positional: int = 0) -> NamedFunction:
    """The function that the recipe's `key` names, with its options checked and coerced.

    Args:
      key: "network" or "dataset".
      name: the value in the recipe: a shipped module, or `package.module:function`.
      options: keyword arguments for the function, as YAML gave them.
      positional: how many leading parameters the caller fills itself.

    Raises:
      InputError: no such module or function; an option is unknown or of the wrong type. A function
        whose definition cannot be read from its module's source is checked when it is called.
    """
    package, default_function = SHIPPED[key]
    if ":" in name:
        module, _, function = name.partition(":")
    else:
        shipped = sorted(
            file.stem
            for file in (Path(__file__).parent / package.rpartition(".")[2]).glob("*.py")
            if not file.stem.startswith("_") and _definition(file, default_function)
        )
        if name not in shipped:
            raise InputError(f"{unknown(key, name, shipped)}, or a function of yours as package.module:function.")
        module, function = f"{package}.{name}", default_function
    source = _source(key, module)
    definition = _definition(source, function) if source else None
    if definition is None:
        if source and not _binds(source, function):
            raise InputError(f"{key}: {source} has no function {function!r}{nearest(function, _functions(source))}.")
        return NamedFunction(key, module, function, dict(options))
    return NamedFunction(key, module, function, _checked(key, definition, options, positional))


def _source(key: str, module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as failure:
        raise InputError(f"{key}: there is no module {module!r} here: {failure}.") from failure
    if spec is None:
        raise InputError(
            f"{key}: there is no module {module!r} here; run in the folder that holds it or set PYTHONPATH."
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _functions(source: Path) -> list[str]:
    return [node.name for node in ast.parse(source.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]


def _definition(source: Path, function: str) -> ast.FunctionDef | None:
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node
    return None


def _binds(source: Path, name: str) -> bool:
    """Whether the module may hold `name` in another way: imported, assigned, or by `import *`."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
    return name in names or "*" in names


def _checked(key: str, definition: ast.FunctionDef, options: dict[str, Any], positional: int) -> dict[str, Any]:
    arguments = definition.args
    named = [*arguments.posonlyargs, *arguments.args][positional:] + arguments.kwonlyargs
    parameters = {argument.arg: argument for argument in named}
    checked = {}
    for option, value in options.items():
        place = f"{key}_options.{option}"
        if option in parameters:
            checked[option] = _coerced(place, parameters[option].annotation, value)
        elif arguments.kwarg:
            checked[option] = value
        else:
            names = ", ".join(parameters) or "none"
            raise InputError(f"unknown key {place!r}{nearest(option, parameters)}; allowed are {names}.")
    return checked


def _coerced(place: str, annotation: ast.expr | None, value: Any) -> Any:
    if annotation is None:
        return value
    try:
        # Only builtins and the value types of `validation` are known here; others go unchecked.
        kind = eval(ast.unparse(annotation), dict(vars(validation)))
        adapter = TypeAdapter(kind)
    except Exception:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as failure:
        raise InputError(f"{fault_of_value(place, failure.errors(include_url=False)[0])}.") from None
