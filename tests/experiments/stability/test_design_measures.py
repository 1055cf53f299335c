"""Measures of run_stability: Admin's profile, updates and gradient steps."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.stability import design_measures
from experiments.stability.padded_designs import Case
from experiments.train.weight_matrices import get_weight_matrices, replace_weight_matrices
from rank_collapse.network.measured import updates
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.executors import replace_executor


def small_network():
    """Draws (config, weights, other weights, tokens)."""
    config = rc.transformer(2, 2, 8, mlp="relu", d_ff=8)
    params, other = (draws.parameters(config, i, 1.0, 0.0, 0.0) for i in (0, 1))
    return config, params, other, draws.normal(5, 8, seed=2)


@jax.jit
def normalise_output(params, x, config):
    return design_measures.normalised_output(rc.apply(params, x, config), config)


def test_the_change_of_an_update_is_the_librarys():
    config, params, other, x = small_network()
    direction, before = get_weight_matrices(other), normalise_output(params, x, config)
    directions = {"there": direction}
    change = jax.jit(design_measures.output_changes)(params, x, config, before, directions, 1e-2)[
        "there"
    ]
    moved = jax.jit(design_measures.move_weights)(params, direction, 1e-2)
    expected = updates.output_change(params, moved, x, config)[-1]
    np.testing.assert_allclose(change, expected, rtol=1e-4)
    still = jax.tree.map(lambda a: jnp.zeros_like(a), direction)
    unmoved = design_measures.move_weights(params, still, 1e-2)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), unmoved, params))


def test_an_sgd_step_and_its_bound_are_those_of_a_step_taken():
    """To first order: a step of η = 1e-3, its loss, and the loss over ‖u‖ squared."""
    config, params, _, x = small_network()
    target = draws.normal(5, 8, seed=3)

    def loss(params):
        return jnp.sum(target * normalise_output(params, x, config)), "aside"

    eta = e = 1e-3

    @jax.jit
    def step(params):
        gradients, aside = design_measures.matrix_gradients(loss, params)
        assert aside == "aside"
        change = design_measures.sgd_change(params, x, config, gradients)
        matrices = get_weight_matrices(params)
        moved = replace_weight_matrices(
            params, jax.tree.map(lambda w, g: w - eta * g, matrices, gradients)
        )
        stepped = design_measures.move_weights(params, jax.tree.map(jnp.negative, gradients), e)
        return change, moved, design_measures.gradient_bound(params, gradients, target, e), stepped

    change, moved, bound, stepped = step(params)
    before, after, later = (
        np.asarray(normalise_output(p, x, config)) for p in (params, moved, stepped)
    )
    np.testing.assert_allclose(change, np.mean((after - before) ** 2) / eta**2, rtol=0.05)
    # a step of relative size e along each gradient lowers the loss by e Σ‖W‖‖∂W‖
    fall, target = np.sum(target * (before - later)), np.asarray(target)
    np.testing.assert_allclose(bound, fall**2 / np.sum(target**2) / target.size, rtol=0.05)


@pytest.mark.parametrize("is_profiled", [False, True])
def test_measures_of_a_seed_are_of_its_own_draws(is_profiled, monkeypatch):
    """Which network, which directions and which target each measure gets; the numbers are stubs."""
    target = np.arange(6.0).reshape(3, 2)
    drawn = {"params": 2.0, "x": np.ones((3, 2)), "batch": "batch", "target": target}
    gradients, calls = {"w": np.array([1.0, -2.0])}, {}
    config = "profiled" if is_profiled else "config"

    def make_stub(name, result):
        def stub(*arguments):
            calls[name] = arguments
            return result

        return stub

    def differentiate(loss, params):
        value, trace = loss(params)
        assert value == pytest.approx(2.0 * target.sum())
        return gradients, trace

    trace = SimpleNamespace(output=np.full((3, 2), 2.0))
    law = make_stub("law", "law")
    monkeypatch.setattr(design_measures.rc, "apply", make_stub("apply", trace))
    monkeypatch.setattr(design_measures.expectation, "update_sizes", make_stub("sizes", "sizes"))
    monkeypatch.setattr(
        design_measures.expectation, "expected_pass", lambda *a, sizes: law(*a, sizes)
    )
    for name, stub in (
        ("draw", make_stub("draw", drawn | {"direction": {"w": np.array([3.0, 4.0])}})),
        ("profile_omega", make_stub("profile", "profiled")),
        ("matrix_gradients", differentiate),
        ("measure_network", make_stub("network", {"shares": 5, "change": {"random": 6}})),
        ("sgd_change", make_stub("sgd", 7)),
        ("gradient_bound", make_stub("bound", 8)),
    ):
        monkeypatch.setattr(design_measures, name, stub)
    results = design_measures.measure_seed("options", is_profiled, "key", ("config", 0.25))
    assert results == {"shares": 5, "change": {"random": 6, "sgd": 7}, "gradient_bound": 8}
    assert calls["draw"] == ("options", "key", "config")
    assert calls.get("profile") == ((2.0, "batch", "config") if is_profiled else None)
    x = drawn["x"]
    for name, expected in (
        ("apply", (2.0, x, config)),
        ("sizes", (config, 0.25)),
        ("law", (2.0, x, config, "sizes")),
        ("sgd", (2.0, x, config, gradients)),
        ("bound", (2.0, gradients, target, 0.25)),
    ):
        assert len(calls[name]) == len(expected)
        assert all(a is b or a == b for a, b in zip(calls[name], expected, strict=True)), name
    *first, moves, size = calls["network"]
    assert all(a is b for a, b in zip(first, (2.0, x, config, trace, "law"), strict=True))
    assert size == 0.25 and list(moves) == ["random", "gradient"]
    np.testing.assert_array_equal(moves["random"]["w"], [3.0, 4.0])
    np.testing.assert_array_equal(moves["gradient"]["w"], [-1.0, 2.0])


def test_padding_is_cut_by_layer_and_not_by_seed():
    """Of a network of depth 2 in a program of depth 3: [s, L], [s, 2L], [s, L + 1] and [s]."""
    arrays = {
        "apart": np.arange(8.0).reshape(2, 4),
        "shares/random": np.arange(12.0).reshape(2, 6),
        "layers": np.arange(6.0).reshape(2, 3),
        "change/sgd": np.arange(2.0),
    }
    cut = design_measures.cut_padding(arrays, 2)
    assert {name: values.tolist() for name, values in cut.items()} == {
        "apart": [[0, 1, 2], [4, 5, 6]],
        "shares.random": [[0, 1, 2, 3], [6, 7, 8, 9]],
        "layers": [[0, 1], [3, 4]],
        "change.sgd": [0, 1],
    }


@pytest.mark.parametrize(("norm", "eps"), [("layer", 1e-5), ("layer", 0.5), ("rms", 0.5)])
def test_the_output_is_normalised_as_the_network_normalises(norm, eps):
    config, x = SimpleNamespace(norm=norm, norm_eps=eps), np.float32([[1.0, 3.0], [0.5, 0.0]])
    output = design_measures.normalised_output(
        SimpleNamespace(hidden=[None, jnp.asarray(x)]), config
    )
    centred = x - x.mean(axis=1, keepdims=True) * (norm == "layer")
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    np.testing.assert_allclose(output, expected, rtol=1e-6)


def test_one_minus_the_cosine_is_the_mean_over_pairs_of_tokens():
    x = np.random.default_rng(0).normal(size=(5, 3)) + 1
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [1 - unit[i] @ unit[j] for i in range(5) for j in range(i)]
    assert_close(design_measures.one_minus_cosine(jnp.asarray(x)), np.mean(pairs), rtol=1e-5)


def test_measures_of_a_network_stand_beside_the_laws_of_the_same_name(monkeypatch):
    """The law's change of the output is that after the last layer."""
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 2)))
    trace = SimpleNamespace(hidden=hidden)
    law = SimpleNamespace(
        shares="law shares", log_one_minus_cosine="law cosine", output_change=[1, 2, 3]
    )
    calls = {}

    def branch_shares(*arguments):
        calls["shares"] = arguments
        return "shares"

    def output_changes(*arguments):
        calls["changes"] = arguments
        return "changes"

    monkeypatch.setattr(design_measures.dependency, "branch_shares", branch_shares)
    monkeypatch.setattr(design_measures, "output_changes", output_changes)
    monkeypatch.setattr(design_measures, "normalised_output", lambda trace, config: "output")
    results = design_measures.measure_network("params", "x", "config", trace, law, "moves", 0.25)
    assert calls["shares"] == ("params", trace, "config")
    assert calls["changes"] == ("params", "x", "config", "output", "moves", 0.25)
    apart = results.pop("apart")
    assert_close(apart, [design_measures.one_minus_cosine(states) for states in hidden])
    assert results == {
        "shares": "shares",
        "expected_shares": "law shares",
        "expected_log_apart": "law cosine",
        "change": "changes",
        "expected_change": 3,
    }


