"""Every block of docs/monitoring*.md runs as it stands, in a folder of its own."""

import re

import numpy as np
import pytest
from conftest import REPOSITORY

from rank_collapse.runs import metrics

PAGES = sorted((REPOSITORY / "docs").glob("monitoring*.md"))
TEXT = "".join(page.read_text("utf-8") for page in PAGES)
RECIPES = dict(re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(recipe) → the names it defines."""
    monkeypatch.chdir(tmp_path)

    def ran(name):
        if name in ("equinox", "torch"):
            pytest.importorskip(name)
        scope = {}
        exec(compile(RECIPES[name], f"docs/monitoring: {name}", "exec"), scope)
        return scope

    return ran


def test_every_block_of_python_is_run():
    assert TEXT.count("```python") == len(RECIPES) == 6


def test_a_file_is_read_back(run):
    run("file")
    rows = metrics.read("metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[2]["loss"] == 2.3 / 3
    np.testing.assert_array_equal(rows[0]["residual_ratio"], [0.9, 0.8])


def rows_to_the_end():
    reader = metrics.Reader("metrics.jsonl")
    reader.read()
    assert reader.ended
    return reader.rows


def test_a_scan_gives_scalars_and_gradients_by_layer(run):
    run("optax")
    for row in rows_to_the_end():
        assert row.pop("step") < 3 and np.isfinite(row.pop("loss"))
        assert len(row) == 12 and {a.shape for a in row.values()} == {(3,)}
        assert all(np.isfinite(a).all() for a in row.values())


@pytest.mark.parametrize(("name", "layers"), [("linen", 3), ("nnx", 2), ("equinox", 3)])
def test_one_call_gives_scalars_by_layer(run, name, layers):
    scope = run(name)
    assert {a.shape for a in scope["scalars"].values()} == {(layers,)}
    assert ("attention_entropy" in scope["scalars"]) == (name != "equinox")


def test_a_watched_model_of_torch(run):
    watched = run("torch")["watched"]
    rows = rows_to_the_end()
    assert [row["step"] for row in rows] == [0, 2, 4] and len(watched.rows) == 3
    assert rows[2]["residual_ratio"].shape == rows[2]["query_gradient"].shape == (3,)
