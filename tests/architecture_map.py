"""The map of docs/architecture.md, made from the tree.

`python tests/architecture_map.py` prints it, `--write` puts it there. A file is described by the
first line of its docstring.
"""

import ast
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("rank_collapse", "experiments")
BLOCK = re.compile(r"(?<=```\n)rank_collapse/[ \n].*?(?=```)", re.DOTALL)


def files(package: str) -> list[Path]:
    """Every file of a package, relative to the repository; packages come before single files."""
    found = [p for p in (REPOSITORY / package).rglob("*") if p.is_file()]
    found = [p.relative_to(REPOSITORY) for p in found if "__pycache__" not in p.parts]
    return sorted(found, key=lambda p: [(part.endswith(".py"), part) for part in p.parts])


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its full stop; nothing for other files."""
    if path.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / path).read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].removesuffix(".")


def architecture_map() -> str:
    """One line for each folder and file: its name, indented by its depth, and what it is for."""
    lines, seen = [], set()
    for path in (p for package in PACKAGES for p in files(package)):
        for folder in reversed(path.parents[:-1]):
            if folder not in seen:
                seen.add(folder)
                about = folder / "__init__.py"
                about = first_line(about) if (REPOSITORY / about).exists() else ""
                lines.append((len(folder.parts) - 1, f"{folder.name}/", about))
        if path.name != "__init__.py":
            lines.append((len(path.parts) - 1, path.name, first_line(path)))
    named = [("  " * depth + name, about) for depth, name, about in lines]
    width = 2 + max(len(name) for name, about in named if about)
    return "".join(f"{name:{width}}{about}".rstrip() + "\n" for name, about in named)


def mapped_files(text: str) -> set[str]:
    """The paths that a map names, read back from its indentation."""
    paths, folders = set(), []
    for line in BLOCK.search(text)[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        if not name.endswith("/"):
            paths.add("".join(folders))
    return paths


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        page = REPOSITORY / "docs" / "architecture.md"
        page.write_text(BLOCK.sub(lambda _: architecture_map(), page.read_text("utf-8"), 1))
    else:
        print(architecture_map(), end="")
