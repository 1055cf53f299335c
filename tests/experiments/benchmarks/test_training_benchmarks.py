"""Benchmarks of training runs at tiny size: what they time agrees."""

import pytest

from experiments.benchmarks import (
    torch_processes,
    training_benchmarks,
)
from experiments.benchmarks.timing import (
    median_ratio,
)
from experiments.lab import devices
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


@pytest.mark.full
@pytest.mark.parametrize("name", training_benchmarks.CASES)
def test_training_benchmarks_take_the_published_commands(name):
    tiny = training_benchmarks.TINY
    report = training_benchmarks.time_training(name, parse_two_rounds(), tiny)
    (ours,) = report.timings
    assert ours.compile_seconds > 0 and len(ours.seconds) == 2
    assert find_figure(report, "ms per seed") == 1e3 * min(ours.seconds)


@pytest.mark.full
def test_every_way_of_pytorch_is_timed_in_the_same_rounds(capsys):
    pytest.importorskip("torch")
    options = parse_two_rounds("--baseline=torch")
    report = training_benchmarks.time_training(
        "sort", options, training_benchmarks.TINY, num_seeds=3
    )
    names = [way.name for way in torch_processes.list_ways(devices.count_cores(), 3)]
    assert [timing.name for timing in report.timings[:-1]] == names
    assert all(len(timing.seconds) == 2 and timing.best > 0 for timing in report.timings)
    *baselines, ours = report.timings
    times_faster = find_figure(report, "times faster than the best of PyTorch")
    assert times_faster == min(1 / median_ratio(ours, timing) for timing in baselines)
    assert 0 < find_figure(report, "share of that rate") < 1
