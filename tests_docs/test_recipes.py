"""The recipes for plots of one's own, on docs/columns.md, run on a folder of run_sort."""

import contextlib
import io
import re

import numpy as np
import pytest

from experiments import run_sort
from tests.support.folders import REPOSITORY
from tests.support.runs import arrays, rows, run

PAGE = (REPOSITORY / "docs" / "columns.md").read_text("utf-8")
RECIPES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.full
def test_recipes_of_the_page_read_what_a_run_leaves(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "sort" / "mine"
    assert run(run_sort, [*run_sort.EXPERIMENT.presets["tiny"], "--n_epochs=2"], folder) == 0
    monkeypatch.chdir(tmp_path)
    table_recipe, array_recipe = RECIPES
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = {}
        exec(table_recipe, names)
        exec(array_recipe, names)
    truncated = arrays(folder)["results/truncated/accuracy"].astype(float)
    means = names["short"].groupby("path_length").accuracy.mean()
    np.testing.assert_allclose(means, truncated.mean(axis=0), rtol=1e-6)
    by_length = names["arrays"]["results/truncated/accuracy"].mean("seed")
    assert by_length.dims == ("path_length",)
    np.testing.assert_allclose(by_length, truncated.mean(axis=0), rtol=1e-6)
    assert {row["evaluation"] for row in rows(folder)} >= {"truncated", "sampled", "whole"}
    assert len(names["sets"]) and "path_length" in printed.getvalue()
