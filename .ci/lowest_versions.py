"""Prints the lowest versions that pyproject.toml allows, as requirements for pip.

pip install -r <(python .ci/lowest_versions.py)            every package
pip install -r <(python .ci/lowest_versions.py jax)    one of them
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
OF_THE_SITE = "docs"  # built with the versions of requirements-docs.txt


def find_lowest_versions() -> dict[str, str]:
    """Versions by package, of the dependencies and of all extras but the site's."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(e for name, e in extras.items() if name != OF_THE_SITE)]
    lowest: dict[str, str] = {}
    for requirement in (r for group in groups for r in group if ">=" in r):
        name, version = requirement.split(">=")
        lowest[name] = max(lowest.get(name, "0"), version, key=parse_version)
    return lowest


def parse_version(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    versions = find_lowest_versions()
    for name in sys.argv[1:] or sorted(versions):
        print(f"{name}=={versions[name]}")
