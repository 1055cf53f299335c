"""The levels of imports and the packages of the tree, as docs/architecture.md has them.

`python -m tests_docs.site_pages --write` puts them there. A package is described
by the first line of its docstring.
"""

import ast
from pathlib import Path

from tests.support.folders import REPOSITORY

PACKAGES = ("rank_collapse", "experiments")
# The levels of rank_collapse, the lowest first. Packages of the second level do not import each
# other. Above it a package may import those that are named before it on its level.
LEVELS = (
    ("annotations", "printed", "regular", "checks", "struct", "extras"),
    ("measures", "text", "runs"),
    ("network", "agree", "report"),
    ("theory", "paths", "flax_adapters", "watch", "jax_watch", "torch", "scaling"),
    ("training", "pretrained"),
    ("command",),
)


def files(package: str) -> list[Path]:
    """Every file of a package, relative to the repository."""
    paths = [p for p in (REPOSITORY / package).rglob("*") if p.is_file()]
    return sorted(p.relative_to(REPOSITORY) for p in paths if "__pycache__" not in p.parts)


def levels() -> list[tuple[str, str]]:
    """(level, its packages), the highest first."""
    rows = [*(", ".join(f"`{name}`" for name in names) for names in LEVELS), "`experiments`"]
    return [(str(height), names) for height, names in enumerate(rows)][::-1]


def packages() -> list[tuple[str, str]]:
    """(package, what it is for)."""
    init_files = [p for package in PACKAGES for p in files(package) if p.name == "__init__.py"]
    return [(f"`{p.parent}`", first_line(p)) for p in init_files]


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / path).read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def tree(path):
    return ast.walk(ast.parse((REPOSITORY / path).read_text("utf-8")))


def imports(path):
    """The dotted names a file imports, wherever in the file, those it imports from included."""
    for node in tree(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
