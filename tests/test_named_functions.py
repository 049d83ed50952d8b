"""Functions that a recipe names: found and checked from their source, imported only by `resolve`."""

from __future__ import annotations

import sys
import textwrap

import pytest
from one_sentence import refusal

from tf_largebatch import named_functions

MODELS = """
    import functools
    import typing as t
    from fractions import Fraction
    from typing import Literal
    from {package}.other import imported
    from tf_largebatch.validation import PositiveInt as P

    def build(
        shape, classes, width: P = 3, rate: float = 0.1, depth: int = 2, bias: bool = True,
        kind: Literal["wide", "narrow"] = "wide", sizes: tuple[int, ...] = (), names: t.List[str] = [],
        most: "float | None" = None, folder: str = None, part: Fraction = Fraction(1), anything=None,
    ): return "built"

    def any_options(shape, classes, width: int = 3, **options): return "built"
    def needs(shape, classes, depth: int, *, width: float): return "built"
    def unnamed(shape, classes, width=3, /): return "built"
    def too_few(shape): return "built"
    def no_parameters(*arguments): return "built"

    class Network:
        def __init__(self, shape, classes, width=3): pass
        def method(self): pass

    partial = functools.partial(build, width=5)

    @functools.cache
    def decorated(shape, classes, width: int = 3): return "built"

    if True:
        def conditional(shape, classes, width: int = 3): return "built"

    def twice(nothing): return "first"
    def twice(shape, classes, width: int = 3): return "second"

    not_a_function = 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """A package of the user's, of a name of its own, whose every module can be imported."""
    name = "pkg_" + "".join(letter for letter in request.node.name if letter.isalnum())
    write(tmp_path, f"{name}/__init__.py", "")
    write(tmp_path, f"{name}/models.py", MODELS.format(package=name))
    write(tmp_path, f"{name}/other.py", "def imported(shape, classes, width=3): return 'built'")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def write(folder, path, text):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())


def is_imported(package):
    return any(module.partition(".")[0] == package for module in sys.modules)


def find(name, **options):
    return named_functions.find("network", name, options, positional=2)


@pytest.mark.parametrize(
    ("key", "name", "module", "function"),
    [
        ("network", "small_cnn", "tf_largebatch.networks.small_cnn", "build"),
        ("dataset", "fashion_mnist", "tf_largebatch.datasets.fashion_mnist", "load"),
        ("dataset", "synthetic", "tf_largebatch.datasets.synthetic", "load"),
    ],
)
def test_a_shipped_name_means_the_function_of_a_module(key, name, module, function):
    found = named_functions.find(key, name, {}, positional=2 if key == "network" else 0)
    assert (found.key, found.module, found.function, found.options) == (key, module, function, {})


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("network", "small_cn", "unknown network 'small_cn' (did you mean 'small_cnn'?); allowed are small_cnn"),
        (
            "dataset",
            "mnist",
            "unknown dataset 'mnist' (did you mean 'fashion_mnist'?); allowed are fashion_mnist, synth",
        ),
        # A module of that folder which holds no data set.
        ("dataset", "batches", "unknown dataset 'batches'"),
        ("network", "", "unknown network ''"),
        ("network", "pkg.models.build", "or a function of yours as package.module:function"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(key, name, said):
    assert said in refusal(named_functions.find, key, name, {})


@pytest.mark.parametrize(
    ("option", "given", "taken"),
    [
        ("width", "8", 8),
        ("rate", "1e-3", 0.001),
        ("rate", 1, 1.0),
        ("depth", 2.0, 2),
        ("depth", "1e1", 10),
        ("sizes", [1, 2], (1, 2)),
        ("most", "1e-3", 0.001),
        ("most", None, None),
        # Null is the default, whatever the annotation says.
        ("folder", None, None),
        # Types that only the import could tell, even one that shares its name with one of ours.
        ("part", 3, 3),
        ("anything", [1], [1]),
    ],
)
def test_options_are_read_by_their_annotation(option, given, taken, package):
    got = find(f"{package}.models:build", **{option: given}).options[option]
    assert got == taken and type(got) is type(taken)
    assert not is_imported(package)


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("wdth", 3, "unknown key 'network_options.wdth' (did you mean 'width'?); allowed are width, rate, depth"),
        # The caller gives this one.
        ("shape", 3, "unknown key 'network_options.shape'"),
        ("width", 0, "network_options.width is 0, but must be greater than 0"),
        ("width", True, "network_options.width is True, but must be a whole number"),
        ("depth", True, "network_options.depth is True, but must be a whole number"),
        ("depth", 2.5, "network_options.depth is 2.5, but must be a whole number"),
        ("rate", True, "network_options.rate is True, but must be a number"),
        ("rate", float("nan"), "network_options.rate is nan, but must be a finite number"),
        ("bias", "maybe", "network_options.bias is 'maybe', but must be true or false"),
        ("kind", "wid", "network_options.kind is 'wid', but must be 'wide' or 'narrow' (did you mean 'wide'?)"),
        ("sizes", [1, "x"], "network_options.sizes.1 is 'x', but must be a whole number"),
        ("sizes", 1, "network_options.sizes is 1, but must be a list"),
        ("names", [1], "network_options.names.0 is 1, but must be text"),
        ("most", "x", "network_options.most is 'x', but must be a number"),
        ("folder", 3, "network_options.folder is 3, but must be text"),
    ],
)
def test_a_wrong_option_is_refused(option, given, said, package):
    assert said in refusal(find, f"{package}.models:build", **{option: given})
    assert not is_imported(package)


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("needs", {}, "the key 'network_options.depth' is missing"),
        ("needs", {"depth": 3}, "the key 'network_options.width' is missing"),
        ("too_few", {}, "'too_few' takes 1 positional arguments, but is called with 2"),
        ("no_parameters", {"x": 1}, "unknown key 'network_options.x'; allowed are none"),
        ("unnamed", {"width": 1}, "unknown key 'network_options.width'; allowed are none"),
        ("any_options", {"shape": 1}, "unknown key 'network_options.shape'"),
        ("conditional", {"width": True}, "network_options.width is True"),
        ("biuld", {}, "models.py has no function 'biuld' (did you mean 'build'?)"),
        ("method", {}, "models.py has no function 'method'"),
        ("", {}, "models.py has no function ''"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused(function, options, said, package):
    assert said in refusal(find, f"{package}.models:{function}", **options)
    assert not is_imported(package)


def test_options_beside_the_parameters_pass_where_the_function_takes_any(package):
    assert find(f"{package}.models:any_options", width="4", other="4").options == {"width": 4, "other": "4"}


@pytest.mark.parametrize("function", ["Network", "partial", "decorated", "twice", "imported"])
def test_what_the_source_does_not_tell_is_checked_by_the_import(function, package):
    name = f"{package}.models:{function}"
    assert callable(find(name, width=4).resolve())
    assert "'wdth'" in refusal(find(name, wdth=4).resolve)


@pytest.mark.parametrize(
    "name",
    ["{}.nothing:build", "{}.models.build:build", "nothing_{}:build", ":build", "..{}:build", "{}/models.py:build"],
)
def test_a_missing_module_is_refused(name, package):
    name = name.format(package)
    said = f"network: there is no module {name.partition(':')[0]!r} here; run in the folder that holds it"
    assert said in refusal(find, name)
