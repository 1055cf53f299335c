"""The binary at tiny size, its numbers, and its errors."""

import numpy as np
import pytest
from trained_runs import answered, rows, run, single_columns

from experiments import run_path_chains
from experiments.shell import tidy
from rank_collapse.report.claims import FAILS, HOLDS

TINY = [
    "--depth=2",
    "--num_heads=2",
    "--d_model=8",
    "--num_tokens=6",
    "--num_seeds=2",
    "--num_paths=5",
    "--num_repeats=2",
    "--num_devices=1",
]


def test_writes_rows_figures_and_a_summary(tmp_path):
    folder = tmp_path / "run"
    assert run(run_path_chains, TINY, folder) == 0
    own = run_path_chains.EXPERIMENT
    found, setup = own.results(folder)
    assert found["sum_error"].max() < 1e-12 and not single_columns(folder)
    assert all(0 < alpha < 1 for alpha in found["alpha_of_layer"][1:])
    first, last = np.median(found["chain_mean"], axis=(0, 2))
    assert last < first
    assert [(r["seed"], r["length"], r["paths"]) for r in rows(folder)] == [
        (s, k, p) for s in "01" for k, p in zip("012", "144", strict=True)
    ]
    shown = own.read(folder)
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
    kept = tidy.finite(found, "sum_error", said.append)
    assert kept["seed"].tolist() == kept["skip"].tolist() == [1, 3]
    assert [text.split(":")[0] for text in said] == [f"seed {s} is kept apart" for s in (0, 2)]
    with pytest.raises(ValueError, match="all 2 seeds: NaN or overflow"):
        tidy.finite({n: a[::2] for n, a in found.items()}, "sum_error", said.append)
