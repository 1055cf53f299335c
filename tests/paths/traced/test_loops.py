"""Loops and conditions around branches, gates and weights, against the sums written out."""

import functools
import itertools

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


PAIR = draw(63, 2, D, D)
STACK = draw(64, 5, D, D)
PLACES = np.arange(1.0, 6)[:, None, None]


def name(a):
    return checkpoint_name(a, "attn")


def read_outside(x):
    h = x + name(x @ W)
    return jax.lax.scan(lambda c, w: (c + name(h @ w), None), x, PAIR)[0]


def count(x):
    return jax.lax.fori_loop(0, 2, lambda i, x: x + name(x @ PAIR[i]), x)


def forget(x):
    """The second value of the carry is a state before the first step, and 0 after it."""

    def step(carry, w):
        h, m = carry
        return (h + name((h + m) @ w), np.zeros((), h.dtype)), None

    return jax.lax.scan(step, (x, x[0, 0]), PAIR)[0][0]


def hand_over(x):
    """Two values of one branch are read outside of it in the next step."""

    def step(carry, w):
        y = carry[0] + carry[1] + carry[2]
        with jax.named_scope("attn"):
            a, b = y @ w, y @ w.T
        return (y, a, b), None

    return sum(jax.lax.scan(step, (x, jnp.zeros_like(x), jnp.zeros_like(x)), PAIR)[0])


def chain(x):
    def step(a, w):
        with jax.named_scope("attn"):
            return a @ w, None

    return jax.lax.scan(step, x, PAIR)[0]


def add_layers(reverse):
    """More steps than a scan has parts; each stacks its state, weighed by its place."""

    def step(x, w):
        x = x + name(x @ w)
        return x, x

    def fn(x):
        last, states = jax.lax.scan(step, x, STACK, reverse=reverse)
        return last + (PLACES * states).sum(0)

    return fn


def choose_of_three(index):
    cases = (lambda x: x, lambda x: x + name(x @ W), count)
    return lambda x: jax.lax.switch(index + 0 * x[0, 0].astype(jnp.int32), cases, x)


def choose_constant(limit, order):
    def fn(x):
        cases = (lambda x: name(x @ W), lambda x: jnp.ones_like(x))[::order]
        return x @ U + jax.lax.cond(x[0, 0] < limit, *cases, x)

    return fn


def rectify_by_an_operand(x):
    """0 is an argument of the case: f(0) = 0 of the rectifier is known in it."""

    def rectify(h, zero):
        return jax.nn.sigmoid(h @ U) * jnp.maximum(h, zero)

    return jax.lax.cond(W[0, 0] > 9, lambda h, zero: h, rectify, x + name(x @ W), 0.0)


def join(*lists):
    """Adds sums by length, lists of arrays of several lengths."""
    return [sum(parts) for parts in itertools.zip_longest(*lists, fillvalue=0)]


def take(parts, w):
    return [0, *(part @ w for part in parts)]


def add_layer(parts, w, more=()):
    return join(parts, take(join(parts, more), w))


def add_layers_by_hand(x, reverse):
    last, total = [x], []
    for place, w in list(zip(PLACES.ravel(), STACK, strict=True))[:: -1 if reverse else 1]:
        last = add_layer(last, w)
        total = join(total, [place * part for part in last])
    return join(last, total)


def hand_over_by_hand(x):
    y = [x]
    for w in PAIR:
        y = join(y, take(y, w), take(y, w.T))
    return y


def rectify_by_hand(x):
    h = x + x @ W
    weight = (h > 0) / (1 + np.exp(-h @ U))
    return [weight * x, weight * (x @ W)]


CONSTANTS = (jnp.zeros_like, jnp.ones_like, lambda x: name(x @ W))
CASES = {
    "a state from outside": (
        read_outside,
        lambda x: join([x], *(take([x, x @ W], w) for w in PAIR)),
    ),
    "a counter": (count, lambda x: add_layer(add_layer([x], PAIR[0]), PAIR[1])),
    "five layers": (add_layers(False), lambda x: add_layers_by_hand(x, False)),
    "five layers from the last": (add_layers(True), lambda x: add_layers_by_hand(x, True)),
    "a state that becomes a number": (
        forget,
        lambda x: add_layer(add_layer([x], PAIR[0], [x[0, 0]]), PAIR[1]),
    ),
    "values of a branch read outside": (hand_over, hand_over_by_hand),
    "a branch that reads itself": (chain, lambda x: [0, 0, x @ PAIR[0] @ PAIR[1]]),
    "the first of three": (choose_of_three(0), lambda x: [x, 0, 0]),
    "the second of three": (choose_of_three(1), lambda x: [x, x @ W, 0]),
    "the last of three": (
        choose_of_three(2),
        lambda x: add_layer(add_layer([x], PAIR[0]), PAIR[1]),
    ),
    "the only state of three": (
        lambda x: x @ U + jax.lax.switch(2 + 0 * x[0, 0].astype(jnp.int32), CONSTANTS, x),
        lambda x: [x @ U, x @ W],
    ),
    "not the constant": (choose_constant(99, 1), lambda x: [x @ U, x @ W]),
    "the constant": (choose_constant(-99, 1), lambda x: [x @ U, 0]),
    "the constant first": (choose_constant(99, -1), lambda x: [x @ U, 0]),
    "not the constant that is first": (choose_constant(-99, -1), lambda x: [x @ U, x @ W]),
    "a number for a case": (rectify_by_an_operand, rectify_by_hand),
}


def test_carries_and_cases_pass_their_paths(x64):
    x = np.asarray(tokens())
    sums = jax.jit(
        lambda x: {
            case: rc.function_contributions(fn, x, branches="attn").by_length
            for case, (fn, _) in CASES.items()
        }
    )(x)
    for case, (_, list_sums) in CASES.items():
        want = np.zeros(sums[case].shape)  # a loop may leave room for lengths that no path has
        for length, part in enumerate(list_sums(x)):
            want[length] = part
        assert_close(sums[case], want, atol=1e-11, err_msg=case)
