"""Draws from a key that neither the state nor the index changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.training.engine.constant_draws import repeats_draws
from rank_collapse.training.engine.tracing import Operations
from tests.oracles.small_sweeps import run

OUTER = jax.random.key(7)
ONES = jnp.ones(3)


def draw(seed=0):
    return jax.random.normal(jax.random.key(seed), (3,))


def choose(add, *operands):
    """Adds noise in a branch that a constant chooses."""
    return jax.lax.cond(jnp.sum(ONES) > 2, add, lambda *_: ONES, *operands)


def add_key_first(key, state):
    return state + jax.random.normal(key, (3,))


def add_key_last(state, key):
    return add_key_first(key, state)


@jax.custom_vjp
def add_noise(x):
    return x + draw()


add_noise.defvjp(lambda x: (add_noise(x), None), lambda _, slope: (slope,))


def add_in_scan(state, index):
    keys = jax.random.split(OUTER, 4)
    return jax.lax.scan(lambda s, key: (s + jax.random.normal(key, (3,)), None), state, keys)[0]


def add_counted(state, index):
    """Draws at each turn of a loop that has three turns at each step."""

    def turn(number, state):
        return state + jax.random.normal(jax.random.fold_in(OUTER, number), (3,))

    return jax.lax.fori_loop(0, 3, turn, state)


def choose_first(first, second):
    """Returns the first of two values, by a constant that the compiler does not see."""
    return jax.lax.cond(jnp.sum(ONES) > 9, lambda a, b: b, lambda a, b: a, first, second)


REPEATED = {
    "added": lambda state, index: state + draw(),
    "an older key": lambda state, index: state * jax.random.uniform(jax.random.PRNGKey(0), (3,)),
    "a key outside": lambda state, index: state * jax.random.bernoulli(OUTER, 0.5, (3,)),
    "split": lambda state, index: state + jax.random.gamma(jax.random.split(OUTER)[1], 2.0, (3,)),
    "jit": lambda state, index: state + jax.jit(draw)(),
    "scan": add_in_scan,
    "a loop": add_counted,
    "a branch of a constant": lambda state, index: (
        state + jax.lax.cond(jnp.sum(ONES) > 2, draw, lambda: ONES)
    ),
    "the first branch of a constant": lambda state, index: (
        state + jax.lax.cond(jnp.sum(ONES) > 9, lambda: ONES, draw)
    ),
    "a branch with a constant key first": lambda state, index: choose(add_key_first, OUTER, state),
    "a branch with a constant key last": lambda state, index: choose(add_key_last, state, OUTER),
    "a gradient of a checkpoint": lambda state, index: (
        state - jax.grad(jax.checkpoint(lambda s: jnp.sum(jnp.sin(s * draw()))))(state)
    ),
    "a rule for gradients": lambda state, index: add_noise(state),
    "dropout": lambda state, index: jnp.where(jax.random.bernoulli(OUTER, 0.5, (3,)), state, 0),
}


def add_carried(state, index):
    """Draws from a key that the loop carries, whose first value depends on the index."""

    def turn(carry, _):
        key, state = carry
        key, key_noise = jax.random.split(key)
        return (key, state + jax.random.normal(key_noise, (3,))), None

    return jax.lax.scan(turn, (jax.random.fold_in(OUTER, index), state), None, length=3)[0][1]


def add_late(state, index):
    """Draws from a key that is constant at the first turn alone."""

    def turn(carry, _):
        key, state = carry
        noise = jax.random.normal(key, (3,))
        return (jax.random.fold_in(key, index), state + noise), None

    return jax.lax.scan(turn, (OUTER, state), None, length=3)[0][1]


def add_for_a_while(state, index):
    """Draws as often as the index says."""
    return jax.lax.while_loop(
        lambda carry: carry[0] < index, lambda c: (c[0] + 1, c[1] + draw()), (0, state)
    )[1]


def add_to_a_limit(state, index):
    """Draws from a key of the index, in a loop whose length depends on two constants."""
    key, factor, limit = jax.random.fold_in(OUTER, index), jnp.prod(ONES), jnp.sum(ONES)
    return jax.lax.while_loop(
        lambda carry: carry[0] * factor < limit,
        lambda carry: (carry[0] + 1, add_key_first(key, carry[1])),
        (0.0, state),
    )[1]


def add_outer_for_a_while(state, index):
    """Draws from a constant key as often as the index says."""
    return jax.lax.while_loop(
        lambda carry: carry[0] < index,
        lambda carry: (carry[0] + 1, add_key_first(OUTER, carry[1])),
        (0, state),
    )[1]


def add_stacked(state, index):
    """Draws from a key that a loop stacks."""
    key = jax.random.fold_in(OUTER, index)
    _, keys = jax.lax.scan(lambda key, i: (key, jax.random.fold_in(key, i)), key, jnp.arange(2))
    return add_key_first(keys[1], state)


DIFFERENT = {
    "no draw": lambda state, index: state + 1,
    "the index": lambda state, index: (
        state + jax.random.normal(jax.random.fold_in(OUTER, index), (3,))
    ),
    "the state": lambda state, index: (
        state + jax.random.normal(jax.random.key(state[0].astype(int)), (3,))
    ),
    "jit": jax.jit(
        lambda state, index: state + jax.random.normal(jax.random.fold_in(OUTER, index), (3,))
    ),
    "what a loop carries": add_carried,
    "a key that a loop changes": add_late,
    "a loop of any length": add_for_a_while,
    "a loop of any length, a key outside": add_outer_for_a_while,
    "a loop whose length is constant": add_to_a_limit,
    "a key that a loop stacks": add_stacked,
    "a key that a constant chooses first": lambda state, index: add_key_first(
        choose_first(jax.random.fold_in(OUTER, index), OUTER), state
    ),
    "a key that a constant chooses last": lambda state, index: add_key_first(
        choose_first(OUTER, jax.random.fold_in(OUTER, index)), state
    ),
    "a branch with a key of the index first": lambda state, index: (
        state + choose(add_key_first, jax.random.fold_in(OUTER, index), ONES)
    ),
    "a branch with a key of the index last": lambda state, index: (
        state + choose(add_key_last, ONES, jax.random.fold_in(OUTER, index))
    ),
    "once": lambda state, index: jax.lax.cond(index == 0, draw, lambda: state),
    "shapes alone": lambda state, index: state + draw().shape[0],
    "a key that is only split": lambda state, index: (
        state + jax.random.key_data(jax.random.split(OUTER))[0, 0] % 2
    ),
}


def find(function, num_results=1):
    traced = jax.make_jaxpr(function, return_shape=True)(ONES, jnp.int32(0))
    return repeats_draws(Operations(*traced), num_results)


@pytest.mark.parametrize("name", REPEATED)
def test_draws_of_a_constant_key_are_found_wherever_they_are(name):
    function = REPEATED[name]
    assert find(function)
    step = jax.jit(function)
    first, second = (step(ONES, jnp.int32(index)) for index in range(2))
    np.testing.assert_array_equal(first, second)  # the same numbers at each step


@pytest.mark.parametrize("name", DIFFERENT)
def test_draws_that_change_with_the_state_or_the_index_are_not_found(name):
    assert not find(DIFFERENT[name])


def test_fixed_data_of_a_metric_is_not_found():
    """Nor noise that the step replaces before it is used."""
    assert not find(lambda state, index: (state * 2, jnp.sum((state - draw()) ** 2)))
    assert find(lambda state, index: (state * 2, jnp.sum(draw())), num_results=2)
    assert not find(lambda state, index: (draw() + state, index)[1] + state)


def test_a_constant_key_in_step_is_said(capsys):
    """For any value of static; the same draws in init or look are no fault."""
    note = "note: step draws random numbers from a constant key"

    def add_draw(state, hyper, index, noisy=True):
        return {"w": state["w"] + (draw() if noisy else 1.0)}, {"loss": 0.0}

    def begin(key, hyper, noisy=True):
        return {"w": jax.random.normal(key, (3,)) + draw()}

    def keep(state, hyper, index):
        return state, {"distance": jnp.sum((state["w"] - draw()) ** 2)}

    steps = {"init": begin, "step": add_draw, "hyper": {}}
    cases = (
        (steps, True),
        (steps | {"static": {"noisy": [False, True]}}, True),
        (steps | {"static": {"noisy": [False]}}, False),
        (steps | {"step": keep}, False),
        (steps | {"step": keep, "look": lambda state, hyper, key: draw()}, False),
        ({}, False),
    )
    for changes, is_said in cases:
        run(**changes, quiet=False)
        assert (note in capsys.readouterr().err) is is_said, changes
