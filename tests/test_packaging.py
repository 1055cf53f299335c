"""What `pip install .` installs: one top-level package, and what it imports is what it requires."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
MODULES = sorted((REPOSITORY / "rank_collapse").rglob("*.py"))
IMPORTED_AS = {"absl-py": "absl", "orbax-checkpoint": "orbax", "ml-dtypes": "ml_dtypes"}


def imports(path):
    """Top-level names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def names(requirements):
    """The modules of a list of requirements such as "jax>=0.10"."""
    found = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {IMPORTED_AS.get(name, name) for name in found}


def test_one_package_is_installed():
    patterns = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {p.parent.name for p in REPOSITORY.glob("*/__init__.py")}
    assert packages >= {"rank_collapse", "experiments"}
    assert {p for p in packages if any(fnmatch(p, x) for x in patterns)} == {"rank_collapse"}
    # Folders without an __init__.py would be left out of the wheel.
    assert {p.parent for p in MODULES} == {p.parent for p in MODULES if p.name == "__init__.py"}


def test_its_data_are_installed_with_it():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["rank_collapse"]
    root = REPOSITORY / "rank_collapse"
    others = [p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".py"]
    data = [str(p) for p in others if "__pycache__" not in p.parts]
    assert {"py.typed", "data/english.txt"} <= set(data)
    assert [d for d in data if not any(fnmatch(d, x) for x in patterns)] == []


def test_what_it_imports_is_what_it_requires():
    found = {name for path in MODULES for name in imports(path)}
    foreign = found - set(sys.stdlib_module_names) - {"rank_collapse"}
    project = PYPROJECT["project"]
    required = names(project["dependencies"])
    optional = names(project["optional-dependencies"]["pretrained"])
    assert foreign == required | optional
    # What is optional is imported inside functions only.
    at_once = {
        name
        for path in MODULES
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
        )
    }
    assert not {name.partition(".")[0] for name in at_once} & optional
