"""Loops and conditions around branches, gates and weights, against the sums written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import contributions, ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import D, N, draw, tokens
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

W, U = draw(60, D, D), draw(61, D, D)


def test_exact_derivatives_pass_through_the_branches_of_loops_and_conditions(x64):
    """Each layer adds tanh(x W) by a scan, by the branch taken of a condition, and by the other."""
    weights = draw(62, 4, D, D)

    def layer(x, w, gain=1.0):
        return x + gain * checkpoint_name(jnp.tanh(x @ w), "attn")

    def fn(x):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights[:2])
        x = jax.lax.cond(x[0, 0] > -99, layer, lambda x, w: x, x, weights[2])
        return jax.lax.cond(x[0, 0] > 99, lambda x, w: x, layer, x, weights[3])

    x, direction = np.asarray(tokens()), np.asarray(tokens(1))
    sums = [direction]
    for w in np.asarray(weights):
        slope = 1 - np.tanh(x @ w) ** 2
        taken = [slope * (s @ w) for s in sums]
        sums = [a + b for a, b in zip([*sums, 0 * x], [0 * x, *taken], strict=True)]
        x = x + np.tanh(x @ w)
    result = contributions(fn, tokens(), "attn", direction=tokens(1), freeze=False)
    assert_close(result.output, x, atol=1e-12)
    assert_close(result.by_length, sums, atol=1e-12)


def scanned(make, h, g):
    """Weighs inside of a scan, token by token, what comes from outside of it."""
    return jax.lax.scan(lambda _, pair: (None, make(*pair)), None, (h, g))[1]


def chosen(make, h, g):
    """Weighs inside of a branch of a condition what comes from outside of it."""
    return jax.lax.cond(W[0, 0] > 9, lambda h, g: g, make, h, g)


GATES = {
    "tanh": (np.tanh, jnp.tanh),
    "relu": (lambda h: np.maximum(h, 0), jax.nn.relu),
    "silu": (lambda h: h / (1 + np.exp(-h)), jax.nn.silu),
}


@pytest.mark.parametrize("loop", [scanned, chosen])
def test_gates_remain_gates_where_they_enter_and_leave_a_loop(x64, loop):
    """f(h) sigmoid(g) is f(h)/h times h, whose paths take up to two branches, and sigmoid, which is
    not 0 at 0, is frozen."""

    def sum_of_gates(x):
        first = x + checkpoint_name(x @ W, "attn")
        h, weight = first + checkpoint_name(first @ W, "attn"), jax.nn.sigmoid(first @ U)
        total = 0 * x
        for number, (_, gate) in enumerate(GATES.values()):
            entering = loop(jnp.multiply, gate(h), weight)
            leaving = loop(lambda h, _, gate=gate: gate(h), h, weight) * weight
            total = total + (number + 1) * entering + 10 * (number + 1) * leaving
        return total

    x, w = np.asarray(tokens()), np.asarray(W)
    parts = np.stack([x, 2 * x @ w, x @ w @ w])
    h, weight = parts.sum(0), 1 / (1 + np.exp(-(x + x @ w) @ np.asarray(U)))
    quotient = sum((i + 1) * gate(h) / h for i, (gate, _) in enumerate(GATES.values()))
    sums = contributions(sum_of_gates, tokens(), "attn").by_length
    assert_close(sums, 11 * quotient * weight * parts, atol=1e-11)


@pytest.mark.parametrize("loop", [scanned, chosen])
def test_only_transcendental_gates_weigh_tokens_inside_a_loop(x64, loop):
    """tanh of scores weighs the values; rectified scores are states, and their product with the
    values is refused, as without the loop."""

    def attend(gate, loop, x):
        scores = gate(x @ W[:, :N])[None]  # of a synthesizer: linear
        return x + checkpoint_name(loop(jnp.matmul, scores, x[None])[0], "attn")

    x = tokens()
    without_loop = functools.partial(attend, jnp.tanh, lambda make, h, g: make(h, g))
    weighed = np.tanh(x @ W[:, :N]) @ x
    for fn in (without_loop, functools.partial(attend, jnp.tanh, loop)):
        assert_close(contributions(fn, x, "attn").by_length, [x, weighed], atol=1e-12)
    message = "a product of two values that depend on x"
    rectified = functools.partial(attend, jax.nn.relu, loop)
    is_refused(message, rc.function_contributions, rectified, x, branches="attn")