def test_networks_of_a_program_are_measured_together_and_cut_to_their_depth(monkeypatch):
    """Only a program with gains that are not profiled yet (NaN) profiles them."""
    cases = {Case("post", 2, 4): 1.0, Case("admin", 4, 8): np.nan, Case("pre", 2, 4): 1.0}
    configs = {case: SimpleNamespace(gain=gain) for case, gain in cases.items()}
    groups, said = [[*cases][:2], [*cases][2:]], []

    def measure(function, make_cells):
        assert function.func is design_measures.measure_seed
        cells = make_cells(SimpleNamespace(update_size=0.25))
        return {
            name: {
                "apart": np.tile(np.arange(5.0), (2, 1)),
                "change/random": np.full(2, config.gain),
                "profiled": np.full(2, function.args[1]),
                "size": np.full(2, size),
            }
            for name, (config, size) in cells.items()
        }

    options, progress = SimpleNamespace(num_seeds=2), SimpleNamespace(say=said.append)
    arguments = options, None, "stability", 2 * 3
    replace_executor(monkeypatch, design_measures, *arguments, progress=progress, measure=measure)
    monkeypatch.setattr(
        design_measures,
        "group_by_program",
        lambda by_name: [{case.name: by_name[case.name] for case in group} for group in groups],
    )
    monkeypatch.setattr(
        design_measures.jax.tree, "leaves", lambda tree: [np.array(c.gain) for c in tree]
    )
    results = design_measures.measure_all(options, configs, None)
    assert [*results] == [case for case in cases if case.design != "admin"]
    assert len(said) == 1 and said[0].startswith("--designs=admin at depth 4")
    for case, is_profiled in zip(results, (True, False), strict=True):
        measures = results[case]
        assert measures["apart"].tolist() == [[0, 1, 2]] * 2
        assert measures["size"].tolist() == [0.25] * 2
        assert measures["profiled"].tolist() == [is_profiled] * 2
