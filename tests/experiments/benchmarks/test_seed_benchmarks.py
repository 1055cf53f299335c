"""Benchmarks of seeds at tiny size: what they time agrees."""

from types import SimpleNamespace

import numpy as np
import pytest

from experiments.benchmarks import seed_benchmarks
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


@pytest.mark.full
@pytest.mark.parametrize("name", seed_benchmarks.SIZES)
def test_every_way_trains_the_same_seeds(name):
    """Tiny networks; a process for each seed gives the losses of its seed too."""
    sizes = {"sizes": {name: seed_benchmarks.TINY["sizes"][name]}}
    report = seed_benchmarks.time_seeds(parse_two_rounds(), **seed_benchmarks.TINY | sizes)
    ways = {timing.name.rpartition(", ")[2]: timing for timing in report.timings}
    assert list(ways) == list(seed_benchmarks.WAYS) and all(
        len(t.seconds) == 2 for t in ways.values()
    )
    expected = ways["one by one"].output
    assert expected.shape == (3, 4) and len(np.unique(expected[:, 0])) == 3
    assert 0 < find_figure(report, "share of the large product's rate") < 1
    for timing in ways.values():
        rows = len(timing.output)
        np.testing.assert_allclose(timing.output, expected[:rows], rtol=1e-3)
    for kind in ("wall", "CPU"):
        (ratio,) = [v for n, (v, _) in report.figures.items() if f"by hand, {kind} time" in n]
        assert ratio > 0
    assert find_figure(report, "seeds from which vmap is faster") in (3, np.inf)


def test_seeds_that_find_no_free_core_wait_for_another_turn(monkeypatch):
    """Five seeds on two cores take three turns, each as long as its slowest process."""
    seconds = {"0": "2.0 8.5 8.25", "1": "3.0 7.5 7.25"}

    def start(command, env, **_):
        line = seconds[env["BENCHMARK_SEED"]]
        return SimpleNamespace(communicate=lambda: (line, None))

    monkeypatch.setattr(seed_benchmarks, "count_cores", lambda: 2)
    monkeypatch.setattr(seed_benchmarks.subprocess, "Popen", start)
    losses, needed = seed_benchmarks._train_processes("mlp", 5, 2, {})
    assert needed == 9 and losses.tolist() == [[8.5, 8.25], [7.5, 7.25]]


@pytest.mark.parametrize("callers", ["", "--xla_cpu_multi_thread_eigen=true --xla_dump_to=here"])
def test_a_process_trains_its_seed_on_one_thread_whatever_the_caller_has_set(monkeypatch, callers):
    """XLA takes the last of two flags; the caller's other flags and variables are kept."""
    monkeypatch.setenv("XLA_FLAGS", callers)
    monkeypatch.setenv("BENCHMARK_SEED", "7")
    monkeypatch.setenv("ANOTHER", "kept")
    started = []

    def start(command, env, **_):
        started.append((command, env))
        return SimpleNamespace(communicate=lambda: ("1.0 2.0", None))

    monkeypatch.setattr(seed_benchmarks, "count_cores", lambda: 3)
    monkeypatch.setattr(seed_benchmarks.subprocess, "Popen", start)
    seed_benchmarks._train_processes("cnn", 9, 5, {"batch_size": 2})
    assert [env["BENCHMARK_SEED"] for _, env in started] == ["0", "1", "2"]
    for command, env in started:
        assert command[2].endswith("run_alone('cnn', 5, {'batch_size': 2})")
        assert env["XLA_FLAGS"].split() == [*callers.split(), "--xla_cpu_multi_thread_eigen=false"]
        assert env["ANOTHER"] == "kept"


def test_each_step_of_the_sorting_network_reads_the_next_rows(monkeypatch):
    """Behind the last row the first one follows."""
    recipe = SimpleNamespace(name="recipe")
    monkeypatch.setattr(seed_benchmarks, "make_case", lambda name, _: (recipe, None, 3))
    monkeypatch.setattr(
        seed_benchmarks, "train_step", lambda state, batch, *_: (state + 1, batch.tolist())
    )
    _, step = seed_benchmarks._make_sort({})
    state, read = (0, np.arange(10, 17)), []
    for index in range(4):
        state, scalars = step(state, {}, index)
        read.append(scalars["loss"])
    assert read == [[10, 11, 12], [13, 14, 15], [16, 10, 11], [12, 13, 14]] and state[0] == 4
