"""The benchmarks at tiny size: what they time agrees, and a figure above its limit fails."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments import benchmark
from experiments.benchmarks import paths, profiles, training
from experiments.benchmarks.timing import Report, Timing, median_ratio, time_cases
from experiments.lab import cli
from rank_collapse.training.training import Hyper, init_model


@pytest.fixture
def options():
    return cli.parse_flags(benchmark.FLAGS, ["--rounds=2", "--num_seeds=3"])


def find_figure(report, words):
    return next(v for name, (v, _) in report.figures.items() if words in name)


@pytest.mark.full
def test_path_benchmarks_compare_what_is_equal(options):
    config = rc.transformer(depth=2, num_heads=2, d_model=8)
    report = paths.time_exact_paths(options, config, num_tokens=4)
    assert all(len(t.seconds) == 2 and t.compile_seconds > 0 for t in report.timings)
    assert 0 <= find_figure(report, "Frobenius") < 1e-5
    report = paths.time_head_contributions(options, config, num_tokens=4)
    assert report.timings[0].output.shape == (2, 2, 4, 8)
    report = paths.time_recomputed_paths(options, depth=2, num_sequences=3)
    assert find_figure(report, "difference") < 1e-5


@pytest.mark.full
def test_profile_benchmarks_compare_what_is_equal(options):
    report = profiles.time_collapse_sweep(options, depth=2, num_tokens=4, d_model=8)
    assert find_figure(report, "difference") < 1e-5
    single, vmapped, _ = report.timings
    for single_output, vmapped_output in zip(single.output[2], vmapped.output, strict=True):
        np.testing.assert_allclose(single_output, vmapped_output[2], atol=1e-5)
    report = profiles.time_log_profile(options, depth=2, num_tokens=4, d_model=8)
    assert find_figure(report, "forward passes") > 0
    report = profiles.time_exact_profile(options, depth=2, num_tokens=4, d_model=8)
    assert find_figure(report, "difference") < 1e-2


@pytest.mark.full
@pytest.mark.parametrize("name", training.CASES)
def test_training_benchmarks_take_the_published_commands(options, name):
    (ours,) = (report := training.time_training(name, options, training.TINY)).timings
    assert ours.compile_seconds > 0 and len(ours.seconds) == 2
    assert find_figure(report, "ms per seed") == 1e3 * min(ours.seconds)


@pytest.mark.full
def test_pytorch_trains_a_network_of_as_many_parameters_and_learns():
    pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    for name in [name for name, (_, _, target) in training.CASES.items() if target]:
        recipe, make_data, _ = training.make_case(name, training.TINY)
        shapes = jax.eval_shape(lambda recipe=recipe: init_model(jax.random.key(0), recipe))
        values = Hyper(learning_rate=1e-2, dropout=0.0)
        baseline = torch_baseline.Training(recipe, make_data(jax.random.key(0))["train"], values)
        ours = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert sum(p.numel() for p in baseline.network.parameters()) == ours, name
        losses = [baseline.seconds_per_step(5) and baseline.loss.item() for _ in range(5)]
        assert losses[-1] < losses[0]


def test_a_figure_above_its_limit_is_exit_1(monkeypatch, capsys):
    def make_benchmark(limit):
        return lambda options: Report([Timing("a", 0.0, [1.0])], {"size": (2.0, limit)})

    monkeypatch.setattr(
        benchmark, "BENCHMARKS", {"low": make_benchmark(1.0), "high": make_benchmark(3.0)}
    )
    monkeypatch.setitem(benchmark.CPU_SECONDS, "low", 70)
    execute = lambda *a: cli.execute(benchmark.main, benchmark.FLAGS, a)  # noqa: E731
    assert execute("--benchmark=high") == 0
    assert execute("--benchmark=high,low") == 1
    printed = capsys.readouterr().out
    assert "low: size = 2, limit 1" in printed
    assert "\nlow, about 70 s of CPU with five rounds\n" in printed
    assert execute("--benchmark=middle") == 2
    assert "--benchmark=middle" in capsys.readouterr().err


def test_what_takes_minutes_runs_where_it_is_named():
    assert benchmark.CPU_SECONDS.keys() == benchmark.BENCHMARKS.keys()
    default = cli.parse_flags(benchmark.FLAGS, []).benchmark
    assert default == [n for n, t in benchmark.CPU_SECONDS.items() if t <= benchmark.LONG]
    assert "exact_profile" not in default and "train_sort" in default
    named = cli.parse_flags(benchmark.FLAGS, ["--benchmark=exact_profile"]).benchmark
    assert named == ["exact_profile"]


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
