"""Parts of a training step: products counted as often as a step has them, shares of all parts."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import training_benchmarks, training_parts
from rank_collapse.runs.seeds import seed_mesh
from rank_collapse.training import training
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


def test_each_distinct_product_is_counted_as_often_as_the_step_has_it():
    def step(state, square, last):
        state, _ = jax.lax.scan(lambda a, _: (jnp.tanh(a @ square), None), state, None, length=3)
        turned = jax.lax.dot_general(state, square, (((0,), (0,)), ((), ())))
        return state @ square @ last, turned  # a product of the loop, once more; and one of columns

    closed = jax.make_jaxpr(step)(jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((4, 2)))
    products = training_parts._make_products(closed, seed_mesh(jax.devices()[:1]))
    assert sorted((p.name, p.times, p.flops) for p in products) == [
        ("f32[4,4] × f32[4,2]", 1, 2 * 4 * 4 * 2),
        ("f32[4,4] × f32[4,4]", 1, 2 * 4 * 4 * 4),
        ("f32[4,4] × f32[4,4]", 4, 2 * 4 * 4 * 4),
    ]
    assert {product.turns for product in products} == {training_parts.MOST_TURNS}
    for product in products:
        product.call()


@pytest.mark.full
def test_a_step_without_a_part_lacks_its_operations():
    recipe, make_data, _ = training_benchmarks.make_case("sort", training_benchmarks.TINY)
    operations = {
        "dropout": "shift_right_logical",
        "Adam": "sqrt",
        "layer norms": "rsqrt",
        "softmax": "exp ",
    }
    texts = {}
    for part in ("none", *operations):
        mesh = seed_mesh(jax.devices()[:1])
        program, _ = training_parts.make_variant(recipe, make_data, mesh, (part,))
        texts[part] = str(program.functions.step.closed)
    assert tuple(operations) == training_parts.PARTS
    for part, operation in operations.items():
        assert texts["none"].count(operation) > texts[part].count(operation), part


@pytest.mark.full
def test_a_step_without_a_part_is_timed_beside_the_whole_step():
    report = training_parts.time_training_parts(
        "sort", parse_two_rounds(), training_benchmarks.TINY
    )
    names = [timing.name for timing in report.timings]
    parts = [f"without {part}" for part in training_parts.PARTS]
    assert names[:6] == ["whole step", *parts, "without all of these"] and len(names) == 8
    assert all(len(timing.seconds) == 2 and timing.best > 0 for timing in report.timings)
    assert find_figure(report, "padding") == 0  # all sequences have one length
    values = [find_figure(report, f"share of {name}") for name in ("all", "its products at their")]
    assert find_figure(report, "remainder") == pytest.approx(1 - np.sum(values))


def test_shares_of_parts_follow_from_the_cpu_seconds_of_all_rounds(monkeypatch, capsys):
    """Each share is a median over rounds of ratios to the whole step, per seed, step and device."""
    variants = [(), ("dropout",), ("Adam",), ("layer norms",), ("softmax",), training_parts.PARTS]
    seconds = {parts: [8.0 - i, 16.0 - 2 * i] for i, parts in enumerate(variants)}
    made, numbers = [], {}
    timed = {"small": [0.5, 1.0], "large": [2.0, 1.0]}

    def advance_variant(chosen_recipe, data, chosen_mesh, parts):
        assert (chosen_recipe, data, chosen_mesh) == (recipe, make_data, mesh)
        made.append(parts)
        closed = SimpleNamespace(step=SimpleNamespace(closed=f"program {len(made)}"))
        return SimpleNamespace(functions=closed), ("advance", parts)

    def time_call(call):
        kind, key = call
        rounds = {"advance": seconds.get(key), "product": timed.get(key), "large": [4.0, 2.0]}[kind]
        numbers[call] = numbers.get(call, -1) + 1
        return rounds[numbers[call]]

    def count(program):
        assert program == "program 1"  # the whole step
        return 240.0

    products = [
        training_parts.Product(
            name, 0.0, flops=flops, times=times, call=("product", name), turns=turns
        )
        for name, flops, times, turns in (("large", 30.0, 3, 4), ("small", 10.0, 6, 2))
    ]

    def make_products(closed, chosen_mesh):
        assert (closed, chosen_mesh) == ("program 1", mesh)
        return products

    recipe, make_data = SimpleNamespace(batch_size=2), lambda key: {"train": mask}
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    mesh = SimpleNamespace(size=2)
    for name, stub in (
        ("make_case", lambda *_: (recipe, make_data, 0)),
        ("make_variant", advance_variant),
        ("count_flops", count),
        ("LargeProduct", lambda mesh: SimpleNamespace(flops=60.0, time=("large", ""))),
        ("_make_products", make_products),
        ("_time_cpu", time_call),
        ("token_mask", lambda examples: examples),
    ):
        monkeypatch.setattr(training_parts, name, stub)
    monkeypatch.setattr(training_parts, "device_mesh", lambda options: mesh)
    report = training_parts.time_training_parts("sort", parse_two_rounds())
    steps, per_step = 2, 2 * training_parts.SEEDS * 2  # two steps, seeds on two devices
    assert made == variants
    times = {timing.name: timing.seconds for timing in report.timings}
    names = ["whole step", *(f"without {p}" for p in training_parts.PARTS), "without all of these"]
    assert list(times)[:6] == names
    for name, parts in zip(names, variants, strict=True):
        assert times[name] == [s / per_step for s in seconds[parts]]
    small = [6 * s / 2 / steps / mesh.size for s in timed["small"]]
    large = [3 * s / 4 / steps / mesh.size for s in timed["large"]]
    at_size = [a + b for a, b in zip(small, large, strict=True)]
    at_rate = [240.0 / steps / 60.0 * s for s in (4.0, 2.0)]
    assert times["its products alone, at their sizes"] == pytest.approx(at_size)
    assert times["its products at the rate of a large product"] == pytest.approx(at_rate)
    whole = np.array(times["whole step"])
    median = lambda values: np.median(np.array(values) / whole)  # noqa: E731
    expected = {
        f"share of {name.removeprefix('without ')}": 1 - median(times[name]) for name in names[1:]
    }
    expected["share of its products at their sizes"] = median(at_size)
    expected["share of its products at the rate of a large product"] = median(at_rate)
    expected["share of the remainder: copies, sums and activations"] = (
        1 - expected["share of all of these"] - median(at_size)
    )
    for name, product, times_in_epoch, flops in (
        ("small", small, 6, 10.0),  # its best round took longer
        ("large", large, 3, 30.0),
    ):
        limit = times_in_epoch * flops / steps / (240.0 / steps) * min(at_rate)
        expected[f"rate of {name}, over that of a large product"] = limit / min(product)
        expected[f"share of {name}, {times_in_epoch / steps:g} times"] = median(product)
    expected["share of padding among the tokens"] = 1 - 9 / 12
    assert {name for name, (_, limit) in report.figures.items() if limit is not None} == set()
    figures = {name: value for name, (value, _) in report.figures.items()}
    assert figures == pytest.approx(expected) and list(figures) == list(expected)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["round 1 of 2", "round 2 of 2"]
    assert all(line.endswith(" s of CPU for a seed and step") for line in lines)


def test_the_seconds_of_a_call_are_those_of_the_processor(monkeypatch):
    clock = [5.0]
    monkeypatch.setattr(training_parts.time, "process_time", lambda: clock[0])
    assert training_parts._time_cpu(lambda: clock.__setitem__(0, 7.5)) == 2.5


@pytest.mark.parametrize("parts", [(), *((part,) for part in training_parts.PARTS)])
def test_a_variant_lacks_its_part_alone(parts, monkeypatch):
    """It is compiled, and trained for an epoch, before it is timed."""
    recipe, make_data, _ = training_benchmarks.make_case("sort", training_benchmarks.TINY)
    made, epochs, adam = [], [], training.make_optimizer

    class Program:
        size = 5

        def compile(self, size):
            epochs.append(f"compiled for {size}")

        def advance(self, runs, stop):
            epochs.append(stop)
            return SimpleNamespace(step=stop), None

    def make_ensemble(chosen_recipe, data, *, mesh, epochs_per_chunk):
        assert (data, mesh.size, epochs_per_chunk) == (make_data, 3, 1)

        def begin(keys, hyper):
            made.append((chosen_recipe.config, hyper, training.make_optimizer))
            assert len(keys) == 3 * training_parts.SEEDS
            return Program(), SimpleNamespace(step=0)

        return SimpleNamespace(begin=begin)

    monkeypatch.setattr(training_parts, "Ensemble", make_ensemble)
    program, advance = training_parts.make_variant(
        recipe, make_data, SimpleNamespace(size=3), parts
    )
    advance()
    assert isinstance(program, Program) and epochs == ["compiled for 5", 1, 2]
    ((config, hyper, optimizer),) = made
    assert training.make_optimizer is adam
    assert (optimizer is adam) == ("Adam" not in parts)
    np.testing.assert_array_equal(hyper.learning_rate, np.full(6, np.float32(1e-3)))
    assert (hyper.dropout is None) == ("dropout" in parts)
    if hyper.dropout is not None:
        np.testing.assert_array_equal(hyper.dropout, np.full(6, np.float32(0.1)))
    is_without = {"layer norms": config.norm_placement == "none" and not config.embedding.norm}
    is_without["softmax"] = bool(config.normalise) and config.normalise("scores", 0) == "scores"
    assert [part for part, lacks in is_without.items() if lacks] == [
        part for part in parts if part in is_without
    ]


def test_without_adam_and_softmax_slopes_and_scores_stay_as_they_are():
    assert training_parts._keep_scores("scores", None) == "scores"
    plain = training_parts._make_plain(None, None)
    slopes = {"w": jnp.array([1.0, -2.0])}
    assert plain.update(slopes, plain.init(slopes))[0] is slopes
