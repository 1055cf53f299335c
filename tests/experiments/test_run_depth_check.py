"""run_depth_check: slopes over depth at every learning rate, and what they are compared with."""

import numpy as np
import pytest
import xarray as xr

from experiments import run_depth_check
from experiments.verdicts import wording

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
    comparisons = list(run_depth_check.compare_results(make_results(), SETUP))
    powers = {c.quantity: c.measured for c in comparisons if "power of the depth" in c.quantity}
    assert len(powers) == 6
    (power,) = (v for q, v in powers.items() if "completep" in q.lower() and "0.003" in q)
    assert power == pytest.approx(-0.5, abs=0.02)
    assert run_depth_check.quantities_figure(make_results(), SETUP) is not None


def test_a_ratio_that_rounding_decides_is_a_bound():
    assert wording.show_ratio(1.4e-7) == "below 1e-06 (rounding)"
    assert wording.show_ratio(np.float32(0.25)) == 0.25
    assert wording.show_ratio(1.4e-7, np.float64) == 1.4e-7
