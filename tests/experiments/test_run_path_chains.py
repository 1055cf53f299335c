"""Paths at initialisation: chains of attention by length, and how many paths there are."""

import math

import numpy as np
import pytest

from experiments import run_path_chains, run_path_counts
from experiments.lab.experiment import read_run
from experiments.run_path_counts import ARCHITECTURES, binomial, path_table
from tests.support.runs import result_of, rows, run, single_columns


@pytest.mark.full
def test_writes_rows_figures_and_a_summary(tmp_path):
    experiment, folder = run_path_chains, tmp_path / "run"
    assert run(run_path_chains, experiment.EXPERIMENT.presets["tiny"], folder) == 0
    results, setup = result_of(experiment, folder)
    assert results["sum_error"].max() < 1e-12 and not single_columns(folder)
    assert all(0 < alpha < 1 for alpha in results["alpha_of_layer"][1:])
    first, last = np.median(results["chain_mean"], axis=(0, 2))
    assert last < first
    assert [(r["seed"], r["length"], r["paths"]) for r in rows(folder)] == [
        (s, k, p) for s in "01" for k, p in zip("012", "144", strict=True)
    ]
    report = read_run(experiment, folder)
    check, *_ = report.comparisons
    assert check.measured == results["sum_error"].max() and check.published == 0
    assert [(c.key, c.draws) for c in report.claims] == [("chains", 2), ("short at first", 2)]
    for slope, length in ((0.1, 2), (-0.1, 0)):
        changed = results | {
            "chain_slope": slope * np.linspace(1, 1.2, 6),
            "log10_residual": np.tile(np.eye(3)[length], (6, 1)),
        }
        chains, at_first = experiment.judge_claims(changed, setup)
        assert chains.estimate == pytest.approx(1.1 * slope)
        assert at_first.estimate == length - 1


def test_seeds_that_overflow_are_named_and_kept_apart():
    lines, arrays = [], {"sum_error": np.array([np.nan, 0.5, np.inf, 0.25]), "skip": np.arange(4)}
    kept = run_path_chains.keep_finite_seeds(arrays, lines.append)
    assert kept["seed"].tolist() == kept["skip"].tolist() == [1, 3]
    starts = [line.split(": NaN or overflow")[0] for line in lines]
    assert starts == ["seed 0 is kept apart", "seed 2 is kept apart"]
    with pytest.raises(ValueError, match=r"^NaN or overflow"):
        run_path_chains.keep_finite_seeds({"sum_error": arrays["sum_error"][::2]}, lines.append)


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
    assert next(run_path_counts.compare_results(tables, sizes)).measured == pytest.approx(1e-3)


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 12), (128, 24), (96, 96), (1, 1000)])
def test_counts_follow_the_binomial_law(heads, layers):
    table = path_table(heads, layers)
    assert math.fsum(r["share"] for r in table) == pytest.approx(1, abs=1e-12)
    for row, law in zip(table, binomial(layers, heads), strict=True):
        assert row["share"] == pytest.approx(law, rel=1e-10, abs=1e-300)
