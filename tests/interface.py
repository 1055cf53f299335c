"""The public interface: every public name of `rank_collapse`, and how it is called, as text.

`python tests/interface.py` compares `tests/interface.txt` with the code, as a test does, and exits
with 1 where they differ; with `--write` it rewrites the file. A line is one name. Nothing is
imported, so that neither extras nor the version of Python matter.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_suffix(".txt")
COMMAND = "python tests/interface.py --write"
# Packages whose `__init__` says what is public, and modules all of whose names are.
PACKAGES = ("rank_collapse", *(f"rank_collapse.{n}" for n in ("pretrained", "report", "theory")))
PACKAGES += ("rank_collapse.torch", "rank_collapse.training")
MODULES = ("flax_adapters", "network.encoder_decoder", "network.surgery", "runs.metrics")


@cache
def tree_of(module: str) -> tuple[ast.Module, Path]:
    """A module's syntax tree, and its file."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8")), path


def exported(package: str) -> dict[str, str]:
    """{public name: the module that it is imported from} of a package's `__init__`."""
    return {
        alias.asname: node.module
        for node in ast.walk(tree_of(package)[0])  # those under TYPE_CHECKING too
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement of a module or a class defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = [t for target in targets for t in getattr(target, "elts", [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def defined(module: str) -> dict[str, ast.stmt]:
    """{public name: its definition} of a module."""
    body = tree_of(module)[0].body
    return {name: node for node in body for name in names_of(node) if name[0] != "_"}


def lines_of(place: str, name: str, module: str) -> Iterator[str]:
    """A name and what it has, as a user writes it after `place`."""
    whole, node = f"{place}.{name}", defined(module).get(name)
    if isinstance(node, ast.FunctionDef):
        yield f"{whole}{called(node)}"
    elif isinstance(node, ast.ClassDef):
        yield f"{whole}: class"
        for line in dict.fromkeys(members(node, module)):
            yield f"{whole}.{line}"
    elif isinstance(node, ast.AnnAssign):
        yield f"{whole}: {ast.unparse(node.annotation)}"
    elif isinstance(node, ast.Assign):
        yield f"{whole}: value"
    else:
        yield f"{whole}: module"


def called(node: ast.FunctionDef) -> str:
    """How a function is called, and what it gives."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def members(node: ast.ClassDef, module: str) -> Iterator[str]:
    """The public fields, methods and properties of a class, with those that it inherits."""
    for base in (ast.unparse(b) for b in node.bases):
        home = module if base in defined(module) else of_imports(module).get(base)
        if home:  # else of another package, or `struct.Struct`
            home = exported(home).get(base, home)
            yield from members(defined(home)[base], home)
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and ast.unparse(part.target)[0] != "_":
            yield ast.unparse(part)
        elif isinstance(part, ast.FunctionDef) and part.name[0] != "_":
            is_property = "property" in map(ast.unparse, part.decorator_list)
            yield part.name + (called(part).removeprefix("(self)") if is_property else called(part))
        elif isinstance(part, ast.FunctionDef) and part.name in ("__init__", "__call__"):
            yield part.name + called(part)


def of_imports(module: str) -> dict[str, str]:
    """{name: the module of this package that it is imported from}."""
    return {
        alias.name: node.module
        for node in tree_of(module)[0].body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rank_collapse.")
        for alias in node.names
    }


def choices() -> Iterator[str]:
    """The choices that arguments and fields have: {name of the type: its values}."""
    for path in sorted((ROOT / "rank_collapse").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                yield f"{module}.{ast.unparse(node)}"


def interface() -> list[str]:
    """A line for each public name, sorted."""
    lines = [
        line
        for package in PACKAGES
        for name, module in exported(package).items()
        for line in lines_of(package, name, module)
    ]
    for module in (f"rank_collapse.{name}" for name in MODULES):
        for name in defined(module):
            lines += lines_of(module, name, module)
    return sorted({*lines, *choices()})


def changes(old: list[str], new: list[str]) -> str:
    """What differs, a line each, and the command that rewrites the file; "" where nothing does."""
    gone = [f"- {line}" for line in old if line not in new]
    added = [f"+ {line}" for line in new if line not in old]
    if not gone + added:
        return ""
    return "\n".join(("the public interface changed:", *gone, *added, f"`{COMMAND}` rewrites it"))


if __name__ == "__main__":
    now = interface()
    changed = changes(FILE.read_text("utf-8").splitlines() if FILE.exists() else [], now)
    print(changed or "the public interface is as the file has it")
    if "--write" in sys.argv[1:]:
        FILE.write_text("\n".join(now) + "\n", "utf-8")
    else:
        sys.exit(bool(changed))
