"""Finds the function that a recipe names, and checks its options, without importing it.

`network: small_cnn` means `tf_largebatch.networks.small_cnn:build`, and `dataset: fashion_mnist`
means `tf_largebatch.datasets.fashion_mnist:load`; `my_pkg.models:build` is a function of the
user's. Importing a network loads TensorFlow, about three seconds on every worker, so its
signature is read from its source: a misspelt option is reported at once.
"""

from __future__ import annotations

import ast
import collections.abc
import importlib
import inspect
import pathlib
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tf_largebatch import validation
from tf_largebatch.validation import InputError, fault_of_value, nearest, unknown

# Which function of a shipped module a recipe's key means.
SHIPPED = {"network": ("tf_largebatch.networks", "build"), "dataset": ("tf_largebatch.datasets", "load")}
# Where an annotation's names may come from, for it to be checked.
_TYPES = {module.__name__: module for module in (typing, collections.abc, pathlib, validation)}
_BUILTIN_TYPES = {kind.__name__: kind for kind in (bool, str, bytes, list, tuple, dict, set, frozenset)}


@dataclass(frozen=True)
class NamedFunction:
    """A function by module and name, with the keyword options a recipe gives it.

    `positional` is how many leading arguments its caller gives beside the options.
    """

    key: str
    module: str
    function: str
    options: dict[str, Any]
    positional: int = 0

    def resolve(self) -> Callable[..., Any]:
        """Imports the function.

        Raises:
          InputError: the module does not import, or has no such function, or the options do not fit.
        """
        try:
            module = importlib.import_module(self.module)
        except InputError:
            raise
        except Exception as failure:
            frames = [
                frame for frame in traceback.extract_tb(failure.__traceback__)[1:] if "importlib" not in frame.filename
            ]
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            raise InputError(
                f"{self.key}: {self.module!r} does not import: {type(failure).__name__}: {failure}{place}."
            ) from failure
        function = getattr(module, self.function, None)
        if not callable(function):
            raise InputError(f"{self.key}: {self.module!r} has no function {self.function!r}.")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # a function written in C may not tell
            return function
        try:
            signature.bind(*[None] * self.positional, **self.options)
        except TypeError as failure:
            raise InputError(
                f"{self.key}: {self.module}:{self.function} cannot be called with {self.positional} arguments and "
                f"the options {', '.join(self.options) or 'none'}: {failure}."
            ) from None
        return function


def find(key: str, name: str, options: dict[str, Any], positional: int = 0) -> NamedFunction:
    """The function that the recipe's `key` names, with its options checked and coerced.

    Args:
      key: "network" or "dataset".
      name: the value in the recipe: a shipped module, or `package.module:function`.
      options: keyword arguments for the function, as YAML gave them.
      positional: how many leading parameters the caller fills itself.

    Raises:
      InputError: no such module or function; an option is unknown, missing or of the wrong type. A
        function whose definition cannot be read from its module's source is checked by `resolve`.
    """
    package, default_function = SHIPPED[key]
    if ":" in name:
        module, _, function = name.partition(":")
        source = _source(key, module)
    else:
        folder = Path(__file__).parent / package.rpartition(".")[2]
        files = {file.stem: file for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")}
        shipped = [stem for stem, file in files.items() if _bindings(_parse(key, file), default_function)]
        if name not in shipped:
            raise InputError(f"{unknown(key, name, shipped)}, or a function of yours as package.module:function.")
        module, function, source = f"{package}.{name}", default_function, files[name]
    if source is not None:
        tree = _parse(key, source)
        bound = _bindings(tree, function)
        if not bound and not _bindings(tree, "*") and not _bindings(tree, "__getattr__"):
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
            raise InputError(f"{key}: {source} has no function {function!r}{nearest(function, names)}.")
        # One plain definition: where there are more, or decorators, only the import tells what holds.
        if len(bound) == 1 and isinstance(bound[0], ast.FunctionDef) and not bound[0].decorator_list:
            options = _checked(key, bound[0], _known_types(tree), options, positional)
    return NamedFunction(key, module, function, dict(options), positional)


def _source(key: str, module: str) -> Path | None:
    """The source file of a module; None where it has none, but is there.

    As `importlib.util.find_spec`, which imports the packages above the module, and thereby perhaps
    TensorFlow.
    """
    if module in sys.modules:
        origin = getattr(sys.modules[module], "__file__", None)
    else:
        origin, path, parts = None, None, module.split(".")
        for depth, part in enumerate(parts, start=1):
            spec = _spec(".".join(parts[:depth]), path) if part.isidentifier() else None
            path = spec and spec.submodule_search_locations
            if spec is None or (path is None and depth < len(parts)):
                raise InputError(
                    f"{key}: there is no module {module!r} here; run in the folder that holds it or set PYTHONPATH."
                )
            origin = spec.origin
    source = Path(origin or "")
    return source if source.suffix == ".py" and source.is_file() else None


def _spec(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        # Given the whole name, PathFinder would look for a namespace package's parent in sys.modules
        # (KeyError); it searches `path` for the last part alone. Other finders need the whole name.
        try:
            spec = finder.find_spec(name.rpartition(".")[2] if finder is PathFinder else name, path)
        except (AttributeError, KeyError):
            continue
        if spec is not None:
            return spec
    return None


def _parse(key: str, source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_bytes(), str(source))
    except (SyntaxError, ValueError) as failure:
        line = getattr(failure, "lineno", None)
        place = f"{source}, line {line}" if line else str(source)
        raise InputError(f"{key}: {place}: this is not Python: {getattr(failure, 'msg', failure)}.") from None


def _bindings(tree: ast.Module, name: str) -> list[ast.AST]:
    """The statements at module level, also within if, try and with, that may bind `name`."""
    return [node for node in _module_level(tree) if name in _bound_names(node)]


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)


def _bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.alias):
        return [node.asname or node.name]
    return [node.id] if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else []


