"""What `pip install .` installs: one top-level package, and what it imports is what it requires."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch

from rank_collapse.extras import PACKAGES
from tests.support import architecture_map
from tests.support.architecture_map import tree
from tests.support.folders import REPOSITORY
from tests.support.processes import python

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
MODULES = sorted((REPOSITORY / "rank_collapse").rglob("*.py"))
IMPORTED_AS = {
    "absl-py": "absl",
    "ml-dtypes": "ml_dtypes",
    "python-flint": "flint",
    "array-api-compat": "array_api_compat",
    "lazy-loader": "lazy_loader",
    "pillow": "PIL",
}


def list_imports(path):
    """Lists the packages that a module imports, by `extras.import_package` too."""
    calls = (node for node in tree(path) if isinstance(node, ast.Call))
    required = (c.args[0].value for c in calls if getattr(c.func, "id", "") == "import_package")
    return [name.partition(".")[0] for name in (*architecture_map.imports(path), *required)]


def read_names(requirements):
    """Reads the modules of a list of requirements such as "jax>=0.10"."""
    packages = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {IMPORTED_AS.get(name, name) for name in packages}


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
    files = [p.relative_to(root) for p in root.rglob("*") if p.is_file() and p.suffix != ".py"]
    data = [str(p) for p in files if "__pycache__" not in p.parts]
    assert {"py.typed", "data/english.txt", "__init__.pyi", "paths/__init__.pyi"} <= set(data)
    assert [d for d in data if not any(fnmatch(d, x) for x in patterns)] == []


# The parts of the library that need extras, and which.
EXTRAS_OF = {
    "flax_adapters": ("flax",),
    "jax_watch": ("flax",),
    "scaling": ("training",),
    "watch": ("flax",),
    "command": ("report",),
    "training": ("training",),
    "pretrained": ("pretrained", "hub", "report"),
    "text": ("pretrained",),
    "theory": ("exact",),
    "report": ("report",),
    "runs": ("report",),
}
CORE = read_names(PYPROJECT["project"]["dependencies"])
EXTRAS = {
    extra: read_names(r for r in requirements if not r.startswith("rank-collapse"))
    for extra, requirements in PYPROJECT["project"]["optional-dependencies"].items()
}
ALL_EXTRAS = set().union(*(EXTRAS[extra] for extras in EXTRAS_OF.values() for extra in extras))

WATCHED = {"torch", "transformers", "equinox"}
CONVERTED_TO = {"pandas", "xarray"}  # by methods of results, for who has them


def get_part(path):
    return path.relative_to(REPOSITORY / "rank_collapse").parts[0].removesuffix(".py")


def drop_standard(names):
    return set(names) - set(sys.stdlib_module_names) - {"rank_collapse"}


def test_what_it_imports_is_what_it_requires():
    imported = drop_standard(name for path in MODULES for name in list_imports(path))
    # torch reads .bin files where it is installed; who watches a model has what made it.
    assert imported == (CORE | ALL_EXTRAS | WATCHED | CONVERTED_TO) - {"PIL"}  # of experiments
    for path in MODULES:
        extras = set().union(*(EXTRAS[extra] for extra in EXTRAS_OF.get(get_part(path), ())))
        extras |= WATCHED if get_part(path) in ("watch", "torch", "jax_watch") else set()
        extras |= {"torch"} if path.name == "checkpoint_files.py" else set()
        allowed = CORE | CONVERTED_TO | extras | {"scipy"}  # which JAX requires
        assert drop_standard(list_imports(path)) <= allowed, path
    experiments = [n for p in (REPOSITORY / "experiments").rglob("*.py") for n in list_imports(p)]
    # PyTorch is asked for by a flag of the benchmark.
    allowed = CORE | ALL_EXTRAS | EXTRAS["experiments"] | EXTRAS["cluster"] | EXTRAS["gguf"]
    assert drop_standard(experiments) - {"experiments", "torch"} <= allowed


def test_the_requirements_have_every_extra():
    pinned = (REPOSITORY / "requirements.txt").read_text("utf-8").splitlines()
    assert read_names(r for r in pinned if r[:1].isalpha()) >= CORE.union(
        ALL_EXTRAS, EXTRAS["experiments"], EXTRAS["cluster"], EXTRAS["gguf"]
    ) - {"ml_dtypes"}


CHILD = """
import pathlib, re, sys

absent = set(sys.argv[1].split(","))
sys.modules.update(dict.fromkeys(absent))  # as if they were not installed
import rank_collapse as rc
rc.pretrained, rc.surgery
from rank_collapse.pretrained import random_like
try:
    rc.theory.exact_profile
except ImportError as error:
    print(error)
exec(re.findall(r"```python\\n(.*?)```", pathlib.Path("README.md").read_text(), re.DOTALL)[0])
print(sorted(absent & {name.partition(".")[0] for name, m in sys.modules.items() if m}))
"""


def test_the_core_does_without_the_extras():
    """Only the wheel's own dependencies are visible: the packages of extras are hidden.

    Except scipy, without which JAX does not start.
    """
    done = python("-c", CHILD, ",".join(sorted(ALL_EXTRAS - {"scipy"})))
    assert done.returncode == 0, done.stderr
    error, *_, loaded = done.stdout.splitlines()  # between them, what the README prints
    assert "exact_profile" in error and "python-flint" in error
    assert loaded == "[]"


def test_what_is_said_to_be_installed_is_the_extra():
    """By the packages: neither a clone nor a wheel is found by the extra's name alone."""
    for extra, packages in PACKAGES.items():
        assert read_names(packages.split()) == EXTRAS[extra], extra


def test_every_extra_that_is_asked_for_exists():
    files = [*(REPOSITORY / ".github" / "workflows").glob("*.yml"), REPOSITORY / "BUILD.md"]
    lists = re.findall(r"\.\[([\w,]+)\]", "".join(path.read_text("utf-8") for path in files))
    assert lists and {extra for names in lists for extra in names.split(",")} <= EXTRAS.keys()


def test_the_import_is_light():
    """It loads no framework beside JAX and nothing that draws."""
    code = "import sys, rank_collapse; print(*{name.partition('.')[0] for name in sys.modules})"
    done = python("-c", code)
    heavy = {"torch", "tensorflow", "flax", "equinox", "transformers", "matplotlib", "optax"}
    assert "rank_collapse" in done.stdout.split() and not heavy & set(done.stdout.split())
