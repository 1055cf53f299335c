"""The README's Python examples run, each once, and the files it links to exist."""

import functools
import re

import numpy as np
import pytest
from conftest import REPOSITORY

from rank_collapse.measures.residuals import residual_ratio

TEXT = (REPOSITORY / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
MODELS = re.findall(r"<!-- test: models -->\n```python\n(.*?)```", TEXT, re.DOTALL)


@functools.cache
def ran(block):
    """The names that an example defines."""
    for name in re.findall(r"^import (\w+)", block, re.MULTILINE):
        pytest.importorskip(name)
    scope = {}
    exec(compile(block, "README.md", "exec"), scope)
    return scope


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.strip().splitlines()[-1][:40])
def test_an_example_runs(block):
    ran(block)


def test_examples_for_checkpoints_flax_models_and_plain_jax():
    checkpoint, flax_model, plain = map(ran, MODELS)
    assert checkpoint["trace"].hidden.shape == (13, 5, 768)
    assert not checkpoint["san_config"].attention_skip
    last = [float(residual_ratio(checkpoint[name].hidden[-1])) for name in ("trace", "san_trace")]
    assert last[1] < 1e-3 < last[0]
    assert len(flax_model["profile"]) == 3
    assert flax_model["ours"].w_q.shape == (4, 32, 8)
    assert plain["by_layer"].shape == (4,)
    assert np.all(np.diff(plain["by_layer"]) < 0)


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
