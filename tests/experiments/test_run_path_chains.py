"""Paths at initialisation: chains of attention by length, and how many paths there are."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import run_path_chains
from experiments.lab.experiment import read_run
from tests.support.closeness import assert_close
from tests.support.executors import replace_executor
from tests.support.golden import read_arrays
from tests.support.golden_runs import arrays_path
from tests.support.runs import opened_with, parsed, result_of, rows, run, single_columns


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


def test_seeds_are_measured_as_they_are_drawn_and_kept_where_they_are_finite(monkeypatch):
    """On a CPU one for each device at a time; medians are over paths, then over repeats."""
    options = parsed(run_path_chains, *run_path_chains.EXPERIMENT.presets["tiny"])
    setup, lines = run_path_chains.make_setup(options), []
    saved = {
        name.removeprefix("seeds/"): np.concatenate([values, values])
        for name, values in read_arrays(arrays_path("run_path_chains").read_text("utf-8")).items()
    }
    saved["sum_error"][1] = np.nan
    errors = saved["estimate_error"]
    saved["estimate_error"] = np.concatenate([errors, 2 * errors, 5 * errors], axis=3)

    executor_mesh = SimpleNamespace(size=3)

    def measure(measure, cells, *, most, draw):
        assert (cells, most) == ({"seeds": None}, 3)
        assert measure("draws", None) == (setup, "draws")
        assert draw("key", None) == (options, setup, "key")
        return {"seeds": dict(saved)}

    members = {"mesh": executor_mesh, "progress": SimpleNamespace(say=lines.append)}
    arguments = options, "folder", "path chains"
    replace_executor(monkeypatch, run_path_chains, *arguments, measure=measure, **members)
    monkeypatch.setattr(run_path_chains.seeds, "is_on_cpu", lambda mesh: mesh is executor_mesh)
    for name in ("measure_seed", "draw"):
        monkeypatch.setattr(run_path_chains, name, lambda *arguments: arguments)
    results = run_path_chains.measure(options, setup, "folder")
    assert len(lines) == 1 and lines[0].startswith("seed 1 is kept apart")
    assert results["seed"].tolist() == [0, 2, 3] and [*results["paths"]] == [1, 4, 4]
    chains, errors = saved["chain_mean"][[0, 2, 3]], saved["estimate_error"][[0, 2, 3]]
    middle = np.median(chains, axis=2)
    assert_close(results["chain_mean_median"], np.insert(middle, 0, np.nan, axis=1))
    assert_close(results["chain_slope"], np.log10(middle[:, 1] / middle[:, 0]))
    for place, number in enumerate((5, 20)):
        expected = np.insert(np.median(errors[:, place], axis=2), 0, np.nan, axis=1)
        assert_close(results[f"error_of_{number}_paths"], expected)


@pytest.mark.full
def test_chains_are_the_first_set_of_paths_and_estimates_the_first_paths_of_each(monkeypatch):
    """Random numbers of the tokens, the weights, the chains and the sets are of four keys."""
    flags = ("--depth=2", "--num_heads=2", "--d_model=4", "--num_tokens=4", "--num_repeats=3")
    options = parsed(run_path_chains, *flags, "--num_paths=23", "--inputs=gaussian")
    setup, asked = run_path_chains.make_setup(options), []

    def sample_path_sets(key, lengths, repeats, most, depth, num_heads):
        asked.append(([*lengths], repeats, most, depth, num_heads))
        return jax.random.randint(key, (2, 3, 23, 2), 0, 1000)

    monkeypatch.setattr(run_path_chains.rc.paths, "sample_path_sets", sample_path_sets)
    key = jax.random.key(5)
    _, key_params, *keys = jax.random.split(key, 4)
    _, params, paths, sets = run_path_chains.draw(options, setup, key)
    chains, drawn = (jax.random.randint(k, (2, 3, 23, 2), 0, 1000) for k in keys)
    assert asked[0] == ([1, 2], 3, 23, 2, 2)
    np.testing.assert_array_equal(paths, chains[:, 0])
    np.testing.assert_array_equal(sets, drawn[:, :, :20])
    expected = rc.init(key_params, setup.config, options.weight_scale, options.bias_scale)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    fewer = parsed(run_path_chains, *flags, "--num_paths=4", "--inputs=gaussian")
    monkeypatch.setattr(
        run_path_chains.rc.paths,
        "sample_path_sets",
        lambda key, lengths, repeats, most, *_: jax.random.randint(key, (2, 3, most, 2), 0, 9),
    )
    *_, paths, sets = run_path_chains.draw(fewer, setup, key)
    assert paths.shape == (2, 4, 2) and sets.shape == (2, 3, 20, 2)


def test_another_text_is_another_run(monkeypatch):
    make, identify = opened_with(run_path_chains, monkeypatch, "options")
    assert make is run_path_chains.make_setup
    assert identify(SimpleNamespace(source={"text": "a"})) == {"text": "a"}
