"""Paths at initialisation: chains of attention by length, and how many paths there are."""

import numpy as np
import pytest

from experiments import run_path_chains
from experiments.lab.experiment import read_run
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
