"""Packages of extras: the line where one is missing, and the names in pyproject.toml."""

import math
import tomllib

import pytest

from rank_collapse.extras import PACKAGES, MissingPackage, import_package
from tests.support.folders import REPOSITORY


def test_what_is_installed_is_imported():
    assert import_package("math", "this", "flax") is math


def test_a_missing_package_is_one_line_with_what_installs_it():
    with pytest.raises(MissingPackage) as error:
        import_package("no_such_package.part", "a figure", "report", "text works without")
    assert error.value.name == "no_such_package" and str(error.value) == (
        "a figure needs no_such_package, which is not installed: pip install matplotlib scipy "
        "pillow (the extra 'report'); text works without"
    )


def test_the_packages_are_those_of_pyproject():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, packages in PACKAGES.items():
        required = " ".join(project["optional-dependencies"][extra])
        assert all(package in required for package in packages.split()), extra
