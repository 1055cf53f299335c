"""Benchmarks of seeds at tiny size: what they time agrees."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import seed_benchmarks
from rank_collapse.runs.seeds import seed_keys
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
    del seconds["1"]
    losses, needed = seed_benchmarks._train_processes("mlp", 1, 2, {})  # no more than the seeds
    assert needed == 2 and losses.tolist() == [[8.5, 8.25]]
    seconds["1"] = "3.0 7.5 7.25"
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
    """Behind the last row the first one follows. Weights and examples have keys of their own."""
    recipe, asked = SimpleNamespace(name="recipe"), []

    def make_case(name, arguments):
        asked.append((name, arguments))
        return recipe, lambda key: {"train": ("examples", key), "eval": None}, 3

    def train_step(state, batch, counts, index, *others):
        assert counts.tolist() == [True] * 3 and index == state
        asked.append(others)
        return state + 1, batch.tolist()

    monkeypatch.setattr(seed_benchmarks, "make_case", make_case)
    monkeypatch.setattr(seed_benchmarks, "train_step", train_step)
    monkeypatch.setattr(seed_benchmarks, "init_state", lambda key, *others: (key, others))
    init, step = seed_benchmarks._make_sort(["--depth=1"])
    (key_state, (hyper, chosen_recipe)), (_, key_data) = init(jax.random.key(3), {})
    keys = [tuple(jax.random.key_data(k).tolist()) for k in jax.random.split(jax.random.key(3))]
    drawn = [tuple(jax.random.key_data(k).tolist()) for k in (key_data, key_state)]
    assert drawn == keys and chosen_recipe is recipe
    assert (float(hyper.learning_rate), hyper.dropout) == (np.float32(1e-3), 0.1)
    state, read = (0, np.arange(10, 17)), []
    for index in range(4):
        state, scalars = step(state, {}, index)
        read.append(scalars["loss"])
    assert read == [[10, 11, 12], [13, 14, 15], [16, 10, 11], [12, 13, 14]] and state[0] == 4
    assert asked == [("sort", ["--depth=1"])] + 4 * [(1.0, hyper, recipe)]


def make_counter(name, **sizes):
    """Makes a network that is one number, which grows by 1 in each step."""
    assert (name, sizes) == ("mlp", {"batch_size": 2})

    def step(state, hyper, index):
        return state + 1, {"loss": state + 100 * index}

    return lambda key, hyper: jax.random.uniform(key), step


def compute_counts(seed):
    """Computes four losses of a seed of that network."""
    return float(jax.random.uniform(seed_keys(0, seed + 1)[seed])) + 101.0 * np.arange(4)


def test_ways_by_hand_train_all_seeds_and_the_others_get_the_same_sizes(monkeypatch):
    monkeypatch.setattr(seed_benchmarks, "make_network", make_counter)
    asked = []

    def make_sweep(*arguments):
        asked.append(arguments[2:])
        return lambda: "losses of sweep"

    monkeypatch.setattr(seed_benchmarks, "make_sweep", make_sweep)
    monkeypatch.setattr(seed_benchmarks, "_train_processes", lambda *a: (a, 7.0))
    calls = {
        way: seed_benchmarks.make_way(way, "mlp", 3, 4, batch_size=2)
        for way in seed_benchmarks.WAYS
    }
    expected = [compute_counts(seed) for seed in range(3)]
    for way in ("vmap", "map", "one by one"):
        losses, seconds = calls[way]()
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert seconds is None
    assert calls["sweep"]() == ("losses of sweep", None) and asked == [(3, 4, 4)]
    assert calls["processes"]() == (("mlp", 3, 4, {"batch_size": 2}), 7.0)


def test_a_process_prints_the_seconds_of_its_second_run_and_its_losses(monkeypatch, capsys):
    clock, order = iter([10.0, 12.5]), []

    def make_noted(name, **sizes):
        init, step = make_counter(name, **sizes)
        return lambda *arguments: order.append("traced") or init(*arguments), step

    monkeypatch.setattr(seed_benchmarks, "make_network", make_noted)
    monkeypatch.setattr(
        seed_benchmarks.time, "perf_counter", lambda: order.append("clock") or next(clock)
    )
    monkeypatch.setenv("BENCHMARK_SEED", "2")
    seed_benchmarks.run_alone("mlp", 4, {"batch_size": 2})
    seconds, *losses = map(float, capsys.readouterr().out.split())
    assert seconds == 2.5 and order == ["traced", "clock", "clock"]
    np.testing.assert_allclose(losses, compute_counts(2), rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_step_of_a_network_is_gradient_descent_on_its_cross_entropy(name):
    """Beside NumPy: the loss, and the slope of the last weights, (p − y) times what they read."""
    init, step = seed_benchmarks.make_network(name, batch_size=2)
    shape = (64, 32) if name == "mlp" else (2, 32, 32, 3)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 10, len(x))
    first, last = map(np.asarray, init(jax.random.key(0), {}))
    if name == "mlp":
        assert first.shape == (32, 64)
        hidden = np.tanh(x @ first)
    else:
        assert first.shape == (3, 3, 3, 64)
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = (
            padded[:, i : i + 32, j : j + 32] @ first[i, j] for i in range(3) for j in range(3)
        )
        hidden = np.maximum(sum(windows), 0).reshape(2, -1)
    assert last.shape == (hidden.shape[1], 10)
    logits = hidden @ last
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    state, metrics = jax.jit(step)((first, last), {}, jnp.int32(0))
    loss = -np.log(p[np.arange(len(x)), labels]).mean()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    slope = hidden.T @ (p - np.eye(10)[labels]) / len(x)
    np.testing.assert_allclose(
        (last - state[1]) / seed_benchmarks.RATE, slope, rtol=1e-2, atol=1e-3
    )
    assert np.abs(state[0] - first).max() > 0


@pytest.mark.parametrize("is_on_host", [True, False])
def test_figures_of_seeds_follow_from_the_rounds_of_all_ways(is_on_host, monkeypatch, capsys):
    """Seconds are per seed and step; vmap is faster than map from the first such number on."""
    asked = []

    def time_ways(ways, name, count, num_steps, rounds, case, arguments):
        asked.append((ways, name, count, num_steps, rounds, arguments))
        per_seed = {"sweep": 3.0, "vmap": 8.0 / count, "map": 1.5, "one by one": 2.0}
        measured = {}
        for way in ways:
            seconds = per_seed.get(way, 9.0) * count
            timing = seed_benchmarks.Timing(f"{case}, {way}", 1.0)
            measured[way] = timing, [2 * seconds, seconds, seconds], [3 * seconds] * 3
        return measured

    numbers = {"mlp": ((2, 4, 8, 128), 5), "sort": ((2,), 10)}
    for name, stub in (
        ("seed_mesh", lambda: "mesh"),
        ("is_on_cpu", lambda mesh: is_on_host),
        ("LargeProduct", lambda mesh: SimpleNamespace(measure_rate=lambda: 40.0)),
        ("make_network", lambda name, **arguments: (name, name)),
        ("train_one", lambda init, step, num_steps, key: key),
        ("count_flops", lambda program: 60.0),
        ("_time_ways", time_ways),
        ("ACCELERATOR_SEEDS", (1, 128)),
    ):
        monkeypatch.setattr(seed_benchmarks, name, stub)
    options = SimpleNamespace(rounds=3)
    network = {"arguments": ["--depth=1"], "batch_size": 2}
    report = seed_benchmarks.time_seeds(options, numbers, **network)
    counts = {name: size[0] if is_on_host else (1, 128) for name, size in numbers.items()}
    most = {} if is_on_host else {"map": 64, "one by one": 16, "processes": 0}
    ways = {
        count: [way for way in seed_benchmarks.WAYS if count <= most.get(way, count)]
        for count in {n for numbers in counts.values() for n in numbers}
    }
    arguments = {"mlp": {"batch_size": 2}, "sort": {"arguments": ["--depth=1"]}}
    assert asked == [
        (ways[count], name, count, numbers[name][1], 3, arguments[name])
        for name in numbers
        for count in counts[name]
    ]
    assert ways[128] == ([*seed_benchmarks.WAYS] if is_on_host else ["sweep", "vmap"])
    figures = {name: value for name, (value, _) in report.figures.items()}
    crossover = {"mlp": 8, "sort": np.inf} if is_on_host else {"mlp": np.inf, "sort": np.inf}
    for name, (_, num_steps) in numbers.items():
        assert figures[f"seeds from which vmap is faster than map, {name}"] == crossover[name]
        for count in counts[name]:
            case = f"{name}, {count} seeds"
            by_hand = "vmap" if count > 5 else "map"
            fastest = min(8.0 / count, 1.5 if "map" in ways[count] else np.inf)
            ratio = 3.0 / fastest
            start = f"sweep over {by_hand} by hand"
            for kind in ("wall", "CPU"):
                name_of = f"{start}, {kind} time of a round, {case}"
                assert figures[name_of] == pytest.approx(ratio)
            share = 60.0 / num_steps / (fastest / num_steps) / 40.0
            name_of = f"share of the large product's rate, {case}, the fastest way"
            assert figures[name_of] == pytest.approx(share)
            assert figures[f"CPU ms, {case}, sweep"] == pytest.approx(9e3 / num_steps)
    assert not any("CPU ms" in name and "processes" in name for name in figures)
    timing = report.timings[0]
    assert timing.name == f"mlp, {counts['mlp'][0]} seeds, sweep"
    assert timing.seconds == pytest.approx([6.0 / 5, 3.0 / 5, 3.0 / 5])
    assert f"{timing.name}: 600 ms per seed and step" in capsys.readouterr().out
    asked.clear()
    seed_benchmarks.time_seeds(options, numbers, (3, 7), **network)
    assert [(name, count) for _, name, count, *_ in asked] == [
        (name, count) for name in numbers for count in (3, 7)
    ]


def test_a_way_that_does_not_fit_into_memory_is_left_out(monkeypatch, capsys):
    """Another error of XLA is not hidden; every other round goes in reverse order."""
    errors, order = {"vmap": "RESOURCE_EXHAUSTED: 9 GB"}, []

    def make_way(way, name, count, num_steps, **arguments):
        assert (name, count, num_steps, arguments) == ("mlp", 3, 5, {"batch_size": 2})
        if way in errors:
            raise jax.errors.JaxRuntimeError(errors[way])

        def call():
            order.append(way)
            return "losses", 2.5 if way == "processes" else None

        return call

    monkeypatch.setattr(seed_benchmarks, "make_way", make_way)
    ways = ["sweep", "vmap", "map", "processes"]
    time = lambda: seed_benchmarks._time_ways(  # noqa: E731
        ways, "mlp", 3, 5, 2, "mlp, 3 seeds", {"batch_size": 2}
    )
    measured = time()
    assert [*measured] == ["sweep", "map", "processes"]
    assert measured["processes"][1] == [2.5, 2.5] and 0 <= min(measured["map"][1]) < 2
    assert order == 2 * ["sweep", "map", "processes"] + ["processes", "map", "sweep"]
    assert "mlp, 3 seeds, vmap: does not fit into memory" in capsys.readouterr().out
    errors["map"] = "INTERNAL: a bug"
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        time()
