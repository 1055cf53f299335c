"""Timing: cases take turns, and numbers that are not finite."""

import numpy as np

from experiments.benchmarks.timing import Report, Timing, describe_report, median_ratio, time_cases


def test_numbers_that_are_not_finite_are_null():
    report = Report([Timing("a", 0.5, [1.0, 2.0])], {"crossover": (np.inf, None), "b": (2, 3.0)})
    assert describe_report("seeds", report) == {
        "benchmark": "seeds",
        "timings": [{"case": "a", "compile_seconds": 0.5, "seconds": [1.0, 2.0], "gigabytes": 0.0}],
        "figures": {"crossover": None, "b": 2.0},
    }


def test_cases_take_turns_and_say_so(capsys):
    order = []
    timings = time_cases({n: (order.append, (n,)) for n in "ab"}, rounds=3)
    assert "".join(order) == "ab" + 3 * "ab"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "a",
        "b",
        *(f"round {number} of 3" for number in (1, 2, 3)),
    ]
    timings[0].seconds, timings[1].seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 1.0]
    assert median_ratio(*timings) == 3.0 and timings[0].best == 2.0
