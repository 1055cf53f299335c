"""Timing of cases in turn, and the report of a benchmark."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from experiments.lab.progress import report_activity


@dataclass
class Timing:
    """One case of a benchmark.

    Attributes:
        name: Name of the case.
        compile_seconds: Tracing and compilation; 0 where there is none.
        seconds: Seconds by round, in order.
        temporary_bytes: Bytes that the compiled program allocates in addition to arguments and
            results.
        output_bytes: Size of the results.
        output: The results of the last round.
    """

    name: str
    compile_seconds: float
    seconds: list[float] = field(default_factory=list)
    temporary_bytes: int = 0
    output_bytes: int = 0
    output: PyTree[Array] = None

    @property
    def best(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def gigabytes(self) -> float:
        """Gigabytes of results and temporary allocations, without the arguments."""
        return (self.temporary_bytes + self.output_bytes) / 1e9


@dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    Attributes:
        timings: All cases; ratios refer to the first.
        figures: Further numbers by name: (value, limit or None); a value above it is a failure.
    """

    timings: Sequence[Timing]
    figures: Mapping[str, tuple[float, float | None]]


def say(line: str) -> None:
    """Prints a line immediately, even if the output is a file."""
    print(f"  {line}", flush=True)


def time_cases(cases: Mapping[str, tuple[Callable, tuple]], rounds: int) -> list[Timing]:
    """Measures the time of functions in turn, round after round; prints each time at once.

    Args:
        cases: {name: (function, its arguments)}; a jitted function is compiled before, any other
            function (a PyTorch step) is called directly.
        rounds: Each case runs once a round, after one warm-up call.
    """
    timings, calls = [], []
    for name, (fn, args) in cases.items():
        start = time.perf_counter()
        timing = Timing(name, 0.0)
        if hasattr(fn, "lower"):
            fn = fn.lower(*args).compile()
            timing.compile_seconds = time.perf_counter() - start
            memory = fn.memory_analysis()
            timing.temporary_bytes = memory.temp_size_in_bytes
            timing.output_bytes = memory.output_size_in_bytes
        with report_activity(f"  {name}: first call"):
            jax.block_until_ready(fn(*args))
        say(f"{name}: first call {time.perf_counter() - start:.1f} s, with compiling")
        timings.append(timing)
        calls.append((fn, args))
    for number in range(rounds):
        for timing, (fn, args) in zip(timings, calls, strict=True):
            with report_activity(f"  {timing.name}: round {number + 1} of {rounds}"):
                start = time.perf_counter()
                timing.output = jax.block_until_ready(fn(*args))
                timing.seconds.append(time.perf_counter() - start)
        say(describe_round(timings, number, rounds))
    return timings


def describe_round(timings: Sequence[Timing], number: int, rounds: int) -> str:
    """Writes the seconds of a round: "round 1 of 5: 0.12 s, 0.34 s".

    Args:
        timings: Timings of all cases.
        number: Number of the round, from 0.
        rounds: Number of rounds.
    """
    seconds = ", ".join(f"{timing.seconds[number]:.3g} s" for timing in timings)
    return f"round {number + 1} of {rounds}: {seconds}"


def compare_cases(
    cases: Mapping[str, tuple[Callable, tuple]],
    rounds: int,
    make_figures: Callable[..., Mapping[str, tuple[float, float | None]]],
) -> Report:
    """Measures the time of cases in turn; the first case is the baseline.

    Args:
        cases, rounds: See `time_cases`.
        make_figures: Timings of all cases → further numbers.
    """
    timings = time_cases(cases, rounds)
    return Report(timings, make_figures(*timings))


def largest_difference(values: PyTree[Array], reference: PyTree[Array]) -> float:
    """Computes the largest difference of two trees, relative to each array's largest value.

    Args:
        values, reference: Trees of arrays; infinities of one sign are equal.
    """

    def relative_difference(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        differences = np.abs(a[a != b] - b[a != b])
        return np.max(differences, initial=0) / np.max(np.abs(b[np.isfinite(b)]), initial=1e-300)

    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(reference), strict=True)
    floats = [(a, b) for a, b in pairs if np.issubdtype(b.dtype, np.floating)]
    return float(np.max([relative_difference(a, b) for a, b in floats]))


def median_ratio(timing: Timing, baseline: Timing) -> float:
    """Computes the median over rounds of the ratio of two cases timed in the same round."""
    return float(np.median(np.array(timing.seconds) / np.array(baseline.seconds)))


def print_report(report: Report) -> list[str]:
    """Prints one benchmark; returns the figures above their limits."""
    baseline = report.timings[0]
    heads = ("case", "best s", "median s", "ratio", "compile s", "temporary MB")
    print("  {:44s} {:>9s} {:>9s} {:>7s} {:>10s} {:>13s}".format(*heads))
    for t in report.timings:
        print(
            f"  {t.name:44s} {t.best:9.4f} {np.median(t.seconds):9.4f} "
            f"{median_ratio(t, baseline):7.2f} {t.compile_seconds:10.2f} "
            f"{t.temporary_bytes / 1e6:13.1f}"
        )
    print(f"  ratios: median over rounds, to {baseline.name!r} in the same round")
    failures = []
    for name, (value, limit) in report.figures.items():
        say(f"{name}: {value:.4g}" + ("" if limit is None else f" (limit {limit:g})"))
        if limit is not None and not value <= limit:
            failures.append(f"{name} = {value:.4g}, limit {limit:g}")
    return failures


def describe_report(name: str, report: Report) -> dict[str, Any]:
    """Describes one benchmark as JSON stores it; numbers that are not finite are None.

    Args:
        name: Name of the benchmark.
        report: Result of the benchmark.
    """
    timings = [
        {
            "case": t.name,
            "compile_seconds": t.compile_seconds,
            "seconds": t.seconds,
            "gigabytes": t.gigabytes,
        }
        for t in report.timings
    ]
    figures = {
        figure: float(value) if np.isfinite(value) else None
        for figure, (value, _) in report.figures.items()
    }
    return {"benchmark": name, "timings": timings, "figures": figures}
