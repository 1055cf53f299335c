"""Benchmarks of residual profiles at tiny size: what they time agrees."""

import jax
import pytest

import rank_collapse as rc
from experiments import benchmark
from experiments.benchmarks import profile_benchmarks
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
