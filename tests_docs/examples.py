"""Reads and runs the Python examples of pages."""

import functools
import re

import pytest

from tests.support.folders import REPOSITORY

DOCS = REPOSITORY / "docs"
# A block of Python, and the name that a comment before it gives to the tests.
BLOCK = re.compile(r"(?:<!-- test: ([\w ]+) -->\n)?```python\n(.*?)```", re.DOTALL)


@functools.cache
def run_block(block):
    """Runs an example; returns the names that it defines."""
    for name in re.findall(r"^import (\w+)", block, re.MULTILINE):
        pytest.importorskip(name)
    scope = {}
    exec(compile(block, "a page", "exec"), scope)
    return scope
