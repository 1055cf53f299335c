"""Traced functions: keys that are used twice."""

import jax

from tests.oracles.small_sweeps import run


def test_a_key_that_is_used_twice_is_said(capsys):
    def keep(key, hyper):
        return {"w": jax.random.normal(key, (3,)), "key": key}

    def draw(state, hyper, index):
        return state | {"w": jax.random.normal(state["key"], (3,))}, {"loss": 0.0}

    def fold(state, hyper, index):
        key = jax.random.fold_in(state["key"], index)
        return state | {"w": jax.random.normal(key, (3,))}, {"loss": 0.0}

    for function, is_said in ((draw, True), (fold, False)):
        run(init=keep, step=function, quiet=False)
        assert ("a random key that was used is used again" in capsys.readouterr().err) is is_said
