"""The house's rules on imports and names, read from the source (DESIGN: imports point down only)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT, python

PACKAGE = ROOT / "tf_largebatch"

# From the bottom up. Files of one layer do not import each other, but files of one folder may.
LAYERS = [
    {"validation"},
    {"collectives_config", "optimizer_config", "schedule_config", "worker_events"},
    {"config", "named_functions", "scaling", "planning"},
    {"_keras"},
    {"optimizers", "schedules"},
    {"distribution"},
    {"layers"},
    {"monitoring", "networks", "datasets", "supervisor"},
    {"preflight", "recipe_objects"},
    {"run_folder"},
    {"training", "command_line"},
]
WITHOUT_TENSORFLOW = ["config", "named_functions", "preflight", "scaling", "validation", "command_line", "supervisor"]
WITHOUT_TENSORFLOW += ["collectives_config", "optimizer_config", "schedule_config", "worker_events"]


def part(module: str) -> str:
    """The layer's entry that a dotted module of the package belongs to."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> list[str]:
    """Dotted names of this package's modules that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from tf_largebatch import config` names a module, not its attribute.
            is_package = node.module == "tf_largebatch"
            found += [f"{node.module}.{alias.name}" for alias in node.names] if is_package else [node.module]
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return [name for name in found if name.split(".")[0] == "tf_largebatch"]


def level(name: str) -> int:
    (index,) = [index for index, layer in enumerate(LAYERS) if name in layer]
    return index


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for module in imports(path):
        other = part(module)
        assert other == own or level(other) < level(own), f"{own} must not import {module}"


def outside_imports(path: Path) -> set[str]:
    """What a file imports from elsewhere, as `module` and `module:name`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}:{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_launchers_read_flags(path):
    assert not outside_imports(path) & {"absl.flags", "absl:flags"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_seam_knows_two_kerases(path):
    if path.name in ("_keras.py", "keras3_repairs.py", "keras_train_step.py", "keras_fit_state.py"):
        return
    # TensorFlow too comes from the seam, which says what to install where there is none.
    assert not outside_imports(path) & {"keras", "tf_keras", "tensorflow", "tensorflow:keras"}
    assert "KERAS_3" not in path.read_text()


def test_names_say_something():
    for path in FILES:
        for name in path.relative_to(ROOT).with_suffix("").parts:
            assert name not in ("utils", "common", "helpers", "base", "core", "manager", "factory"), path


def test_top_level_is_the_house():
    tracked = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    house = {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "tf_largebatch", "launchers", "configs", "tests"}
    made_by_tools = {"runs", "build", "dist", "tf_largebatch.egg-info"}
    assert house <= tracked and tracked <= house | made_by_tools


def test_modules_without_tensorflow_do_not_load_it():
    modules = [f"tf_largebatch.{name}" for name in WITHOUT_TENSORFLOW]
    modules += ["tf_largebatch.distribution.cluster", "tf_largebatch.distribution.batch_split"]
    modules += [f"tf_largebatch.supervisor.{path.stem}" for path in (PACKAGE / "supervisor").glob("[a-z]*.py")]
    modules += ["tf_largebatch.datasets.fashion_mnist", "tf_largebatch.datasets.synthetic"]
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
import tf_largebatch
tf_largebatch.load_recipe, tf_largebatch.Cluster, tf_largebatch.InputError, tf_largebatch.split_batch
tf_largebatch.distribution.strategy
assert not {{"tensorflow", "keras"}} & set(sys.modules), "TensorFlow was loaded"
assert "LARS" in dir(tf_largebatch)
tf_largebatch.LARS
assert "tensorflow" in sys.modules
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists():
    code = "import tf_largebatch as t; print([getattr(t, name) for name in t.__all__])"
    assert python("-c", code).returncode == 0
    failed = python("-c", "import tf_largebatch; tf_largebatch.LARZ")
    assert "has no attribute 'LARZ'" in failed.stderr


def test_without_tensorflow_the_import_names_the_extra():
    # A module of that name that fails to import stands in for a machine without TensorFlow.
    code = "import sys; sys.modules['tensorflow'] = None; from tf_largebatch import LARS"
    failed = python("-c", code)
    assert failed.returncode == 1
    assert "pip install 'tf_largebatch[tensorflow]'" in failed.stderr


def test_another_keras_backend_is_one_sentence():
    failed = python("-c", "from tf_largebatch import LARS", KERAS_BACKEND="jax")
    assert "KERAS_BACKEND is 'jax', but tf_largebatch trains with 'tensorflow'." in failed.stderr


def test_every_package_folder_is_in_setup_cfg():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    folders = {path.parent for path in FILES} | {PACKAGE}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == expected | {"tf_largebatch.launchers", "tf_largebatch.configs"}
