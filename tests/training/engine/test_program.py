"""The program of a sweep: compiled once, and the last finite state of each run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.training import sweep
from rank_collapse.training.engine.functions import trace_functions
from rank_collapse.training.engine.program import LOOK
from tests.oracles.swept_networks import (
    init,
    step,
)


@pytest.mark.usefixtures("jax_copies")
def test_sixty_four_rates_compile_once():
    traces, compiled = [], []

    def counted(state, hyper, index):
        traces.append(index)
        return step(state, hyper, index)

    def count(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    numbers = []
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for rates in ([0.01, 0.02], list(np.logspace(-4, -1, 64))):
            traces.clear()
            compiled.clear()
            jax.clear_caches()
            hyper = {"rate": rates, "scale": 1.0}
            result = sweep(init, counted, steps=3, seeds=2, hyper=hyper, quiet=True)
            numbers.append((len(traces), len(compiled)))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert result.metrics["loss"].shape == (64, 2, 3)
    assert numbers[0][0] == numbers[1][0] == 2  # the second says whether it is the same again
    assert 0 < numbers[1][1] == numbers[0][1] < 15  # with small programs that draw keys


def test_what_was_never_finite_is_no_divergence():
    """A mask of -inf, a best loss of inf and a metric that is measured at some steps alone."""

    def begin(key, hyper):
        return {"mask": jnp.array([0, -jnp.inf]), "best": jnp.inf, "x": 1.0}

    def improve(state, hyper, index):
        sometimes = jnp.where(index % 2 == 0, state["x"], jnp.nan)
        best = jnp.minimum(state["best"], state["x"])
        return state | {"x": state["x"] / 2, "best": best}, {"x": state["x"], "some": sometimes}

    options = {"steps": 4, "seeds": 1, "every": 2, "quiet": True}
    result = sweep(begin, improve, finite=["x"], **options)
    assert result.diverged_at.values.tolist() == [-1] and result.states["best"].tolist() == [0.125]
    assert np.isnan(result.metrics["some"]).values.tolist() == [[False, True] * 2]
    strict = sweep(begin, improve, **options)
    assert strict.diverged_at.values.tolist() == [1] and strict.states["x"].tolist() == [0.5]


def test_data_in_the_state_are_not_carried(tmp_path):
    def begin(key, hyper):
        return {"data": jax.random.normal(key, (4,)), "key": key, "w": jnp.zeros(4)}

    def add(state, hyper, index):
        return state | {"w": state["w"] + state["data"]}, {}

    key = jax.random.key(0)
    assert trace_functions(begin, add, None, {}, {}, key.dtype).unchanged == [True, True, False]
    options = {"seeds": 3, "every": 2, "folder": tmp_path, "quiet": True}
    sweep(begin, add, steps=3, **options)
    result = sweep(begin, add, steps=5, **options)
    np.testing.assert_allclose(result.states["w"], 5 * result.states["data"], rtol=1e-6)
    still = sweep(begin, lambda state, hyper, index: (state, {"index": index}), steps=3, quiet=True)
    assert still.metrics["index"].values.tolist() == [[0, 1, 2]] * 8


@pytest.mark.parametrize("every", [1, 4, 9, 32])
@pytest.mark.parametrize("at_once", [1, None])
def test_the_last_finite_state_is_kept_whatever_shows_it(every, at_once):
    """Metrics that show it at once, a step later or never."""

    def begin(key, hyper):
        return {"x": 0.0, "count": 0, "data": hyper["at"] * jnp.ones(2)}

    def advance(state, hyper, index):
        x = jnp.where(index == hyper["at"], jnp.inf, state["x"] + 1)
        shown = jnp.where(index >= hyper["at"] + hyper["delay"], jnp.nan, 1.0)
        return state | {"x": x, "count": state["count"] + 1}, {"shown": shown}

    at, delay = [0, 5, 9, 13], [0, 1, 6, 100]
    result = sweep(
        begin,
        advance,
        steps=14,
        seeds=1,
        every=every,
        hyper={"at": at, "delay": delay},
        at_once=at_once,
        quiet=True,
    )
    expected = np.broadcast_to(np.array(at)[:, None], (4, 4))
    np.testing.assert_array_equal(result.diverged_at[..., 0], expected)
    np.testing.assert_array_equal(result.states["count"][0], expected)
    np.testing.assert_array_equal(result.states["x"][0], expected)
    np.testing.assert_array_equal(result.states["data"][0, ..., 0], expected)
    finite = np.isfinite(result.metrics["shown"].values).sum(axis=-1)[..., 0]
    np.testing.assert_array_equal(finite, expected + (np.array(delay) > 0))


def test_looks_come_at_multiples_of_every_and_draw_from_a_key_of_their_own(tmp_path):
    """Also in a sweep that goes on after a last step between two multiples."""

    def begin(key, hyper):
        return {"x": 0.0, "own": jax.random.key_data(key)}

    def advance(state, hyper, index):
        return state | {"x": state["x"] + 1}, {}

    def look(state, hyper, key):
        return {"x": state["x"], "key": jax.random.key_data(key)}

    options = {"seeds": 2, "every": 4, "look": look, "quiet": True}
    sweep(begin, advance, steps=6, folder=tmp_path, **options)
    result = sweep(begin, advance, steps=11, folder=tmp_path, **options)
    assert result.looks["step"].values.tolist() == [0, 4, 8, 11]
    assert result.looks["x"].values.tolist() == [[0, 4, 8, 11]] * 2
    for seed in range(2):
        key = jax.random.fold_in(jax.random.key(0), seed)
        np.testing.assert_array_equal(result.states["own"][seed], jax.random.key_data(key))
        own = jax.random.key_data(jax.random.fold_in(key, LOOK))
        np.testing.assert_array_equal(result.looks["key"][seed], np.tile(own, (4, 1)))


def test_a_run_that_stops_is_told_by_what_is_not_finite_first(capsys):
    """A number with its value, an array without, the state where no metric shows it."""

    def begin(key, hyper):
        return {"x": 0.0}

    def advance(state, hyper, index):
        x = jnp.where(index == 3, jnp.nan, state["x"] + 1)
        late = jnp.where(index >= 2 + hyper["a"], -jnp.inf, 1.0)
        vector = jnp.where((index >= 1 + hyper["b"]) & (jnp.arange(2) > 0), jnp.nan, 0.0)
        return {"x": x}, {"vector": vector, "late": late}

    hyper = {"a": [0, 100], "b": [0, 100]}
    sweep(begin, advance, steps=6, seeds=1, every=6, hyper=hyper)
    lines = [line for line in capsys.readouterr().err.splitlines() if "keeps" in line]
    causes = [line.partition("): ")[2].partition(";")[0] for line in lines]
    assert causes == [
        "vector is not finite at step 1",
        "late is -inf at step 2",
        "vector is not finite at step 1",
        "its state is not finite at step 3",
    ]
    assert ["seed 0 (a=0, b=0)" in lines[0], "seed 0 (a=0, b=100)" in lines[1]] == [True] * 2
