"""Benchmarks of residual profiles at tiny size: what they time agrees."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import benchmark
from experiments.benchmarks import profile_benchmarks
from experiments.benchmarks.timing import Timing
from rank_collapse.runs.seeds import seed_keys
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds
from tests.support.closeness import assert_close


@pytest.mark.full
def test_profile_benchmarks_compare_what_is_equal():
    tiny = benchmark.TINY["collapse_sweep"]
    report = profile_benchmarks.time_collapse_sweep(parse_two_rounds(), num_seeds=3, **tiny)
    assert find_figure(report, "difference") < 1e-5
    single, vmapped, _ = report.timings
    for single_output, vmapped_output in zip(single.output[2], vmapped.output, strict=True):
        assert_close(single_output, vmapped_output[2], atol=1e-5)
    key = seed_keys(0, 3)[2]
    config = rc.san(tiny["depth"], 4, tiny["d_model"])
    x = jax.random.normal(jax.random.fold_in(key, 1), (tiny["num_tokens"], tiny["d_model"]))
    assert_close(
        rc.log_residual_profile(rc.init(key, config), x, config), vmapped.output[1][2], atol=1e-4
    )
    report = profile_benchmarks.time_log_profile(parse_two_rounds(), **tiny)
    assert find_figure(report, "forward passes") > 0
    report = profile_benchmarks.time_exact_profile(parse_two_rounds(), **tiny)
    assert find_figure(report, "difference") < 1e-2


def test_seeds_are_counted_in_the_faster_of_the_ways_together(monkeypatch):
    """Differences are relative to 1 and the numbers, and the largest of both profiles counts."""
    made, cases = [], []
    for name, stub in (  # little to compile
        ("init", lambda key, config: None),
        ("apply", lambda params, x, config: SimpleNamespace(hidden=x[None])),
        ("residual_ratio", lambda states: states[0, 0]),
        ("log_residual_profile", lambda params, x, config: x[0]),
    ):
        monkeypatch.setattr(profile_benchmarks.rc, name, stub)
    monkeypatch.setattr(
        profile_benchmarks, "compare_cases", lambda *a: made.append(a[2]) or cases.extend(a[0])
    )
    monkeypatch.setattr(profile_benchmarks, "MOST_SEPARATE", 2)
    profile_benchmarks.time_collapse_sweep(
        parse_two_rounds(), depth=1, num_tokens=2, d_model=4, num_seeds=2
    )
    assert len(cases) == 3  # as many seeds as may take turns
    base, other = (np.ones((2, 3)), np.full((2, 3), -3.0)), [np.ones((2, 3)), np.full((2, 3), -3.0)]
    other[1][1, 2] = -3.5
    timings = [
        Timing("", 0.0, seconds, output=output)
        for seconds, output in (([9.0], None), ([4.0, 3.0], other), ([2.0, 5.0], base))
    ]
    figures = made[0](*timings)
    assert figures["ms per seed, one call"] == (1000.0, None)
    (difference,) = (value for name, (value, _) in figures.items() if "difference" in name)
    assert difference == pytest.approx(0.5 / 4)
    timings[1].seconds = [1.0]
    assert made[0](*timings)["ms per seed, one call"] == (500.0, None)
