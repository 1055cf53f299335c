"""`sweep` beside loops written by hand at tiny size: all train the same seeds."""

from collections import Counter

import numpy as np

from experiments import benchmark
from experiments.benchmarks import sweep_overhead
from experiments.benchmarks.timing import Timing
from rank_collapse.training.engine.program import Program
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


def test_sweep_and_the_loops_by_hand_train_the_same_seeds(monkeypatch):
    """In one call, in several, and in several of which the last is shorter.

    Each training of `sweep`, the first and one a round, makes the calls that the case names.
    """
    calls, advance = [], Program.advance

    def advance_and_count(program, runs, stop):
        calls.append((runs.step, stop))
        return advance(program, runs, stop)

    monkeypatch.setattr(Program, "advance", advance_and_count)
    report = sweep_overhead.time_overhead(
        parse_two_rounds(), **benchmark.TINY["sweep_overhead"] | {"calls": (2, 5)}
    )
    losses = {timing.name: timing.output for timing in report.timings}
    whole = losses["8 steps in one call, by hand"]
    assert whole.shape == (2, 8) and len(np.unique(whole)) == 16
    assert len(losses) == 2 * (1 + 3 + 3)
    for name, output in losses.items():
        num_steps = int(name.partition(" ")[0])
        np.testing.assert_allclose(output, whole[:, :num_steps], rtol=1e-4, err_msg=name)
    cases = [(n, size) for n in (6, 8) for size in (2, 5, n)]
    wanted = [(s, min(s + size, n)) for n, size in cases for s in range(0, n, size)]
    assert Counter(calls) == Counter(3 * wanted)


def test_cases_take_turns_forwards_and_backwards_in_cpu_seconds(monkeypatch, capsys):
    """Making and a first call are compiling; every other round begins with the last case."""
    clock, order = [0.0], []
    monkeypatch.setattr(sweep_overhead.time, "process_time", lambda: clock[0])

    def make_way(way, seconds):
        def make(num_steps, size):
            clock[0] += 10.0

            def call():
                order.append((way, num_steps, size))
                clock[0] += seconds * num_steps / size
                return f"losses of {way}"

            return call

        return make

    ways = {"by hand": make_way("by hand", 1.0), "sweep": make_way("sweep", 2.0)}
    timings = sweep_overhead._time_cases(ways, [(4, 4), (6, 2)], 3)
    cases = [(way, *case) for case in ((4, 4), (6, 2)) for way in ways]
    assert order == [*cases, *cases, *cases[::-1], *cases]
    assert list(timings) == [(n, size, way) for way, n, size in cases]
    for (num_steps, size, way), timing in timings.items():
        seconds = (1.0 + (way == "sweep")) * num_steps / size
        assert (timing.compile_seconds, timing.seconds) == (10.0 + seconds, [seconds] * 3)
        assert timing.output == f"losses of {way}"
        assert timing.name == f"{sweep_overhead.describe_case(num_steps, size)}, {way}"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].strip() == "round 2 of 3: 1 s, 2 s, 3 s, 6 s of CPU" and len(lines) == 3


def test_the_limit_is_that_of_the_longest_training():
    report = sweep_overhead.time_overhead(parse_two_rounds(), **benchmark.TINY["sweep_overhead"])
    limits = {name: limit for name, (_, limit) in report.figures.items() if limit}
    assert limits == {"sweep over one call by hand, 8 steps in one call": sweep_overhead.LIMIT}
    median = {timing.name: np.median(timing.seconds) for timing in report.timings}
    for way in ("by hand", "sweep"):
        drawing = find_figure(report, f"CPU ms to draw the initial states, {way}")
        assert drawing == 1e3 * median[f"0 steps in one call, {way}"] > 0


def test_figures_are_medians_of_rounds_beside_one_call_by_hand():
    """Of three rounds in CPU seconds; a further call costs what many calls take over one."""
    seconds = {
        (0, 0): ([0.5, 0.25, 1.0], [2.0, 1.0, 0.75]),
        (4, 4): ([1.0, 1.0, 1.0], [3.0, 5.0, 4.0]),
        (8, 8): ([2.0, 4.0, 8.0], [2.0, 8.0, 8.0]),
        (8, 3): ([8.0, 5.0, 9.0], [3.0, 9.0, 9.5]),
    }
    timings = {
        (*case, way): Timing(way, 0.0, values)
        for case, pair in seconds.items()
        for way, values in zip(("by hand", "sweep"), pair, strict=True)
    }
    cases = [(4, 4), (8, 8), (8, 3)]
    figures = sweep_overhead._compare_ways(timings, cases)
    assert figures == {
        "sweep over one call by hand, 4 steps in one call": (4.0, None),
        "sweep over one call by hand, 8 steps in one call": (1.0, sweep_overhead.LIMIT),
        "sweep over one call by hand, 8 steps in calls of 3": (1.5, None),
    }
    figures = sweep_overhead._separate_costs(timings, 8, 3)
    assert figures == {
        "CPU ms to draw the initial states, by hand": (500.0, None),
        "CPU µs of a further call, by hand": (1e6 / 2, None),  # three calls
        "CPU ms to draw the initial states, sweep": (1000.0, None),
        "CPU µs of a further call, sweep": (1e6 / 2, None),
    }
