"""sweep: anyone's init and step over seeds and swept values, whole, resumed, on any devices."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.runs.seeds import seed_mesh
from rank_collapse.training import sweep
from tests.oracles.swept_networks import (
    WHOLE,
    assert_same_bits,
    init,
    step,
)
from tests.support.closeness import assert_close


def run_alone(seed, rate, width, steps=25, scale=0.5):
    """Runs one seed by hand: (metrics, last finite state)."""
    hyper = {"rate": rate, "scale": scale}
    state = init(jax.random.fold_in(jax.random.key(0), seed), hyper, width=width)
    advance = jax.jit(lambda state, index: step(state, hyper, index, width=width))
    losses, last = [], state
    for index in range(steps):
        if np.isfinite(state["weights"]["in"]).all():
            last = state
        state, metrics = advance(state, index)
        losses.append(float(metrics["loss"]))
    finite = np.isfinite(state["weights"]["in"]).all()
    return np.array(losses), state if finite else last


@pytest.mark.full
def test_a_member_is_the_same_run_alone(whole):
    for seed, rate, width in ((0, 0.01, 2), (2, 0.01, 4), (1, 6.0, 2)):
        losses, state = run_alone(seed, rate, width)
        member = whole.metrics["loss"].sel(seed=seed, rate=rate, width=width).values
        finite = np.isfinite(losses)
        np.testing.assert_allclose(member[finite], losses[finite], rtol=1e-4)
        assert np.isfinite(member).sum() == finite.sum() == (25 if rate < 1 else finite.argmin())
        ours = whole.state(seed, rate=rate, width=width)
        np.testing.assert_allclose(ours["weights"]["in"], state["weights"]["in"], rtol=1e-3)
        assert ours["mean"].dtype == jnp.bfloat16 and np.isfinite(np.float32(ours["mean"]))
        np.testing.assert_array_equal(
            jax.random.key_data(ours["key"]), jax.random.key_data(state["key"])
        )


def test_runs_that_are_not_finite_are_named_and_the_others_go_on(whole, capsys):
    diverged = whole.diverged_at
    assert (diverged.sel(rate=0.01) == -1).all() and (diverged.sel(rate=6.0) >= 0).all()
    for rate, limit in ((0.01, 25), (6.0, None)):
        for width in (2, 4):
            for seed in range(3):
                at = int(diverged.sel(rate=rate, width=width, seed=seed))
                index = whole.metrics["index"].sel(rate=rate, width=width, seed=seed).values
                assert np.isfinite(index).sum() == (limit or at + 1)
                leaves = whole.state(seed, rate=rate, width=width)["weights"]
                assert all(np.isfinite(a).all() for a in leaves.values())
    sweep(init, step, **WHOLE | {"quiet": False, "static": {"width": [2]}, "look": None})
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if "it keeps its state after" in line]
    assert len(named) == 3
    assert all(
        any(f": seed {s} (width=2, rate=6.0): loss is" in x for x in named) for s in range(3)
    )
    assert lines[-1].startswith("sweep: 100%, loss ")


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"every": 1, "look": None},
        {"every": 7, "look": None},
        {"every": 1000, "look": None},
        {"mesh": 1},
        {"mesh": 1, "every": 25, "look": None, "seeds": 1},
    ],
    ids=str,
)
def test_chunks_devices_and_other_seeds_change_no_bit(whole, change):
    options = WHOLE | change
    if "mesh" in change:
        options["mesh"] = seed_mesh(jax.devices()[: change["mesh"]])
    other = sweep(init, step, **options)
    seeds = slice(0, options["seeds"])
    assert_same_bits_of(other, whole, seeds, options["look"] is not None)


def assert_same_bits_of(a, b, seeds, has_looks=True):
    np.testing.assert_array_equal(a.metrics["loss"], b.metrics["loss"][:, :, seeds])
    np.testing.assert_array_equal(a.diverged_at, b.diverged_at[:, :, seeds])
    if has_looks:
        np.testing.assert_array_equal(a.looks["norm"], b.looks["norm"][:, :, seeds])
    for x, y in zip(jax.tree.leaves(a.states), jax.tree.leaves(b.states), strict=True):
        if not isinstance(x, jax.Array):
            np.testing.assert_array_equal(x, y[seeds])


@pytest.mark.parametrize(("at_once", "devices"), [(1, 2), (2, 1)])
def test_states_and_metrics_may_have_arrays_of_size_0(at_once, devices):
    def start(key, hyper):
        return {"w": jax.random.normal(key, (2,)), "empty": jnp.zeros((0, 3))}

    def halve(state, hyper, index):
        state = state | {"w": state["w"] * hyper["rate"]}
        return state, {"sum": state["w"].sum(), "none": state["empty"]}

    options = {"steps": 3, "seeds": 5, "hyper": {"rate": [0.5, 0.25, 0.125]}, "quiet": True}
    mesh = seed_mesh(jax.devices()[:devices])
    result = sweep(start, halve, at_once=at_once, mesh=mesh, **options)
    assert result.metrics["none"].shape == (3, 5, 3, 0, 3)
    assert result.states["empty"].shape == (5, 3, 0, 3)
    first = result.metrics["sum"].isel(rate=0).values  # [seeds, steps]
    for rate in range(3):
        wanted = first[:, :1] * 2 * 0.5 ** ((rate + 1) * np.arange(1, 4))
        assert_close(result.metrics["sum"].isel(rate=rate).values, wanted)


@pytest.mark.full
@pytest.mark.parametrize("at_once", [2, 100])
def test_runs_side_by_side_are_runs_one_after_the_other(whole, at_once):
    other = sweep(init, step, **WHOLE | {"at_once": at_once})
    fine = {"rate": 0.01}
    for name in ("loss", "index"):
        a, b = (r.metrics[name].sel(fine) for r in (other, whole))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(other.diverged_at, whole.diverged_at)
    x, y = (r.states[4]["weights"]["in"] for r in (other, whole))
    np.testing.assert_allclose(x[:, 0], y[:, 0], rtol=1e-5, atol=1e-6)


def test_seeds_have_their_keys_at_every_value_and_anywhere(whole):
    def keep(key, hyper, scale=1):
        return key

    def measure_rate(state, hyper, index, scale=1):
        return state, {"rate": hyper["learning_rate"]}

    options = {"steps": 1, "hyper": {"learning_rate": [0.1, 0.2]}, "quiet": True}
    result = sweep(
        keep, measure_rate, seeds=3, first_seed=5, key=7, static={"scale": [1, 2]}, **options
    )
    expected = [jax.random.key_data(jax.random.fold_in(jax.random.key(7), s)) for s in (5, 6, 7)]
    for keys in result.states.values():
        data = jax.random.key_data(keys)
        np.testing.assert_array_equal(data, np.stack([expected] * 2, axis=1))
    assert result.metrics["seed"].values.tolist() == [5, 6, 7]
    np.testing.assert_allclose(result.metrics["rate"][0, :, 0, 0], [0.1, 0.2], rtol=1e-6)
    typed = sweep(keep, measure_rate, seeds=1, first_seed=5, key=jax.random.key(7), **options)
    legacy = sweep(keep, measure_rate, seeds=1, first_seed=5, key=jax.random.PRNGKey(7), **options)
    for other in (typed, legacy):
        np.testing.assert_array_equal(jax.random.key_data(other.states)[0, 0], expected[0])


def test_more_seeds_and_more_steps_extend_a_folder(whole, tmp_path):
    less = WHOLE | {"folder": tmp_path, "seeds": 2, "steps": 14}
    sweep(init, step, **less)
    only_missing = sweep(init, step, **less | {"seeds": 3})
    assert only_missing.metrics["loss"].shape == (2, 2, 3, 14)
    extended = sweep(init, step, **WHOLE | {"folder": tmp_path})
    assert_same_bits(extended, whole)
    again = sweep(init, step, **WHOLE | {"folder": tmp_path})
    assert again.seconds["running"] == 0
    assert_same_bits(again, whole)


def test_rounds_of_seeds_end_when_the_rule_says_so(tmp_path):
    seen = []

    def rule(metrics):
        seen.append(metrics["loss"].sizes["seed"])
        return metrics.sizes["seed"] >= 5

    options = WHOLE | {"seeds": 9, "until": rule, "round_seeds": 2, "folder": tmp_path}
    options["static"] = {"width": [2]}
    result = sweep(init, step, **options)
    assert seen == [2, 4, 6]
    assert result.metrics["loss"].shape == (1, 2, 6, 25)
    straight = sweep(init, step, **options | {"until": None, "seeds": 6, "folder": None})
    assert_same_bits(result, straight)
    seen.clear()
    assert_same_bits(sweep(init, step, **options), straight)  # asks again, and trains nothing
    assert seen == [2, 4, 6]


def test_what_is_not_given_has_its_default():
    parameters = inspect.signature(sweep).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    numbers = {"seeds": 8, "every": 100, "first_seed": 0, "round_seeds": 8, "key": 0}
    nothing = ("hyper", "static", "folder", "look", "at_once", "until", "finite", "mesh")
    assert defaults == numbers | dict.fromkeys(nothing) | {"quiet": False}


def test_metrics_may_be_anything_and_a_state_any_pytree():
    """A tuple as state, whole numbers, flags, vectors and nested names as metrics."""

    def begin(key, hyper):
        return (jnp.arange(3), [jax.random.normal(key, (2,)), 1, True])

    def count(state, hyper, index):
        whole, (drawn, number, flag) = state
        metrics = {"a": {"b": drawn, "c": number}, "flag": flag, "half": jnp.bfloat16(index)}
        metrics["short"] = jnp.float16(index)
        return (whole + 1, [drawn, number + 1, ~flag]), metrics

    result = sweep(begin, count, steps=3, seeds=2, quiet=True)
    assert set(result.metrics) == {"a/b", "a/c", "flag", "half", "short"}
    assert result.metrics["half"].dtype == result.metrics["short"].dtype == np.float32
    assert result.metrics["a/b"].dims == ("seed", "step", "a/b_0")
    assert result.metrics["a/c"].values.tolist() == [[1, 2, 3]] * 2
    assert result.metrics["a/c"].dtype == np.int32 and result.metrics["flag"].dtype == bool
    assert result.metrics["half"].values.tolist() == [[0, 1, 2]] * 2
    assert isinstance(result.states, tuple) and result.states[0].tolist() == [[3, 4, 5]] * 2
    assert result.state(1)[1][1:] == [4, False] and result.looks is None
    alone = sweep(lambda key, hyper: 0.0, lambda s, h, i: (s + 1, s), steps=2, seeds=1, quiet=True)
    assert alone.metrics["metric"].values.tolist() == [[0, 1]] and alone.states.tolist() == [2]
    nothing = sweep(lambda key, hyper: 0.0, lambda s, h, i: (s + 1, {}), steps=0, quiet=True)
    assert nothing.states.tolist() == [0] * 8 and not nothing.metrics.data_vars


def test_keys_of_another_generator_are_those_of_each_seed_alone():
    """Under vmap its keys and draws would depend on the other seeds."""
    key = jax.random.key(0, impl="unsafe_rbg")

    def draw(state, hyper, index):
        return state, {"drawn": jax.random.normal(jax.random.fold_in(state, index))}

    result = sweep(lambda key, hyper: key, draw, steps=2, seeds=3, key=key, quiet=True)
    for seed in range(3):
        state = jax.random.fold_in(key, seed)
        want = [jax.random.normal(jax.random.fold_in(state, index)) for index in range(2)]
        assert_close(result.metrics["drawn"].values[seed], want, rtol=1e-6)


def test_debugging_options_of_jax_stop_no_run():
    """A run that diverges is named, and the others go on, also where JAX is to raise at a NaN."""

    def grow(state, hyper, index):
        return state * hyper["rate"], {"log": jnp.log(1 - state)}

    with jax.debug_nans(True), jax.debug_infs(True):
        result = sweep(
            lambda key, hyper: 0.5, grow, steps=4, seeds=1, hyper={"rate": [1, 3.0]}, quiet=True
        )
    assert result.diverged_at.values.tolist() == [[-1], [1]]
