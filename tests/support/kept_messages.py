"""The whole text of every refusal that tests provoke is kept in tests/golden/texts/messages.

A test names the words that matter; the other words of the message, a value left out or two names
exchanged, would change unseen. Kept are the errors that `tests.support.refusals` meets, where the
library or an experiment raised them, and lines "error: …" of commands. A file belongs to a module
of tests. What a test without an entry provokes is not compared: `--rewrite-golden` adds it.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import currently_in_test_context

from tests.support.folders import REPOSITORY
from tests.support.golden import TEXTS, list_differences

SOURCES = tuple(str(REPOSITORY / name) for name in ("rank_collapse", "experiments"))
TEMPORARY = re.compile(r"/[^\s'\":,;]*pytest-\d+/(?:popen-gw\d+/)?[^\s/'\":,;]*|/tmp/\w+")
PROCESS = re.compile(r"pid \d+ on [^\s)]+")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
new_messages: dict[str, dict[str, set[str]]] = {}  # {test module: {test: messages}}, to be written
_kept: dict[str, dict[str, set[str]]] = {}


def _locate_test() -> tuple[str, str] | None:
    """Returns (module, function) of the running test; None outside, and where inputs are drawn."""
    place = os.environ.get("PYTEST_CURRENT_TEST", "")
    if "::" not in place or currently_in_test_context():
        return None
    module, _, test = place.partition("::")
    return module, re.split(r"\[| \(", test)[0]


def _path(module: str) -> Path:
    name = module.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    return TEXTS / "messages" / f"{name}.txt"


def read_messages(module: str) -> dict[str, set[str]]:
    """Reads {test: its messages} of a module of tests."""
    if module not in _kept:
        _kept[module] = {}
        if _path(module).exists():
            for line in _path(module).read_text("utf-8").splitlines():
                test, _, message = line.partition(": ")
                _kept[module].setdefault(test, set()).add(message)
    return _kept[module]


def check_message(message: str) -> None:
    """Checks that a message is one of those that the running test has provoked before."""
    place = _locate_test()
    if place is None:
        return
    module, test = place
    text = TEMPORARY.sub("TMP", message.replace(str(REPOSITORY), "REPOSITORY"))
    text = PROCESS.sub("pid N on HOST", text)
    text = ADDRESS.sub("0x…", text).replace("\n", "\\n")
    if os.environ.get("REWRITE_GOLDEN"):
        new_messages.setdefault(module, {}).setdefault(test, set()).add(text)
        return
    messages = read_messages(module).get(test)
    is_kept = messages is None or any(not list_differences(text, kept) for kept in messages)
    kept = "\n  ".join(sorted(messages or ()))
    assert is_kept, f"{_path(module).name} does not have\n  {text}\nit has\n  {kept}"


def write_messages() -> None:
    """Writes the messages of the tests that have run; those of other tests stay."""
    for module, by_test in new_messages.items():
        merged = read_messages(module) | by_test
        lines = [f"{t}: {m}" for t, messages in sorted(merged.items()) for m in sorted(messages)]
        _path(module).parent.mkdir(parents=True, exist_ok=True)
        _path(module).write_text("".join(f"{line}\n" for line in lines), "utf-8")


def check_error(caught: pytest.ExceptionInfo) -> None:
    """Checks the message of an error, if code of this repository raised it; see `check_message`."""
    if str(caught.traceback[-1].path).startswith(SOURCES):
        check_message(str(caught.value))


def prints_and_keeps(print_lines: Any) -> Any:
    """Wraps `printed.print_lines`, so that lines of errors are kept."""

    def print_kept(*lines: Any, **options: Any) -> None:
        print_lines(*lines, **options)
        for line in lines:
            if str(line).startswith("error: "):
                check_message(str(line))

    return print_kept
