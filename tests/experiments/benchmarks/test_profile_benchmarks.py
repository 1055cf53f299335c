"""Benchmarks of residual profiles at tiny size: what they time agrees."""

import pytest

from experiments import benchmark
from experiments.benchmarks import (
    profile_benchmarks,
)
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
    report = profile_benchmarks.time_log_profile(parse_two_rounds(), **tiny)
    assert find_figure(report, "forward passes") > 0
    report = profile_benchmarks.time_exact_profile(parse_two_rounds(), **tiny)
    assert find_figure(report, "difference") < 1e-2
