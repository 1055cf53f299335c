"""Benchmarks of path sums at tiny size: what they time agrees."""

import pytest

from experiments import benchmark
from experiments.benchmarks import (
    path_benchmarks,
)
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


@pytest.mark.full
def test_path_benchmarks_compare_what_is_equal():
    report = path_benchmarks.time_exact_paths(parse_two_rounds(), **benchmark.TINY["exact_paths"])
    assert all(len(t.seconds) == 2 and t.compile_seconds > 0 for t in report.timings)
    assert 0 <= find_figure(report, "Frobenius") < 1e-5
    report = path_benchmarks.time_head_contributions(
        parse_two_rounds(), **benchmark.TINY["head_contributions"]
    )
    assert report.timings[0].output.shape == (2, 2, 4, 8)
    report = path_benchmarks.time_recomputed_paths(parse_two_rounds(), depth=2, num_sequences=3)
    assert find_figure(report, "difference") < 1e-5
