"""The README's Python examples run, and the files it links to exist."""

import re

import pytest
from conftest import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.strip().splitlines()[-1][:40])
def test_an_example_runs(block):
    for name in re.findall(r"^import (\w+)", block, re.MULTILINE):
        pytest.importorskip(name)
    exec(compile(block, "README.md", "exec"), {})


def test_links_and_commands_exist():
    assert len(BLOCKS) >= 2
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (REPOSITORY / target).exists(), target
    for module in set(re.findall(r"python -m (experiments\.\w+)", TEXT)):
        assert (REPOSITORY / (module.replace(".", "/") + ".py")).exists(), module


def test_the_two_commands_set_everything_up():
    start = "python3 -m venv .venv && .venv/bin/pip install -r "
    assert start + "requirements.txt && .venv/bin/python -m experiments.reproduce" in TEXT
    assert start + "requirements-test.txt && .venv/bin/python -m pytest" in TEXT
