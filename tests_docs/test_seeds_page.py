"""The page about seeds: its examples learn, are short, and print what the page says."""

import ast
import re

import pytest

from tests.support.closeness import assert_close
from tests_docs.examples import BLOCK, DOCS, run_block

PAGE = (DOCS / "seeds.md").read_text("utf-8")
BLOCKS = dict(BLOCK.findall(PAGE))


def test_the_examples_are_short():
    """Under forty lines each; blank lines and imports do not count."""
    assert list(BLOCKS) == ["optax seeds", "nnx seeds", "equinox seeds", "torch seeds"]
    for block in BLOCKS.values():
        imports = [n for n in ast.parse(block).body if isinstance(n, ast.Import | ast.ImportFrom)]
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) - len(imports) < 40


def test_the_rules_are_ten():
    rules = PAGE.partition("## What the functions must be")[2].partition("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", rules, re.MULTILINE) == [str(i) for i in range(1, 11)]


def test_the_rate_decides_how_far_the_mlp_comes():
    loss = run_block(BLOCKS["optax seeds"])["result"].metrics["loss"]
    assert loss.dims == ("learning_rate", "seed", "step") and loss.shape == (3, 8, 300)
    ends = loss.isel(step=slice(-50, None)).mean(["step", "seed"]).values
    (said,) = re.findall(r"It prints ([\d.]+), ([\d.]+) and ([\d.]+):", PAGE)
    assert_close(ends, [float(v) for v in said], atol=0.02)


def test_the_transformer_learns_the_text_and_is_watched():
    result = run_block(BLOCKS["nnx seeds"])["result"]
    loss = result.metrics["loss"].sel(rate=1e-2)
    assert (loss[:, -20:].mean("step") < 0.5 * loss[:, :5].mean("step")).all()
    assert result.looks["residual_ratio"].shape == (3, 8, 3, 4)
    assert result.looks["step"].values.tolist() == [0, 100, 200]


def test_the_wider_network_is_the_better_one():
    accuracy = run_block(BLOCKS["equinox seeds"])["result"].metrics["accuracy"][..., -1]
    narrow, wide = accuracy.mean("seed").values
    assert 0.6 < narrow < wide and wide > 0.9


def test_stacked_networks_of_pytorch_learn():
    pytest.importorskip("torch")
    scope = run_block(BLOCKS["torch seeds"])
    assert scope["weights"]["weight"].shape == (16, 1, 8)
    assert_close(scope["weights"]["weight"], 1, atol=0.05)
