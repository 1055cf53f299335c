"""Parts of the site's pages that repeat the code.

`python -m tests_docs.site_pages --write` makes them. They are between
`<!-- made: name -->` and `<!-- end -->`; all of docs/statements.md is made. docs/results.md
is written by `experiments.reproduce` alone. Notebooks get a badge
that opens them in Colab, once `[project.urls]` has the address of the repository.
"""

import ast
import csv
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from experiments.lab.experiment import (
    describe_experiment,
    import_experiment,
    list_experiments,
)
from experiments.reproducing import statements_page
from experiments.reproducing.sections import REGISTERED, read_flag_values
from rank_collapse import MEASURES
from tests.support.architecture_map import levels, packages
from tests.support.folders import REPOSITORY

DOCS = REPOSITORY / "docs"
COLUMNS = REPOSITORY / "experiments" / "lab" / "columns.csv"
BLOCK = re.compile(r"(?<=<!-- made: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
# Pages of docs/api, each with the public names of its package.
API = ("measures", "network", "paths", "theory", "pretrained", "training", "report")
WHOLE = {  # modules whose own functions are public
    "network": ("network.encoder_decoder", "network.surgery", "flax_adapters"),
    "report": ("runs.metrics",),
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |\n" for r in lines
    )


def measures() -> str:
    """A row for each of `MEASURES`."""
    rows = []
    for name, m in MEASURES.items():
        alarm = f"{'above' if m.alarm.above else 'below'} {m.alarm.value:g}" if m.alarm else ""
        rows.append((f"`{name}`", m.needs, m.meaning, m.source, m.cost, alarm))
    columns = ("measure", "input", "meaning", "source", "cost", "alarm")
    return table(columns, rows)


def sizes() -> str:
    """A row for each flag of the preset of the pages that differs from the published command.

    The flags of these experiments are at the values of the published commands by default.
    """
    rows = []
    for name in ("run_sort", "run_convex_hull", "run_memorization"):
        flags, values = import_experiment(name).FLAGS, read_flag_values(name, REGISTERED)
        for flag, value in values.items():
            is_size = flag not in ("seed", "num_seeds", "no_sub_path") and flags[flag].name == flag
            if is_size and value != flags[flag].default:
                rows.append((f"`{name}`", f"`--{flag}`", str(value), str(flags[flag].default)))
    return table(("experiment", "flag", "here", "published"), rows)


def experiments() -> str:
    """A row for each experiment, in the order of the report."""
    entries = [(name, describe_experiment(name)) for name in list_experiments()]
    return table(
        ("experiment", "what it shows", "command"),
        [
            (f"[{e.title}]({name}.md)", e.brief, f"`python -m experiments.{name}`")
            for name, e in entries
        ],
    )


def columns() -> str:
    """Writes a table of the columns of results.csv for each group of experiments."""
    with COLUMNS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    parts = []
    for experiments in dict.fromkeys(row["experiments"] for row in rows):
        cells = [
            (" ".join(f"`{name}`" for name in row["columns"].split()), *list(row.values())[2:])
            for row in rows
            if row["experiments"] == experiments
        ]
        heading = f"\n## {experiments}\n\n"
        parts.append(heading + table(("column", "kind", "meaning", "unit"), cells))
    return "".join(parts) + "\n"


ALSO = {  # what stands on a page beside its package
    "measures": ("rank_collapse.watch.", "rank_collapse.scaling.coord_check."),
    "training": ("rank_collapse.scaling.depth_rules.",),
    "report": ("rank_collapse.agree.",),
}


def load_exports(package: str) -> list[str]:
    """Reads the full names that a package exports: in its stub, or in its `__init__`."""
    folder = REPOSITORY.joinpath(*package.split("."))
    stub = folder / "__init__.pyi"
    source = stub if stub.exists() else folder / "__init__.py"
    names = []
    for node in ast.parse(source.read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = f"{package}.{node.module}" if node.level else node.module
        if node.module:  # else the packages that a package has
            names += [f"{module}.{alias.name}" for alias in node.names if alias.asname]
    return names


def list_public(page: str) -> list[str]:
    """Lists the objects of one page of the API, by their full names."""
    package = f"rank_collapse.{page}"
    places = (f"{package}.", *ALSO.get(page, ()))
    names = {name for name in load_exports("rank_collapse") if name.startswith(places)}
    names.update(load_exports(package))
    modules = {f"rank_collapse.{module}" for module in WHOLE.get(page, ())}
    outside = {name for name in names if name.rpartition(".")[0] not in modules}
    return sorted(outside | modules)


def api(page: str) -> Callable[[], str]:
    """The blocks that mkdocstrings replaces by docstrings."""
    return lambda: "".join(f"::: {name}\n" for name in list_public(page))


def repository() -> str:
    """The public address of the repository on GitHub; "" before there is one."""
    text = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    return tomllib.loads(text)["project"]["urls"].get("Repository", "")


def colab(notebook: Path, address: str) -> str:
    """The address that opens a notebook of the repository in Colab."""
    place = address.removeprefix("https://github.com/").removesuffix(".git").strip("/")
    inside = notebook.relative_to(REPOSITORY).as_posix()
    return f"https://colab.research.google.com/github/{place}/blob/main/{inside}"


def add_badge(notebook: Path, address: str) -> str:
    """Puts a Colab badge into a notebook's first cell; without an address there is none."""
    content = json.loads(notebook.read_text("utf-8"))
    cells = [cell for cell in content["cells"] if cell["id"] != "colab"]
    if address:
        image = "https://colab.research.google.com/assets/colab-badge.svg"
        source = [
            f"[![Open in Colab]({image})]({colab(notebook, address)})\n",
            "\n",
            f"In Colab, first run `%pip install 'rank-collapse[flax,training] @ git+{address}'`.",
        ]
        badge = {"cell_type": "markdown", "id": "colab", "metadata": {}, "source": source}
        cells = [badge, *cells]
    return json.dumps(content | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"


def notebooks() -> str:
    """A sentence on Colab."""
    address = repository()
    if not address:
        return "Colab links follow when the repository has a public address.\n"
    links = [f"[{p.stem}]({colab(p, address)})" for p in sorted(DOCS.glob("*.ipynb"))]
    return f"Open in Colab: {', '.join(links)}.\n"


MADE = {
    "columns": columns,
    "measures": measures,
    "experiments": experiments,
    "sizes": sizes,
    "notebooks": notebooks,
    "levels": lambda: table(("level", "packages"), levels()),
    "packages": lambda: table(("package", "what it is for"), packages()),
} | {f"api_{page}": api(page) for page in API}


def renew_blocks(text: str) -> str:
    """Renews the blocks of a page that the code makes."""
    return BLOCK.sub(lambda match: match[1] + match[2] + MADE[match[1]](), text)


if __name__ == "__main__":
    for path in DOCS.glob("*.ipynb"):
        if "--write" in sys.argv[1:]:
            path.write_text(add_badge(path, repository()), "utf-8")
    pages = {path: renew_blocks(path.read_text("utf-8")) for path in DOCS.rglob("*.md")}
    pages[statements_page.PAGE] = statements_page.render_page(statements_page.read_table())
    for path, text in pages.items():
        if path.read_text("utf-8") != text:
            print(path.relative_to(REPOSITORY))
            if "--write" in sys.argv[1:]:
                path.write_text(text, "utf-8")
