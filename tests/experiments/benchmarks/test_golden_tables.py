"""What a benchmark prints, its line of JSON, and the tables of the pages are kept as texts."""

import json

import numpy as np

from experiments.benchmarks import device_pages
from experiments.benchmarks.timing import Report, Timing, describe_report, print_report

REPORTS = {
    "products": Report([Timing("float32", 0.0, [2.0, 1.0])], {"TFLOP/s": (3.25, None)}),
    "seeds, sort": Report(
        [
            Timing("one by one", 1.25, [0.3, 0.1, 0.2], temporary_bytes=3_000_000, gigabytes=2.5),
            Timing("by vmap", 2.5, [0.06, 0.04, 0.05], gigabytes=123.0),
        ],
        {"CPU ms per seed": (5.0, None), "times faster": (4.0, 5.0), "crossover": (np.inf, None)},
    ),
}
MACHINE = {"date": "2031-04-17", "device": "gpu H200 x 1", "cores": 16, "jax": "0.10.2"}


def test_golden_lines_of_benchmarks(golden, capsys):
    for name, report in REPORTS.items():
        print(f"{name}: over the limit {print_report(report)}")
        print(json.dumps(describe_report(name, report), indent=1))
    golden("benchmarks/printed.txt", capsys.readouterr().out)


def test_golden_tables_of_a_device(golden):
    speed = [
        json.loads(json.dumps({"machine": MACHINE} | describe_report(name, report)))
        for name, report in REPORTS.items()
    ]
    steps = [
        {"step": "tests", "driver": "580.1", "last_line": "3 passed, 1 skipped in 4.2s"},
        {"step": "speed", "driver": None, "last_line": ""},
    ]
    differences = [
        device_pages.Difference("run_sort", 51, 40, 1.5e-6, "loss"),
        device_pages.Difference("run_width", 6, 6, 0.0, ""),
    ]
    golden("benchmarks/tables.md", device_pages.make_tables(speed, steps, differences))
