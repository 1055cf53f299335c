"""The published shares of paths by length."""

import math

import pytest
from trained_runs import rows, run

from experiments import run_path_counts
from experiments.run_path_counts import ARCHITECTURES, EXPERIMENT, binomial, path_table


def test_the_binary_writes_exact_counts(tmp_path):
    assert run(run_path_counts, [], tmp_path) == 0
    table = rows(tmp_path)
    assert len(table) == sum(layers + 1 for _, layers in ARCHITECTURES.values())
    gpt = [r for r in table if r["architecture"] == "GPT-3"]
    assert sum(int(r["paths"]) for r in gpt) == 97**96  # 191 digits
    assert int(gpt[95]["paths"]) == 96 * 96**95
    law, *lengths = EXPERIMENT.read(tmp_path).comparisons
    assert law.measured < 1e-12 and law.published == 0 and len(lengths) == 9
    assert lengths[0].measured == pytest.approx(6 * 12 / 13, rel=1e-12)  # DistilBERT
    tables, sizes = EXPERIMENT.results(tmp_path)
    tables["DeiT-T"][3]["share"] += 1e-3
    assert EXPERIMENT.compare(tables, sizes)[0].measured == pytest.approx(1e-3)


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 12), (128, 24), (96, 96), (1, 1000)])
def test_counts_follow_the_binomial_law(heads, layers):
    table = path_table(heads, layers)
    assert math.fsum(r["share"] for r in table) == pytest.approx(1, abs=1e-12)
    for row, law in zip(table, binomial(layers, heads), strict=True):
        assert row["share"] == pytest.approx(law, rel=1e-10, abs=1e-300)


def test_beyond_the_integers_logarithms_say_the_same(monkeypatch):
    exact = path_table(5, 40)
    monkeypatch.setattr(run_path_counts, "MAX_EXACT_DEPTH", 10)
    for a, b in zip(exact, path_table(5, 40), strict=True):
        assert b["paths"] == ""
        assert b["log10_paths"] == pytest.approx(a["log10_paths"], abs=1e-11)
        assert b["share"] == pytest.approx(a["share"], rel=1e-10)
