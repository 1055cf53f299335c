"""What benchmarks time, and the figures that they make of the times, are kept as texts.

Nothing is compiled: outputs have the shapes of the traced functions, and numbers and seconds that
follow from the place of the case. The full tests run the functions and compare their outputs.
"""

import jax
import numpy as np
import pytest

from experiments import benchmark
from experiments.benchmarks import monitoring, path_benchmarks, profile_benchmarks, seed_benchmarks
from experiments.benchmarks.timing import Report, Timing
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds

TIMED = {
    "exact_paths": path_benchmarks.time_exact_paths,
    "head_contributions": path_benchmarks.time_head_contributions,
    "recomputed_paths": path_benchmarks.time_recomputed_paths,
    "collapse_sweep": profile_benchmarks.time_collapse_sweep,
    "log_profile": profile_benchmarks.time_log_profile,
    "exact_profile": profile_benchmarks.time_exact_profile,
    "monitor": monitoring.time_monitor,
}


def fill_output(shapes, place):
    """Fills the shapes of an output with numbers, which differ by the place of the case."""

    def fill(leaf):
        numbers = 1 + np.arange(leaf.size).reshape(leaf.shape) / max(1, leaf.size)
        return (numbers * (1 + place / 64)).astype(leaf.dtype)

    return jax.tree.map(fill, shapes)


def trace_cases(cases, rounds, make_figures):
    """Stands in for `compare_cases`: traces the functions instead of timing them."""
    assert rounds == 2
    timings = []
    for place, (name, (fn, arguments)) in enumerate(cases.items()):
        shapes = jax.eval_shape(fn, *arguments) if hasattr(fn, "lower") else fn(*arguments)
        seconds = [1.0 + place, 0.5 + 3 * place]
        timings.append(
            Timing(name, 0.25, seconds, 10**8 * (place + 1), 10**7, fill_output(shapes, place))
        )
    return Report(timings, make_figures(*timings))


def describe(report):
    for timing in report.timings:
        shapes = [leaf.shape for leaf in jax.tree.leaves(timing.output)]
        yield f"case {timing.name}: {shapes}"
    for name, (value, limit) in report.figures.items():
        yield f"{name} = {value:.5g}, limit {limit}"


@pytest.mark.parametrize("name", TIMED)
def test_golden_figures(name, golden, monkeypatch):
    for module in (path_benchmarks, profile_benchmarks, monitoring):
        monkeypatch.setattr(module, "compare_cases", trace_cases)
    report = TIMED[name](parse_two_rounds(), **benchmark.TINY[name])
    golden(f"benchmarks/{name}.txt", "\n".join(describe(report)))


def test_more_seeds_than_take_turns_are_one_call(monkeypatch):
    monkeypatch.setattr(profile_benchmarks, "compare_cases", trace_cases)
    monkeypatch.setattr(profile_benchmarks, "MOST_SEPARATE", 2)
    tiny = benchmark.TINY["collapse_sweep"]
    report = profile_benchmarks.time_collapse_sweep(parse_two_rounds(), num_seeds=3, **tiny)
    assert [timing.name for timing in report.timings] == ["one call, vmapped"]
    assert find_figure(report, "ms per seed, one call") == 1e3 * 0.5 / 3


SECONDS = {"one by one": 4.0, "vmap": 1.0, "map": 2.0, "processes": 8.0, "sweep": 3.0}


def test_figures_of_seeds_are_per_seed_and_step(monkeypatch, capsys):
    """Ways that take turns on a clock that goes on by the seconds of each."""
    clock, order = [0.0, 0.0], []

    def make_way(way, name, count, num_steps, **sizes):
        assert sizes == {"batch_size": 5} and num_steps == 4

        clock[0] += 100.0

        def call():
            order.append(way)
            speed = 4.0 if (way, count) == ("vmap", 2) else 1.0
            seconds = SECONDS[way] * speed * count
            clock[0] += seconds
            clock[1] += 2 * seconds
            return np.zeros((count, 4)), (0.5 if way == "processes" else None)

        return call

    class Product:
        def __init__(self, mesh):
            pass

        def measure_rate(self):
            return 1e6

    monkeypatch.setattr(seed_benchmarks, "make_way", make_way)
    monkeypatch.setattr(seed_benchmarks, "LargeProduct", Product)
    monkeypatch.setattr(seed_benchmarks, "count_flops", lambda program: 8e6)
    monkeypatch.setattr(seed_benchmarks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(seed_benchmarks.time, "process_time", lambda: clock[1])
    sizes = {"mlp": ((2, 3), 4)}
    report = seed_benchmarks.time_seeds(
        parse_two_rounds(), sizes, batch_size=5, arguments=("--depth=1",)
    )
    timings = {timing.name: timing for timing in report.timings}
    assert len(timings) == 2 * len(seed_benchmarks.WAYS)
    for way, seconds in SECONDS.items():
        for count in (2, 3):
            each = seconds * (4.0 if (way, count) == ("vmap", 2) else 1.0) / 4
            timing = timings[f"mlp, {count} seeds, {way}"]
            expected = 0.5 / 4 / count if way == "processes" else each
            assert timing.seconds == pytest.approx([expected] * 2)
            assert timing.compile_seconds == pytest.approx(100.0 + 4 * count * each)
            assert timing.output.shape == (count, 4)
            cpu = [v for n, (v, _) in report.figures.items() if n == f"CPU ms, {timing.name}"]
            assert cpu == pytest.approx([] if way == "processes" else [2e3 * each])
    for count, by_hand, ratio in ((2, "map", 1.5), (3, "vmap", 3.0)):
        for kind in ("wall", "CPU"):
            name = f"sweep over {by_hand} by hand, {kind} time of a round, mlp, {count} seeds"
            assert find_figure(report, name) == pytest.approx(ratio)
        best = min(t.best for n, t in timings.items() if f" {count} seeds" in n)
        share = find_figure(report, f"share of the large product's rate, mlp, {count} seeds")
        assert share == pytest.approx(2e6 / best / 1e6)
    assert find_figure(report, "seeds from which vmap is faster than map, mlp") == 3
    ways = list(seed_benchmarks.WAYS)
    assert order[: 3 * len(ways)] == [*ways, *ways, *reversed(ways)]  # a first call, two rounds
    assert "mlp, 2 seeds, map: 500 ms per seed and step" in capsys.readouterr().out


def test_a_way_that_does_not_fit_into_memory_is_left_out(monkeypatch, capsys):
    def make_way(way, *_, **__):
        if way == "vmap":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return lambda: (np.zeros((2, 1)), None)

    monkeypatch.setattr(seed_benchmarks, "make_way", make_way)
    measured = seed_benchmarks._time_ways(("vmap", "map"), "mlp", 2, 1, 3, "mlp, 2 seeds", {})
    assert list(measured) == ["map"] and len(measured["map"][1]) == 3
    assert "mlp, 2 seeds, vmap: does not fit into memory" in capsys.readouterr().out
