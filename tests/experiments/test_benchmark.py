"""The benchmarks at tiny size: what they time agrees, and a figure above its limit fails."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from marks import slow_but

import rank_collapse as rc
from experiments import benchmark
from experiments.benchmarks import (
    absent_devices,
    budgets,
    counting,
    paths,
    profiles,
    random_llama,
    streaming,
    training,
)
from experiments.benchmarks.timing import Report, Timing, median_ratio, time_cases
from experiments.shell import cli
from experiments.shell.experiment import experiments_of
from rank_collapse import pretrained
from rank_collapse.training.training import Hyper, init_model


@pytest.fixture
def options():
    return cli.parse(benchmark.FLAGS, ["--rounds=2"])


def value(found, words):
    return next(v for name, (v, _) in found.figures.items() if words in name)


@pytest.mark.slow
def test_path_benchmarks_compare_what_is_equal(options):
    config = rc.transformer(depth=2, num_heads=2, d_model=8)
    found = paths.exact_paths(options, config, num_tokens=4)
    assert [t.name for t in found.timings] == ["forward pass", "path contributions"]
    assert all(len(t.seconds) == 2 and t.compile_seconds > 0 for t in found.timings)
    assert 0 <= value(found, "Frobenius") < 1e-5
    found = paths.head_contributions(options, config, num_tokens=4)
    assert found.timings[0].output.shape == (2, 2, 4, 8)
    assert value(found, "seconds") == found.timings[0].best
    found = paths.recomputed_paths(options, depth=2, num_sequences=3)
    assert value(found, "difference") < 1e-5
    assert value(found, "seconds for all sets") == found.timings[1].best


@pytest.mark.slow
def test_profile_benchmarks_compare_what_is_equal(options):
    found = profiles.collapse_sweep(options, num_seeds=3, depth=2, num_tokens=4, d_model=8)
    assert value(found, "difference") < 1e-5
    single, vmapped, _ = found.timings
    assert vmapped.output[1].shape == (3, 3)
    for one, of_all in zip(single.output[2], vmapped.output, strict=True):
        np.testing.assert_allclose(one, of_all[2], atol=1e-5)


def test_the_benchmark_of_logarithms_compares_what_is_equal(options):
    found = profiles.log_profile(options, depth=2, num_tokens=4, d_model=8)
    assert value(found, "difference") < 1e-2
    assert value(found, "seconds for every digit") == found.timings[2].best


@pytest.mark.parametrize("name", slow_but(training.CASES))
def test_training_benchmarks_take_the_published_commands(options, name):
    found = training.time_training(name, options, 2, training.TINY)
    (ours,) = found.timings
    assert value(found, "GFLOP/s, ours") == pytest.approx(
        value(found, "GFLOP of a seed's step") / ours.best
    )
    if name == "sort":  # of one seed on one device, counted by hand in test_accelerator.py
        one = rc.runs.seeds.seed_mesh(jax.devices()[:1])
        traced, steps = absent_devices.epoch_of(name, 1, one, "toy")
        counted = counting.product_flops(traced.jaxpr.jaxpr) / steps
        assert value(found, "GFLOP of a seed's step") == pytest.approx(counted / 1e9, rel=1e-12)
    assert value(found, "products of those sizes") > 0
    assert ours.compile_seconds > 0 and len(ours.seconds) == 2
    assert value(found, "ms per seed") == 1e3 * min(ours.seconds)


@pytest.mark.slow
def test_pytorch_trains_a_network_of_as_many_parameters():
    pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    options = cli.parse(benchmark.FLAGS, ["--rounds=1", "--baseline=torch"])
    found = training.time_training("sort", options, 2, training.TINY)
    assert [t.name for t in found.timings][1] == found.baseline == "PyTorch, one seed"
    share = value(found, "share of PyTorch")
    assert share == pytest.approx(found.timings[0].seconds[0] / found.timings[1].seconds[0])
    for name in [name for name, (_, _, asked) in training.CASES.items() if asked]:
        recipe, _, _ = training.setup_of(name, training.TINY)
        shapes = jax.eval_shape(lambda recipe=recipe: init_model(jax.random.key(0), recipe))
        network = torch_baseline.Network(recipe.config, recipe.num_outputs, 0.0)
        ours = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert sum(p.numel() for p in network.parameters()) == ours, name


def test_vmapped_pytorch_learns_as_one_seed_does():
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    sizes = (*training.TINY, "--n_train_data=4")  # every step sees all there is
    recipe, make_data, _ = training.setup_of("convex_hull", sizes)
    examples = make_data(jax.random.key(0))["train"]
    values = Hyper(learning_rate=1e-2, dropout=0.0)
    one = torch_baseline.Training(recipe, examples, values)
    several = torch_baseline.VmappedTraining(recipe, examples, values, 2)
    with torch.no_grad():
        for name, stacked in several.params.items():
            stacked.copy_(one.network.state_dict()[name].expand_as(stacked))
    one.optimizer.state.clear()
    one.seconds_per_step(5)
    several.seconds_per_step(5)
    # Losses, not weights: keys' biases have no gradient but rounding, which Adam makes large.
    torch.testing.assert_close(several.loss, one.loss.expand(2), rtol=1e-4, atol=0)


def test_every_experiment_has_a_budget_of_cpu_seconds(options, monkeypatch):
    assert budgets.BUDGETS.keys() == set(experiments_of())
    assert sum(budgets.BUDGETS.values()) < 300
    monkeypatch.setattr(budgets, "BUDGETS", {"run_path_counts": 0})
    found = budgets.budgets(options, "tiny")
    used, limit = found.figures["CPU seconds of run_path_counts"]
    assert used > 0.1 > limit == 0 and value(found, "of all") == used


def test_a_figure_above_its_limit_is_exit_1(tmp_path, monkeypatch, capsys):
    def found(limit):
        return lambda options: Report([Timing("a", 0.0, [1.0])], "a", {"size": (2.0, limit)})

    monkeypatch.setattr(benchmark, "BENCHMARKS", {"low": found(1.0), "high": found(3.0)})
    execute = lambda *a: cli.execute(benchmark.main, benchmark.FLAGS, a)  # noqa: E731
    assert execute("--benchmark=high", f"--json={tmp_path / 'found.json'}") == 0
    found = json.loads((tmp_path / "found.json").read_text())["benchmarks"]["high"]
    assert found["figures"] == {"size": {"value": 2.0, "limit": 3.0}}
    assert found["cases"]["a"]["seconds"] == [1.0]
    assert execute("--benchmark=high,low") == 1
    assert "over the limit: low: size = 2, limit 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--benchmark=middle", "middle is not one of"),
        ("--json={}", "error: cannot write to {}: Is a directory\n"),
        ("--compile_for=h100,abacus", "--compile_for=abacus is not one of h100, v5e"),
        *(
            (f"--compile_for={n}", f'{n} needs its compiler: pip install "jax[{plugin[1]}]==')
            for n, plugin in absent_devices.PLUGINS.items()
        ),
    ],
)
def test_what_is_refused_before_anything_is_timed(flag, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(benchmark, "BENCHMARKS", {"a": lambda options: pytest.fail("timed")})
    arguments = ["--benchmark=a", flag.format(tmp_path)]
    assert cli.execute(benchmark.main, benchmark.FLAGS, arguments) == 2
    assert message.format(tmp_path) in capsys.readouterr().err


def test_cases_take_turns():
    order = []
    timings = time_cases({n: (order.append, (n,)) for n in "ab"}, rounds=3)
    assert "".join(order) == "ab" + 3 * "ab"
    timings[0].seconds, timings[1].seconds = [2.0, 9.0, 4.0], [1.0, 3.0, 1.0]
    assert median_ratio(*timings) == 3.0 and timings[0].best == 2.0


def test_a_random_llama_is_a_checkpoint_and_its_operations_are_counted(tmp_path):
    random_llama.make(tmp_path, "tiny")
    source = pretrained.open_checkpoint(tmp_path)
    assert source.config.depth == 4 and not source.biased
    assert source.unembedding.table.shape == (128, 64)
    weights = source.layer(1).mlp.w_in
    assert weights.dtype == "float32" and 0.019 < float(weights.std()) < 0.021
    assert not (weights == source.layer(2).mlp.w_in).all()
    forward, lengths = streaming.operations("tiny", 3, 5)
    layer = source.layer(0)
    # Two for each weight and row; keys and values are grouped, and a path has each head's own.
    sizes = [a.size for a in (layer.attention.w_q, layer.attention.w_o)]
    shared = [a.size for a in (layer.attention.w_k, layer.attention.w_v)]
    mlp = 3 * layer.mlp.w_in.size
    assert forward == 2 * 15 * 4 * (5 * sum(sizes + shared) + 3 * mlp)
    each = [l * sum(sizes) + (l + 1) * 2 * layer.mlp.w_in.size for l in range(1, 5)]
    assert lengths == 2 * 15 * sum(each)
