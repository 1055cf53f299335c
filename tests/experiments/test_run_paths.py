"""Paths at initialisation: chains of attention by length, and how many paths there are."""

import math

import numpy as np
import pytest
from trained_runs import answered, result_of, rows, run, single_columns

from experiments import run_path_chains, run_path_counts
from experiments.lab.experiment import read_run
from experiments.run_path_counts import ARCHITECTURES, binomial, path_table
from experiments.verdicts.claims import FAILS, HOLDS


@pytest.mark.full
def test_writes_rows_figures_and_a_summary(tmp_path):
    own, folder = run_path_chains, tmp_path / "run"
    assert run(run_path_chains, own.EXPERIMENT.presets["tiny"], folder) == 0
    found, setup = result_of(own, folder)
    assert found["sum_error"].max() < 1e-12 and not single_columns(folder)
    assert all(0 < alpha < 1 for alpha in found["alpha_of_layer"][1:])
    first, last = np.median(found["chain_mean"], axis=(0, 2))
    assert last < first
    assert [(r["seed"], r["length"], r["paths"]) for r in rows(folder)] == [
        (s, k, p) for s in "01" for k, p in zip("012", "144", strict=True)
    ]
    shown = read_run(own, folder)
    check, *_ = shown.comparisons
    assert check.measured == found["sum_error"].max() and check.published == 0
    assert [(c.key, c.draws) for c in shown.claims] == [("chains", 2), ("short at first", 2)]
    for slope, length, answer in ((0.1, 2, FAILS), (-0.1, 0, HOLDS)):
        other = found | {
            "chain_slope": slope * np.linspace(1, 1.2, 6),
            "log10_residual": np.tile(np.eye(3)[length], (6, 1)),
        }
        assert list(answered(own.claims(other, setup))[1].values()) == [answer] * 2


def test_seeds_that_overflow_are_named_and_kept_apart():
    said, found = [], {"sum_error": np.array([np.nan, 0.5, np.inf, 0.25]), "skip": np.arange(4)}
    kept = run_path_chains.finite(found, "sum_error", said.append)
    assert kept["seed"].tolist() == kept["skip"].tolist() == [1, 3]
    assert [text.split(":")[0] for text in said] == [f"seed {s} is kept apart" for s in (0, 2)]
    with pytest.raises(ValueError, match="all 2 seeds: NaN or overflow"):
        run_path_chains.finite({n: a[::2] for n, a in found.items()}, "sum_error", said.append)


@pytest.mark.full
def test_the_binary_writes_exact_counts(tmp_path):
    assert run(run_path_counts, [], tmp_path) == 0
    table = rows(tmp_path)
    assert len(table) == sum(layers + 1 for _, layers in ARCHITECTURES.values())
    gpt = [r for r in table if r["architecture"] == "GPT-3"]
    assert sum(int(r["paths"]) for r in gpt) == 97**96  # 191 digits
    assert int(gpt[95]["paths"]) == 96 * 96**95
    law, *lengths = read_run(run_path_counts, tmp_path).comparisons
    assert (
        law.measured < 1e-12 and law.published == 0 and len(lengths) == 9 + 5
    )  # counted, weighted
    assert lengths[0].measured == pytest.approx(6 * 12 / 13, rel=1e-12)  # DistilBERT
    tables, sizes = result_of(run_path_counts, tmp_path)
    tables["DeiT-T"][3]["share"] += 1e-3
    assert run_path_counts.compare(tables, sizes)[0].measured == pytest.approx(1e-3)


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
