"""Reads the checklists of docs/extending.md and makes their changes in a copy of the repository.

A checklist is a section with tables of files and tests, and code blocks with the title of a file.
A block of kind "diff" has hunks, which change lines of that file; any other block is a new file.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from tests.support.folders import REPOSITORY

PAGE = REPOSITORY / "docs" / "extending.md"
BLOCK = re.compile(r'^(`{3,})(\w+) title="([^"]+)"\n(.*?)^\1$', re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"((?:`test_\w+`(?:, )?)+) in `([\w/.]+)`")
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "results", "build", "dist", "site", "shared")


class Step(NamedTuple):
    """One change: a hunk of an existing file, or a new file.

    Attributes:
        file: Path in the repository.
        text: Lines of the hunk with their marks, or the content of the new file.
        is_new: Whether the file is new.
    """

    file: str
    text: str
    is_new: bool


class Checklist(NamedTuple):
    """A section of the page.

    Attributes:
        steps: All changes of its example.
        tests: {file of a step: (test file, test function) that fail without the step}.
    """

    steps: tuple[Step, ...]
    tests: dict[str, tuple[tuple[str, str], ...]]


def read_checklist(title: str) -> Checklist:
    """Reads the section of a title."""
    (section,) = re.findall(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)",
        PAGE.read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    steps = []
    for _, kind, file, text in BLOCK.findall(section):
        hunks = text.split("@@\n")[1:] if kind == "diff" else [text]
        steps += [Step(file, hunk, kind != "diff") for hunk in hunks]
    return Checklist(tuple(steps), _read_tests(section, {step.file for step in steps}))


def _read_tests(section, files):
    """Reads the tests that a table names beside each file; a row without a file continues."""
    tests, current = dict.fromkeys(files, ()), ()
    for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE):
        cells = row.split(" | ")
        if len(cells) == 3 and cells[0].strip():
            places = [
                re.sub(r"<\w+>", r".+", name) for name in re.findall(r"`([\w/.<>]+)`", cells[0])
            ]
            current = [
                f
                for f in files
                if any(re.fullmatch(p + (r"\w+\.py" if p[-1] == "/" else ""), f) for p in places)
            ]
        for names, test_file in NAMED.findall(cells[-1]):
            for file in current:
                tests[file] += tuple((test_file, name) for name in re.findall(r"\w+", names))
    return tests


def copy_tree(target: Path) -> None:
    """Copies the repository without caches, results and git."""
    shutil.copytree(REPOSITORY, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    shutil.copytree(REPOSITORY / "docs" / "results", target / "docs" / "results")


def make_change(tree: Path, step: Step) -> None:
    """Makes one change.

    Raises:
        ValueError: The lines of a hunk are not in the file exactly once, or a new file exists.
    """
    path = tree / step.file
    if step.is_new:
        if path.exists():
            raise ValueError(f"{step.file} exists")
        path.write_text(step.text, "utf-8")
        return
    lines = step.text.splitlines(keepends=True)
    old, new = (
        "".join(line[1:] for line in lines if line[:1] in (" ", mark)) for mark in ("-", "+")
    )
    if not old:
        raise ValueError(f"a hunk of {step.file} says not where it belongs:\n{step.text}")
    before, *others = f"\n{path.read_text('utf-8')}".split(f"\n{old}")
    if len(others) != 1:
        raise ValueError(f"lines of {step.file} are there {len(others)} times:\n{old}")
    path.write_text(f"{before}\n{new}{others[0]}"[1:], "utf-8")
