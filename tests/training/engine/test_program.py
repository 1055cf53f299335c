"""The program of a sweep: compiled once, data that no step changes, and looks."""

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


@pytest.mark.full
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
    idle = sweep(begin, lambda state, hyper, index: (state, {}), steps=3, seeds=2, quiet=True)
    assert not idle.metrics.data_vars and idle.states["w"].tolist() == [[0] * 4] * 2


def test_looks_come_at_multiples_of_every_and_draw_from_a_key_of_their_own(tmp_path):
    """Also in a sweep that goes on after a last step between two multiples."""

    def begin(key, hyper):
        return {"x": 0.0, "own": jax.random.key_data(key)}

    def advance(state, hyper, index):
        return state | {"x": state["x"] + 1}, {}

    def look(state, hyper, key):
        return {"x": state["x"], "key": jax.random.key_data(key), "b": hyper["b"]}

    options = {"seeds": 2, "every": 4, "look": look, "quiet": True, "hyper": {"a": 3.0, "b": 5.0}}
    sweep(begin, advance, steps=6, folder=tmp_path, **options)
    result = sweep(begin, advance, steps=11, folder=tmp_path, **options)
    assert result.looks["step"].values.tolist() == [0, 4, 8, 11]
    assert result.looks["x"].values.tolist() == [[0, 4, 8, 11]] * 2
    assert (result.looks["b"] == 5).all()
    for seed in range(2):
        key = jax.random.fold_in(jax.random.key(0), seed)
        np.testing.assert_array_equal(result.states["own"][seed], jax.random.key_data(key))
        look_key = jax.random.key_data(jax.random.fold_in(key, LOOK))
        np.testing.assert_array_equal(result.looks["key"][seed], np.tile(look_key, (4, 1)))