def _known_types(tree: ast.Module) -> dict[str, Any]:
    """The names that annotations in a module may use, as far as they can be known without an import."""
    known = {**_BUILTIN_TYPES, "int": validation.Int, "float": validation.Float}
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if isinstance(node, ast.ImportFrom) and node.module in _TYPES:
                known[alias.asname or alias.name] = getattr(_TYPES[node.module], alias.name, None)
            elif isinstance(node, ast.Import) and alias.name in _TYPES and (alias.asname or "." not in alias.name):
                known[alias.asname or alias.name] = _TYPES[alias.name]
    return known


def _checked(
    key: str, definition: ast.FunctionDef, types: dict[str, Any], options: dict[str, Any], positional: int
) -> dict[str, Any]:
    arguments = definition.args
    leading = [*arguments.posonlyargs, *arguments.args]
    if len(leading) < positional and not arguments.vararg:
        raise InputError(
            f"{key}: {definition.name!r} takes {len(leading)} positional arguments, but is called with {positional}."
        )
    defaults = [*[None] * (len(leading) - len(arguments.defaults)), *arguments.defaults]
    named = list(zip(leading, defaults))[max(positional, len(arguments.posonlyargs)) :]
    named += zip(arguments.kwonlyargs, arguments.kw_defaults)
    parameters = {argument.arg: (argument.annotation, default) for argument, default in named}
    taken = [argument.arg for argument in leading[:positional]]
    checked = {}
    for option, value in options.items():
        place = f"{key}_options.{option}"
        if option in parameters:
            checked[option] = _coerced(place, *parameters[option], types, value)
        elif arguments.kwarg and option not in taken:
            checked[option] = value
        else:
            names = ", ".join(parameters) or "none"
            raise InputError(f"unknown key {place!r}{nearest(option, parameters)}; allowed are {names}.")
    for option, (_, default) in parameters.items():
        if default is None and option not in options:
            raise InputError(f"the key '{key}_options.{option}' is missing.")
    return checked


def _coerced(
    place: str, annotation: ast.expr | None, default: ast.expr | None, types: dict[str, Any], value: Any
) -> Any:
    if annotation is None or (value is None and isinstance(default, ast.Constant) and default.value is None):
        return value
    try:
        # An annotation in quotes is the text of one.
        quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
        text = annotation.value if quoted else ast.unparse(annotation)
        adapter = TypeAdapter(eval(text, {"__builtins__": {}, **types}), config=ConfigDict(allow_inf_nan=False))
    except Exception:  # a type of the user's, which only the import could tell
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as failure:
        fault = failure.errors(include_url=False)[0]
        place = ".".join([place, *(str(part) for part in fault["loc"] if isinstance(part, int))])
        raise InputError(f"{fault_of_value(place, fault)}.") from None
