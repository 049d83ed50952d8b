"""Modules of the user's that cannot be read or imported, and what finding a function may import."""

from __future__ import annotations

import importlib
import sys

import pytest
from conftest import python
from one_sentence import refusal

from tf_largebatch import named_functions


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules of the user's, by path and content; what they import is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def write(path, content):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        importlib.invalidate_caches()
        return tmp_path / path

    yield write
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def find(name, **options):
    return named_functions.find("network", name, options, positional=2)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("x = 1\ndef build(:\n", "faulty.py, line 2: this is not Python"),
        ("def build(a, b):\nreturn 1\n", "faulty.py, line 2: this is not Python"),
        (b"x = 1\0\n", "faulty.py: this is not Python"),
        (b'x = "\xe9"\n', "this is not Python"),
    ],
)
def test_a_module_that_is_no_python_is_refused_with_its_place(content, place, write):
    write("faulty.py", content)
    assert place in refusal(find, "faulty:build")


def test_a_source_may_be_of_any_encoding_it_declares(write):
    write("latin.py", b'# -*- coding: latin-1 -*-\nx = "\xe9"\ndef build(a, b, width: int = 1): pass\n')
    assert find("latin:build", width="2").options == {"width": 2}


def test_a_folder_without_init_is_a_package_too(write):
    write("spaces/inner/models.py", "def build(a, b, width: int = 1): pass\n")
    assert find("spaces.inner.models:build", width="2").options == {"width": 2}


def test_a_module_named_as_one_of_the_standard_library_is_not_mistaken_for_it(write):
    write("shadow/__init__.py", "")
    write("shadow/math.py", "def build(a, b, width: int = 1): pass\n")
    assert find("shadow.math:build", width="2").options == {"width": 2}
    assert "there is no module 'shadow.sys'" in refusal(find, "shadow.sys:exit")


@pytest.mark.parametrize("content", ["from elsewhere import *\n", "def __getattr__(name): return print\n"])
def test_a_module_that_may_hold_any_name_is_left_to_the_import(content, write):
    write("elsewhere.py", "def build(a, b): pass\n")
    write("open_ended.py", content)
    assert callable(find("open_ended:build").resolve())


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("broken/__init__.py", "raise RuntimeError('boom')\n", "RuntimeError: boom ({place}, line 1)"),
        (
            "broken/models.py",
            "\n1 / 0\ndef build(a, b): pass\n",
            "ZeroDivisionError: division by zero ({place}, line 2)",
        ),
        (
            "broken/models.py",
            "import not_installed\ndef build(a, b): pass\n",
            "ModuleNotFoundError: No module named 'not_installed' ({place}, line 1)",
        ),
    ],
)
def test_a_module_that_fails_to_import_is_found_and_then_refused(path, content, said, write):
    write("broken/__init__.py", "")
    write("broken/models.py", "def build(a, b): pass\n")
    place = write(path, content)
    found = find("broken.models:build")
    assert f"network: 'broken.models' does not import: {said.format(place=place)}" in refusal(found.resolve)


@pytest.mark.parametrize("bound", ["build = 3", "import build", "for build in [1]: pass"])
def test_what_is_bound_but_no_function_is_refused_by_the_import(bound, write):
    write("build.py", "")
    write("bound.py", bound)
    assert refusal(find("bound:build").resolve) == "network: 'bound' has no function 'build'."


def test_nothing_is_imported_to_find_a_function(write):
    # In a process of its own: this one may hold TensorFlow already.
    write("loud/__init__.py", "import tensorflow\n")
    folder = write("loud/models.py", "import tensorflow\ndef build(shape, classes, width: int = 1): pass\n").parents[1]
    program = """
import sys
from tf_largebatch import config, named_functions, preflight
from tf_largebatch.distribution import batch_split, cluster

recipe = config.load(
    "fashion_mnist_lars_b1k", ["network=loud.models:build", "network_options.width=2", "dataset_options.source=keras"]
)
print(preflight.check(recipe).network.options)
named_functions.find("network", "small_cnn", {}, positional=2)
print(sorted({module.partition(".")[0] for module in sys.modules} & {"loud", "tensorflow", "keras"}))
"""
    script = write("script.py", program)
    done = python(script, cwd=folder)
    assert done.stdout == "{'width': 2}\n[]\n", done.stderr
