"""Choices, products and functions of two states, against their quotients written out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import contributions, ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import D, N, draw, tokens
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

B, U, V = draw(70, D, D), draw(71, D, D), draw(72, D, D)
KEEP = np.random.default_rng(7).random((N, D)) < 0.5
silu, sigmoid, relu = jax.nn.silu, jax.nn.sigmoid, jax.nn.relu
frozen = jax.lax.stop_gradient


def states(x):
    """Three states, whose paths take the branch or skip it."""
    h = x + checkpoint_name(x @ B, "attn")
    return h, h @ U, h @ V


# What multiplies a third state is a constant of the pass, whatever it is made of.
WEIGHTS = {
    "a comparison": lambda h, g: h > g,
    "two comparisons": lambda h, g: (h > 0) & (g < 0),
    "gates of two states": lambda h, g: jnp.tanh(h) + silu(g),
    "a product of two gates": lambda h, g: sigmoid(h) * sigmoid(g),
    "a choice of two gates": lambda h, g: jnp.where(KEEP, sigmoid(h), sigmoid(g)),
    "twice a choice of two gates": lambda h, g: jnp.where(KEEP, sigmoid(h), sigmoid(g)) * 2,
    "a choice by the other": lambda h, g: jnp.where(g > h, sigmoid(h), 0),
    "numbers by a comparison": lambda h, g: jnp.where(h > g, 2.0, 3.0),
    "the larger of two steps": lambda h, g: jnp.maximum((h > 0) * 1.0, (g > 0) * 1.0),
    "the larger of a step and a constant": lambda h, g: jnp.maximum((h > 0) * 1.0, 0.5),
    "a power": lambda h, g: (1 + h * h) ** sigmoid(g),
    "an angle": jnp.arctan2,
    "an exponential by a constant": lambda h, g: jnp.exp(h) * frozen(g),
    "a gate by what is not 0": lambda h, g: sigmoid(h) / (1 + g * g),
    "a constant by a state": lambda h, g: 1 / (2 + jnp.tanh(g)),
    "what a product was cut to": lambda h, g: jnp.maximum(h * g, 0),
    "a function of a product": lambda h, g: jnp.tanh(h * g),
    "a statistic of two": lambda h, g: jnp.max(h * g, -1, keepdims=True),
    "joined gates": lambda h, g: jnp.concatenate([sigmoid(h), sigmoid(g)])[1 : N + 1],
    "a rounded state": lambda h, g: jnp.round(h) + jnp.sign(g),
    "whole numbers": lambda h, g: h.astype(jnp.int32),
    "a power of a constant": lambda h, g: jnp.power(3.0, h),
    "a function of a statistic": lambda h, g: jnp.tanh(jnp.max(h, -1, keepdims=True)),
    "a choice of statistics": lambda h, g: jnp.where(
        KEEP[:, :1], jnp.max(h, -1, keepdims=True), jnp.min(g, -1, keepdims=True)
    ),
    "numbers by a sign": lambda h, g: jnp.where(h > 0, 2.0, 3.0),
    "a comparison with a statistic": lambda h, g: h < jnp.max(h, -1, keepdims=True),
    "a comparison with what is frozen": lambda h, g: h > frozen(g),
    "a constant by a product": lambda h, g: 1 / (3 + h * g),
    "what is frozen by a gate": lambda h, g: frozen(g) / (2 + jnp.tanh(h)),
    "a constant by joined gates": lambda h, g: (
        1 / (2 + jnp.concatenate([jnp.tanh(h[:2]), sigmoid(g[2:])]))
    ),
    "a statistic by a gate": lambda h, g: jnp.max(h, -1, keepdims=True) / (2 + jnp.tanh(g)),
}


def quotient(fn, h):
    return fn(h) / h


# (The function, its paths as weights of the paths of h and of those of g)
STATES = {
    "the larger": (jnp.maximum, lambda h, g: (h > g, h <= g)),
    "the larger of a state and a step": (
        lambda h, g: jnp.maximum(h, (g > 0) * 1.0),
        lambda h, g: (h > (g > 0), 0),
    ),
    "the smaller": (jnp.minimum, lambda h, g: (h < g, h >= g)),
    "the larger of a state and a gate": (
        lambda h, g: jnp.maximum(h, jnp.tanh(g)),
        lambda h, g: (h > jnp.tanh(g), (h <= jnp.tanh(g)) * quotient(jnp.tanh, g)),
    ),
    "a state and a sum of two steps": (
        lambda h, g: g + ((h > 0) * 1.0 + (h > 1) * 1.0),
        lambda h, g: (0, 1),
    ),
    "a choice": (lambda h, g: jnp.where(KEEP, h, g), lambda h, g: (KEEP, ~KEEP)),
    "a choice of gates": (
        lambda h, g: jnp.where(KEEP, jnp.tanh(h), silu(g)),
        lambda h, g: (KEEP * quotient(jnp.tanh, h), ~KEEP * sigmoid(g)),
    ),
    "three times a choice of gates": (
        lambda h, g: 3 * jnp.where(KEEP, jnp.tanh(h), silu(g)),
        lambda h, g: (3 * KEEP * quotient(jnp.tanh, h), 3 * ~KEEP * sigmoid(g)),
    ),
    # The number of a function h + 3 stays outside of its quotient, as in relu(h + 3).
    "a shifted state where it is positive": (
        lambda h, g: jnp.where(h + 3 > 0, h + 3, 0),
        lambda h, g: (h > -3, 0),
    ),
    "a shifted state where it is positive, a tenth elsewhere": (
        lambda h, g: jnp.where(h > 3, h - 3, 0.1 * (h - 3)),
        lambda h, g: (np.where(h > 3, 1, 0.1), 0),
    ),
    "a state where the other is positive": (
        lambda h, g: jnp.where(g > 0, h, 0),
        lambda h, g: (g > 0, 0),
    ),
    "a gate where the other is positive, by a gate": (
        lambda h, g: jnp.where(g > 0, jnp.tanh(h), 0) * sigmoid(g),
        lambda h, g: ((g > 0) * quotient(jnp.tanh, h) * sigmoid(g), 0),
    ),
    "a gate where it is kept, by a gate": (
        lambda h, g: sigmoid(g) * jnp.where(KEEP, jnp.tanh(h), 0),
        lambda h, g: (KEEP * quotient(jnp.tanh, h) * sigmoid(g), 0),
    ),
    "gates of two states": (
        lambda h, g: jnp.tanh(h) - silu(g),
        lambda h, g: (quotient(jnp.tanh, h), -sigmoid(g)),
    ),
    "a gate by a gate that is not 0": (
        lambda h, g: jnp.tanh(h) / (1 + sigmoid(g)),
        lambda h, g: (quotient(jnp.tanh, h) / (1 + sigmoid(g)), 0),
    ),
    "a state by a statistic": (
        lambda h, g: h / jnp.max(jnp.abs(g), -1, keepdims=True),
        lambda h, g: (1 / jnp.max(jnp.abs(g), -1, keepdims=True), 0),
    ),
    "a frozen factor": (lambda h, g: frozen(g) * h, lambda h, g: (g, 0)),
    "a function of what has a frozen factor": (
        lambda h, g: jnp.tanh(frozen(g) * h),
        lambda h, g: (jnp.tanh(g * h) / h, 0),
    ),
    "a barrier": (lambda h, g: sum(jax.lax.optimization_barrier((h, 2 * g))), lambda h, g: (1, 2)),
    "a state and a step of it": (
        lambda h, g: h + jnp.where(h > 0, 1.0, 0.0),
        lambda h, g: (1, 0),
    ),
    "a state and a choice of steps": (
        lambda h, g: g + jnp.where(h > 0, (h > 1) * 1.0, 0.0),
        lambda h, g: (0, 1),
    ),
    "the larger of a state and its cosine": (
        lambda h, g: jnp.maximum(jnp.cos(h), h),
        lambda h, g: (jnp.maximum(jnp.cos(h), h) / h, 0),
    ),
    "a gate where it is kept, 1 elsewhere": (
        lambda h, g: jnp.where(KEEP, jnp.tanh(h), 1.0),
        lambda h, g: (KEEP * quotient(jnp.tanh, h), 0),
    ),
    "a number and a gate": (
        lambda h, g: jax.lax.add(2.0, jnp.tanh(h)),
        lambda h, g: (quotient(jnp.tanh, h), 0),
    ),
    "a gate by the product of a statistic": (
        lambda h, g: jnp.tanh(h) * jnp.max(g, -1, keepdims=True),
        lambda h, g: (quotient(jnp.tanh, h) * jnp.max(g, -1, keepdims=True), 0),
    ),
    "a state by a product": (lambda h, g: h / (3 + h * g), lambda h, g: (1 / (3 + h * g), 0)),
    "a state and a function of a statistic": (
        lambda h, g: h + jnp.tanh(jnp.max(g, -1, keepdims=True)),
        lambda h, g: (1, 0),
    ),
    "a state and numbers in the order of a product": (
        lambda h, g: h + jax.lax.sort((h * g, KEEP * 1.0), num_keys=1)[1],
        lambda h, g: (1, 0),
    ),
    # A number that was shifted by what is frozen, then scaled or moved, has a frozen exponential.
    "a shifted exponential, scaled": (
        lambda h, g: h + jnp.exp(2 * (h - frozen(g))),
        lambda h, g: (1, 0),
    ),
    "a shifted exponential, scaled by what is frozen": (
        lambda h, g: h + jnp.exp(frozen(g) * (h - frozen(g))),
        lambda h, g: (1, 0),
    ),
    "a shifted exponential of moved entries": (
        lambda h, g: h + jnp.exp2(jnp.roll(g - frozen(h), 1)),
        lambda h, g: (1, 0),
    ),
    "a state and a function of a step": (
        lambda h, g: h + jnp.tanh((g > 0) * 1.0),
        lambda h, g: (1, 0),
    ),
    "a state and joined steps": (
        lambda h, g: h + jnp.concatenate([(g > 0)[:2] * 1.0, (h > 0)[2:] * 1.0]),
        lambda h, g: (1, 0),
    ),
    "a state and steps where they are kept": (
        lambda h, g: h + jnp.where(KEEP, (g > 0) * 1.0, 0.0),
        lambda h, g: (1, 0),
    ),
    "sums of entries": (
        lambda h, g: jnp.cumsum(h, -1)[:, -1:] - g,
        lambda h, g: (jnp.ones((D, D)), -1),
    ),
}


def test_what_multiplies_a_state_is_a_constant_of_the_pass(x64):
    """All at once, in one program."""
    x = tokens()

    def fn(x):
        h, g, v = states(x)
        return jnp.stack([weight(h, g) * v for weight in WEIGHTS.values()])

    h, g, _ = states(x)
    sums = contributions(fn, x, "attn").by_length
    for name, weight, result in zip(WEIGHTS, WEIGHTS.values(), sums.swapaxes(0, 1), strict=True):
        want = np.asarray(weight(h, g)) * np.stack([x @ V, x @ B @ V])
        assert_close(result, want, atol=1e-12, err_msg=name)


def test_a_function_of_two_states_passes_the_paths_of_each(x64):
    x = tokens()

    def fn(x):
        h, g, _ = states(x)
        return jnp.stack([fn(h, g) for fn, _ in STATES.values()])

    h, g, _ = map(np.asarray, states(x))
    parts = np.stack([x, x @ B])
    sums = contributions(fn, x, "attn").by_length
    for name, (_, weigh), result in zip(STATES, STATES.values(), sums.swapaxes(0, 1), strict=True):
        h_factor, g_factor = (np.asarray(a) for a in weigh(h, g))
        passed = parts @ h_factor if h_factor.shape == (D, D) else h_factor * parts
        assert_close(result, passed + g_factor * (parts @ U), atol=1e-12, err_msg=name)


# Linear in h once the other is frozen: (the function, the same of one part of h)
TOKENS = {
    "rows in the order of another state": (
        lambda h, g: h[jnp.argsort(g[:, 0])],
        lambda h, g, part: part[np.argsort(g[:, 0])],
    ),
    "rows in the order of a product": (
        lambda h, g: h[jnp.argsort((h * g)[:, 0])],
        lambda h, g, part: part[np.argsort((h * g)[:, 0])],
    ),
    "a sum over tokens of a gate": (
        lambda h, g: jnp.tanh(h)[None].sum((0, 1)) + jnp.zeros((N, 1)),
        lambda h, g, part: np.tile((np.tanh(h) / h * part).sum(0), (N, 1)),
    ),
    "weights by powers of 3": (
        lambda h, g: (lambda p: p / p.sum(-1, keepdims=True))(jnp.power(3.0, g @ U[:, :N])) @ h,
        lambda h, g, part: (lambda p: p / p.sum(-1, keepdims=True))(3.0 ** (g @ U[:, :N])) @ part,
    ),
    "weights by quotients": (
        lambda h, g: (1 / (1 + (g @ V) ** 2))[:, :N] @ h,
        lambda h, g, part: (1 / (1 + (g @ V) ** 2))[:, :N] @ part,
    ),
    "weights by powers of transcendental functions": (
        lambda h, g: (jnp.tanh(g) ** 2 + jnp.sqrt(jnp.exp(g)))[:, :N] @ h,
        lambda h, g, part: (np.tanh(g) ** 2 + np.exp(g / 2))[:, :N] @ part,
    ),
    "weights by products of gates": (
        lambda h, g: (sigmoid(g) * sigmoid(g @ V))[:, :N] @ h,
        lambda h, g, part: (sigmoid(g) * sigmoid(g @ V))[:, :N] @ part,
    ),
}


def test_rows_in_an_order_and_weights_of_tokens_pass_the_paths_of_a_state(x64):
    x = tokens()

    def fn(x):
        h, g, _ = states(x)
        return jnp.stack([fn(h, g) for fn, _ in TOKENS.values()])

    h, g, _ = map(np.asarray, states(x))
    sums = contributions(fn, x, "attn").by_length
    for name, (_, pass_part), result in zip(
        TOKENS, TOKENS.values(), sums.swapaxes(0, 1), strict=True
    ):
        want = [pass_part(h, g, np.asarray(part)) for part in (x, x @ B)]
        assert_close(result, want, atol=1e-12, err_msg=name)


PRODUCT = "a product of two values that depend on x"


@parametrize_refusals(
    [
        (lambda h, g: h * g, PRODUCT),
        (lambda h, g: jax.lax.integer_pow(h, 1) * g, PRODUCT),
        (lambda h, g: h ** jnp.float32(1) * g, PRODUCT),
        (lambda h, g: jnp.tanh(h) * silu(g), PRODUCT),
        (lambda h, g: jnp.flip(jnp.tanh(h), 0) * jnp.flip(silu(h), 1), PRODUCT),
        (lambda h, g: (h * g) / (1 + h * h), PRODUCT),
        (lambda h, g: (h * g) * h, PRODUCT),
        (lambda h, g: h + h * g, PRODUCT),
        (lambda h, g: jnp.where(KEEP, h, h * g), PRODUCT),
        (lambda h, g: -(h * g).T, PRODUCT),
        (lambda h, g: jnp.maximum(sigmoid(h), sigmoid(g)) * h, PRODUCT),
        (lambda h, g: sigmoid(h) * sigmoid(g), "a product of two functions of x"),
        (lambda h, g: sigmoid(h) @ sigmoid(g).T, "a product of two functions of x"),
        (lambda h, g: h + sigmoid(h) * sigmoid(g), "a product of two functions of x"),
        (lambda h, g: h @ relu(g).T, PRODUCT + r" \(dot_general\)"),
        (
            lambda h, g: jnp.concatenate([jnp.tanh(h[:2]), relu(h[2:])]) @ g.T,
            PRODUCT + r" \(dot_general\)",
        ),
        (lambda h, g: jnp.maximum(jnp.tanh(h), 0) @ g.T, PRODUCT + r" \(dot_general\)"),
        (lambda h, g: jnp.tanh(h) ** 2 @ relu(h).T + relu(h) ** 2 @ g.T, PRODUCT),
        (lambda h, g: jnp.where(h > 0, 1.0, 0.0) @ g.T, PRODUCT + r" \(dot_general\)"),
        (
            lambda h, g: jax.lax.conv(h[None, None], relu(g)[None, None], (1, 1), "SAME")[0, 0],
            PRODUCT + r" \(conv_general_dilated\)",
        ),
        (lambda h, g: (jnp.tanh(h) + U[:N]) * jnp.tanh(g), PRODUCT),
        (
            lambda h, g: jnp.concatenate([jnp.tanh(h[:2]), silu(h[2:])]) * jnp.tanh(g),
            PRODUCT,
        ),
        (lambda h, g: 2.0 * jnp.exp(g), "exp of a value that depends on x"),
        (lambda h, g: jnp.exp2(g), "exp2 of a value that depends on x"),
        (
            lambda h, g: h + jnp.exp(jnp.cumsum(g - frozen(h), -1)),
            "exp of a value that depends on x",
        ),
        (lambda h, g: jnp.power(3.0, g), "pow of a value that depends on x"),
        (
            lambda h, g: jnp.exp(g) * jax.lax.cond(h[0, 0] > 0, lambda: 1.0, lambda: 2.0),
            "only through frozen values",
        ),
        (lambda h, g: jnp.arctan2(h, g), "atan2 of values that depend on x"),
        (lambda h, g: jnp.maximum(h, jnp.exp(g)), "max of two values"),
        (lambda h, g: jnp.max(h, -1), "reduce_max of values that depend on x"),
        (lambda h, g: jnp.exp(g), "exp of a value that depends on x"),
        (lambda h, g: jnp.where(h > g, 1.0, 2.0), "only through frozen values"),
        (lambda h, g: jnp.exp(h) * frozen(g), "only through frozen values"),
    ]
)
def test_what_is_no_sum_of_paths_is_refused_with_its_cause(arguments, message):
    (fn,) = arguments

    def last(x):
        h, g, _ = states(x)
        return fn(h, g)

    is_refused(message, rc.function_contributions, last, tokens(), branches="attn")
