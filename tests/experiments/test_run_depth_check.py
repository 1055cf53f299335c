"""run_depth_check: slopes over depth at every learning rate, and what they are compared with."""

import numpy as np
import pytest
import xarray as xr

from experiments import run_depth_check
from rank_collapse.report.wording import describe_value

SETUP = run_depth_check.Setup(None, np.zeros(1, np.uint8), "a text")
RATES = (1e-4, 1e-3, 3e-3)
SLOPES = {"mup": (-0.1, -0.5, -0.7), "completep": (-0.2, 0.1, -0.5)}


def make_results():
    """Networks whose residual ratio goes with `SLOPES` of the depth at the last step."""
    depths, noise = np.array(run_depth_check.DEPTHS), np.random.default_rng(0)
    slopes = np.array([*SLOPES.values()])[:, :, None, None, None, None]
    ratios = depths[:, None, None, None] ** slopes * np.ones((2, 3, 6, 1, 8, 2))
    ratios *= np.exp(0.01 * noise.standard_normal(ratios.shape))
    axes = {
        "rule": [*SLOPES],
        "learning_rate": [*RATES],
        "depth": depths,
        "d_model": [64],
        "seed": np.arange(8),
        "step": [1, 10],
    }
    values = xr.DataArray(ratios, axes, [*axes])
    names = ("stream", "residual_ratio", "linearisation", "loss")
    return xr.Dataset(dict.fromkeys(names, values))


def test_tokens_are_asked_at_every_learning_rate():
    rows = list(run_depth_check.judge_claims(make_results(), SETUP))
    for key, rule in (("depth tokens", "mup"), ("depth tokens completep", "completep")):
        rule_rows = [row for row in rows if row.key == key]
        settings = [f"a text, learning rate {rate:g}" for rate in RATES]
        assert [row.setting for row in rule_rows] == settings
        assert [row.estimate for row in rule_rows] == pytest.approx(SLOPES[rule], abs=0.02)
    cure = [row.estimate for row in rows if row.key == "depth cure"]
    assert cure == pytest.approx(np.subtract(SLOPES["completep"], SLOPES["mup"]), abs=0.02)


def test_the_published_figure_is_compared_at_one_rate():
    rows = list(run_depth_check.judge_claims(make_results(), SETUP))
    assert sum(row.key == "depth growth" for row in rows) == 4  # two rules, two steps
    comparisons = list(run_depth_check.compare_results(make_results()))
    powers = {c.quantity: c.measured for c in comparisons if "power of the depth" in c.quantity}
    assert len(powers) == 6
    (power,) = (v for q, v in powers.items() if "completep" in q.lower() and "0.003" in q)
    assert power == pytest.approx(-0.5, abs=0.02)
    assert run_depth_check.quantities_figure(make_results()) is not None


def test_the_figure_shows_the_largest_width_at_the_rate_of_its_title():
    """Widths and depths in the order of the flags: 64 before 32, 64 layers before 2."""
    narrow = make_results()
    wide = (10 * narrow).assign_coords(d_model=[128])
    results = xr.concat([wide, narrow], "d_model").isel(depth=slice(None, None, -1))
    fig = run_depth_check.quantities_figure(results)
    assert fig.get_suptitle() == "width 128, learning rate 0.001"
    lines = {line.get_label(): line for line in fig.axes[0].lines}
    for rule in SLOPES:
        name = describe_value("rule", rule)
        values = results.stream.sel(rule=rule, learning_rate=1e-3, d_model=128, step=10)
        expected = np.exp(np.log(values.sortby("depth")).mean("seed"))
        line = next(line for label, line in lines.items() if label == f"{name} last step")
        np.testing.assert_array_equal(line.get_xdata(), sorted(run_depth_check.DEPTHS))
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-6)


def test_without_the_published_rate_nothing_is_compared_with_the_figure():
    results = make_results().sel(learning_rate=[1e-4, 3e-3])
    keys = {row.key for row in run_depth_check.judge_claims(results, SETUP)}
    assert "depth growth" not in keys and "depth tokens" in keys
    comparisons = list(run_depth_check.compare_results(results))
    assert comparisons and all(c.published is None for c in comparisons)
    fig = run_depth_check.quantities_figure(results)
    assert fig.get_suptitle() == "width 64, learning rate 0.0001"


def test_the_loss_is_of_the_deepest_network_in_any_order():
    results = make_results().isel(depth=slice(None, None, -1))
    losses = {
        c.quantity: c.measured
        for c in run_depth_check.compare_results(results)
        if "loss" in c.quantity
    }
    deepest = results.loss.sel(depth=max(run_depth_check.DEPTHS), step=10).mean("seed")
    assert [*losses.values()] == pytest.approx(deepest.values.ravel().tolist())
