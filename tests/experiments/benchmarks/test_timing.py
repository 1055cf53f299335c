"""Timing: cases take turns, and numbers that are not finite."""

from types import SimpleNamespace

import numpy as np

from experiments.benchmarks import timing
from experiments.benchmarks.timing import Report, Timing, describe_report, median_ratio, time_cases


def test_numbers_that_are_not_finite_are_null():
    report = Report([Timing("a", 0.5, [1.0, 2.0])], {"crossover": (np.inf, None), "b": (2, 3.0)})
    assert describe_report("seeds", report) == {
        "benchmark": "seeds",
        "timings": [{"case": "a", "compile_seconds": 0.5, "seconds": [1.0, 2.0], "gigabytes": 0.0}],
        "figures": {"crossover": None, "b": 2.0},
    }


def test_cases_take_turns_and_say_so(capsys, monkeypatch):
    """Each call has ended before the clock is read."""
    order, ended = [], []
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda output: ended.append(len(order)))
    timings = time_cases({n: (order.append, (n,)) for n in "ab"}, rounds=3)
    assert "".join(order) == "ab" + 3 * "ab" and ended == list(range(1, 9))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "a",
        "b",
        *(f"round {number} of 3" for number in (1, 2, 3)),
    ]
    timings[0].seconds, timings[1].seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 1.0]
    assert median_ratio(*timings) == 3.0 and timings[0].best == 2.0


def test_a_jitted_case_is_compiled_before_and_its_memory_is_read(monkeypatch, capsys):
    """A function of the clock: compiling takes 4 s, a call 1 s, then 2, 3 s in the rounds."""
    clock, calls = [0.0], iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    class Compiled:
        def __call__(self, *arguments):
            assert arguments == (5, "b")
            clock[0] += next(calls)
            return np.float32(clock[0])

        def memory_analysis(self):
            return SimpleNamespace(temp_size_in_bytes=3e9, output_size_in_bytes=2e9)

    class Jitted:
        def lower(self, *arguments):
            assert arguments == (5, "b")
            clock[0] += 4.0
            return SimpleNamespace(compile=Compiled)

    (case,) = time_cases({"a": (Jitted(), (5, "b"))}, 2)
    assert (case.compile_seconds, case.seconds, case.output) == (4.0, [2.0, 3.0], 10.0)
    assert (case.temporary_bytes, case.output_bytes, case.gigabytes) == (3e9, 2e9, 5.0)
    assert capsys.readouterr().out.splitlines()[0] == "  a: first call 5.0 s, with compiling"


def test_a_case_is_compared_with_the_first():
    figures = []

    def make_figures(*timings):
        figures.extend(t.name for t in timings)
        return {"a": (1.0, None)}

    report = timing.compare_cases(dict.fromkeys("xy", (abs, (-1,))), 1, make_figures)
    assert figures == ["x", "y"] == [t.name for t in report.timings]
    assert report.figures == {"a": (1.0, None)} and report.timings[0].output == 1


def test_differences_are_relative_to_the_largest_of_each_array():
    """Infinities of one sign are equal; integers are not compared."""
    inf = np.inf
    reference = {"a": np.array([1.0, -4.0, inf]), "b": np.array([100.0]), "c": np.array([3])}
    values = {"a": np.array([1.0, -3.0, inf]), "b": np.array([110.0]), "c": np.array([9])}
    assert timing.largest_difference(values, reference) == 0.25
    assert timing.largest_difference(reference, reference) == 0
    assert timing.largest_difference(values | {"a": np.array([1.0, -3.0, -inf])}, reference) == inf


def test_a_report_has_ratios_to_the_first_case_and_its_limits(capsys):
    timings = [
        Timing("base", 1.5, [2.0, 4.0, 3.0]),
        Timing("other", 0.0, [1.0, 6.0, 3.0], 2_500_000),
    ]
    figures = {"fine": (1.0, 2.0), "slow": (3.0, 2.5), "free": (9.0, None)}
    assert timing.print_report(Report(timings, figures)) == ["slow = 3, limit 2.5"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["base", "2.0000", "3.0000", "1.00", "1.50", "0.0"]
    assert lines[2] == ["other", "1.0000", "3.0000", "1.00", "0.00", "2.5"]
    assert [" ".join(line) for line in lines[4:]] == [
        *("fine: 1 (limit 2)", "slow: 3 (limit 2.5)", "free: 9")
    ]
    timings[1].seconds = [1.0, 8.0, 3.0]
    assert timing.median_ratio(timings[1], timings[0]) == 1.0
