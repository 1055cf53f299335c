"""Paths through scans: their steps count as those of a loop, at the cost of a scan."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import (
    W8,
    attn,
    contributions,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import D, draw, tokens
from tests.support.closeness import assert_close
from tests.support.marks import full_but


@pytest.mark.full
@pytest.mark.parametrize("reverse", full_but([False, True], True))
def test_a_scan_is_the_loop_of_its_steps(x64, reverse):
    """It has more steps than parts; what each step returns is read as well."""
    weights, x = draw(30, 7, D, D, scale=0.3), tokens()

    def step(x, w):
        x = x + checkpoint_name(x @ w, "attn")
        x = x + checkpoint_name(jax.nn.gelu(x), "mlp")
        return x, x[:2] @ w

    def scanned(weights, x):
        last, readings = jax.lax.scan(step, x, weights, reverse=reverse)
        return last.at[:2].add((SCALES * readings).sum(0))

    def looped(weights, x):
        readings = [None] * len(weights)
        for i in reversed(range(len(weights))) if reverse else range(len(weights)):
            x, readings[i] = step(x, weights[i])
        return x.at[:2].add((SCALES * jnp.stack(readings)).sum(0))

    kinds = itertools.product(("attn", {"attention": "attn", "mlp": "mlp"}), (None, 2))
    kinds = [{"branches": branches, "longest": longest} for branches, longest in kinds]
    results = [
        jax.jit(
            lambda x, f=f: [
                rc.function_contributions(functools.partial(f, weights), x, **kind)
                for kind in kinds
            ]
        )(x)
        for f in (scanned, looped)
    ]
    for scan_sums, loop_sums in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close(scan_sums, loop_sums, atol=1e-11)
    empty = contributions(functools.partial(scanned_alone, step), x, "attn", longest=1)
    assert_close(empty.by_length, [x, x @ W8], atol=1e-12)

    def compute_size(weights, f):
        sums = rc.function_contributions(functools.partial(f, weights), x, branches="attn")
        return jnp.sum(sums.by_length[3] ** 2)

    slope = jax.jit(jax.grad(compute_size), static_argnums=1)
    assert_close(slope(weights, scanned), slope(weights, looped), rtol=1e-9, atol=1e-9)


def test_a_scan_starts_from_a_constant_and_weighs_it_by_exponentials(x64):
    """As a selective state space does: s ← exp(−Δ) s + Δ x with Δ a softplus."""
    x = tokens()

    def frozen(x):
        steps = jax.nn.softplus(x @ W8)
        return jnp.exp(-steps), steps

    def fn(x):
        decay, steps = frozen(x)

        def step(state, inputs):
            state = inputs[0] * state + inputs[1]
            return state, state

        states = jax.lax.scan(step, jnp.zeros(D), (decay, steps * x))[1]
        return x + checkpoint_name(states, "attn")

    state, states = np.zeros(D), []
    for decay, step, token in zip(*frozen(x), x, strict=True):
        state = decay * state + step * token
        states.append(state)
    assert_close(contributions(fn, x, "attn").by_length, [x, states], atol=1e-12)


SCALES = draw(31, 7, 1, 1)


def scanned_alone(step, x):
    """No steps at all, then a branch."""
    return attn(jax.lax.scan(step, x, jnp.zeros((0, D, D)))[0]) + x


@pytest.mark.full
def test_a_scan_copies_no_weights_and_its_gradient_keeps_no_steps():
    weights, x = jnp.ones((32, 64, 64)), jnp.ones((2, 64))

    def sums(weights):
        def step(x, w):
            return x + checkpoint_name(jnp.tanh(x @ w) @ w.T, "attn"), None

        fn = lambda x: jax.lax.scan(step, x, weights)[0]  # noqa: E731
        return rc.function_contributions(fn, x, branches="attn").by_length

    def loss(weights):
        return jnp.sum(sums(weights)[3] ** 2)

    carry = 33 * x.nbytes
    memory = [
        jax.jit(f).lower(weights).compile().memory_analysis().temp_size_in_bytes
        for f in (sums, jax.grad(loss))
    ]
    assert memory[0] < 0.4 * weights.nbytes
    assert memory[1] < 32 * carry + weights.nbytes + 0.4 * weights.nbytes
