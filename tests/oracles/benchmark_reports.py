"""Options and figures of benchmarks at tiny size."""

from typing import Any

from experiments import benchmark
from experiments.benchmarks.timing import Report
from experiments.lab import cli


def parse_two_rounds(*flags: str) -> Any:
    """Parses the flags of a benchmark of two rounds, and others."""
    return cli.parse_flags(benchmark.FLAGS, ["--rounds=2", *flags])


def find_figure(report: Report, words: str) -> float:
    """Returns the value of the figure with these words in its name."""
    return next(v for name, (v, _) in report.figures.items() if words in name)
