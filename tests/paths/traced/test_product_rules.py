"""Products of values that depend on the start: gates, quotients, experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import (
    W8,
    contributions,
    ranks_of_others as ranks_of_others,
)
from tests.oracles.jax_layers import D, draw, tokens
from tests.support.closeness import assert_close

W, B = np.random.default_rng(0).normal(size=(2, 4, 4))


GATES = {
    "relu by max": lambda u: jnp.maximum(u, 0),
    "relu by max, turned round": lambda u: jnp.maximum(0, u),
    "relu by where": lambda u: jnp.where(u > 0, u, 0),
    "relu by a mask": lambda u: u * (u > 0),
    "relu by abs": lambda u: (u + jnp.abs(u)) / 2,
    "relu of jax": jax.nn.relu,
    "relu squared": lambda u: jax.nn.relu(u) ** 2,
    "relu times relu": lambda u: jax.nn.relu(u) * jax.nn.relu(u),
    "square": lambda u: u * u,
    "cube": lambda u: u**3,
    "product of three": lambda u: u * u * u,
    "float power": lambda u: jnp.abs(u) ** 2.5,
    "float power of 1": lambda u: u ** jnp.float32(1.0),
    "integer power of 1": lambda u: jax.lax.integer_pow(u, 1),
    "silu": jax.nn.silu,
    "silu by division": lambda u: u / (1 + jnp.exp(-u)),
    "silu by logistic": lambda u: u * jax.lax.logistic(u),
    "silu by logistic, turned round": lambda u: jax.lax.logistic(u) * u,
    "tanh between axes of one entry": lambda u: jnp.tanh(u)[None, None].sum((0, 1)),
    "silu by a quotient": lambda u: u * (1 / (1 + jnp.exp(-u))),
    "silu by tanh": lambda u: 0.5 * u * (1 + jnp.tanh(u / 2)),
    "silu by reshapes": lambda u: (u.ravel() * jax.nn.sigmoid(u).ravel()).reshape(u.shape),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu by tanh": jax.nn.gelu,
    "gelu by hand": lambda u: 0.5 * u * (1 + jnp.tanh(0.79788456 * (u + 0.044715 * u**3))),
    "gelu by Horner": lambda u: 0.5 * u * (1 + jnp.tanh(u * (0.7978 + 0.0356 * u * u))),
    "gelu by erf": lambda u: 0.5 * u * (1 + jax.lax.erf(u / 2**0.5)),
    "quick gelu": lambda u: u * jax.nn.sigmoid(1.702 * u),
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "shifted softplus": lambda u: jax.nn.softplus(u) - jnp.log(2.0),
    "softsign": jax.nn.soft_sign,
    "hard swish": jax.nn.hard_swish,
    "hard sigmoid": jax.nn.hard_sigmoid,
    "hard tanh": jax.nn.hard_tanh,
    "relu6": jax.nn.relu6,
    "leaky relu": jax.nn.leaky_relu,
    "leaky relu by max": lambda u: jnp.maximum(u, 0.1 * u),
    "clamp": lambda u: jax.lax.clamp(jnp.float64(-0.5), u, jnp.float64(0.7)),
    "remainder": lambda u: jax.lax.rem(u, jnp.full_like(u, 0.7)),
    "prelu": lambda u: jnp.where(u > 0, u, jnp.abs(B[0]) * u),
    "tanh": jnp.tanh,
    "tanh by exponentials": lambda u: (jnp.exp(u) - jnp.exp(-u)) / (jnp.exp(u) + jnp.exp(-u)),
    "sigmoid": jax.nn.sigmoid,
    "sigmoid by exponentials": lambda u: jnp.exp(u) / (1 + jnp.exp(u)),
    "exponential times cosine": lambda u: jnp.exp(u) * jnp.cos(u),
    "log sigmoid": jax.nn.log_sigmoid,
    "squareplus": jax.nn.squareplus,
    "expm1": jnp.expm1,
    "exp minus 1": lambda u: jnp.exp(u) - 1,
    "sine": jnp.sin,
    "snake": lambda u: u + jnp.sin(u) ** 2,
    "bump": lambda u: u * jnp.exp(-jnp.square(u)),
    "arctan": jnp.arctan,
    "abs": jnp.abs,
    "u (u + 1)": lambda u: u * (u + 1),
    "polynomial": lambda u: u + 0.3 * u**2 - 0.1 * u**4,
    "clip": lambda u: jnp.clip(u, -0.5, 0.7),
    "select": lambda u: jnp.select([u < -1, u < 1], [0 * u, u], 2 * u),
    "root with a sign": lambda u: jnp.sign(u) * jnp.sqrt(jnp.abs(u)),
    "log cosh": lambda u: jnp.log(jnp.cosh(u)),
    "two scales": lambda u: jnp.tanh(2 * u) * jax.nn.sigmoid(u) + jax.nn.relu(2 * u) * u,
    "u times rsqrt": lambda u: u * jax.lax.rsqrt(1 + u * u),
    "rounded": lambda u: jnp.round(4 * u) / 4,
    "under jit and remat": jax.jit(jax.checkpoint(lambda u: u / (1 + jnp.exp(-u)))),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_is_its_quotient_times_its_argument(x64, name):
    act, x = GATES[name], np.random.default_rng(3).normal(size=(3, 4))

    def fn(x):
        with jax.named_scope("branch"):
            a = x @ B
        return act((x + a) @ W + B[1]) @ W

    result = rc.function_contributions(fn, x, branches="branch")
    h = (x + x @ B) @ W + B[1]
    gate = np.asarray(act(h)) / h
    want = np.stack([(gate * (c @ W)) @ W for c in (x, x @ B)])
    assert_close(result.by_length, want, rtol=1e-9, atol=1e-9)


@pytest.mark.full
def test_a_gate_at_zero_is_its_slope(x64):
    x = np.asarray([[0.0, 1.0, -2.0, 0.0]])

    def fn(act, x):
        return act(x) + checkpoint_name(x @ W, "b")

    for act, slope in (
        (jnp.tanh, 1.0),
        (jax.nn.relu, 0.0),
        (jnp.expm1, 1.0),
        (jnp.square, 0.0),
        (jnp.cbrt, 0.0),
    ):
        result = rc.function_contributions(
            functools.partial(fn, act), x, branches="b", direction=np.ones_like(x)
        )
        assert np.all(np.isfinite(result.by_length))
        assert_close(result.by_length[0][0, [0, 3]], slope)


def test_a_value_is_a_gate_and_a_state_at_once(x64):
    """Here silu(x W) multiplies one value and is added to another."""
    x = np.random.default_rng(5).normal(size=(3, 4))

    def fn(x):
        gate = jax.nn.silu(x @ W)
        return gate * (x @ B) + checkpoint_name(gate, "b") @ W

    result = rc.function_contributions(fn, x, branches="b")
    frozen = np.asarray(jax.nn.silu(x @ W))
    assert_close(result.by_length[0], frozen * (x @ B), atol=1e-12)
    assert_close(result.by_length[1], frozen @ W, atol=1e-12)


OTHER = np.random.default_rng(11).normal(size=(3, 4))


TWO_GATES = {  # the factor that is frozen, the gate that passes
    "sigmoid times tanh": (lambda u: jax.nn.sigmoid(u @ B), jnp.tanh),
    "1 + tanh times tanh": (lambda u: 1 + jnp.tanh(u @ B), jnp.tanh),
    "2 + 2 tanh times tanh": (lambda u: 2 * (1 + jnp.tanh(u @ B)), jnp.tanh),
    "half of 1 + tanh times tanh": (lambda u: (1 + jnp.tanh(u @ B)) / 2, jnp.tanh),
    "cosine times squared relu": (lambda u: jnp.cos(u @ B), lambda u: jax.nn.relu(u) ** 2),
    "sigmoid times relu of a computed 0": (
        lambda u: jax.nn.sigmoid(u @ B),
        lambda u: jnp.maximum(u, -jnp.zeros(u.size).reshape(u.shape)),
    ),
    "sigmoid times a constant": (lambda u: OTHER, jax.nn.sigmoid),
    "1 - sigmoid times a constant": (lambda u: OTHER, lambda u: 1 - jax.nn.sigmoid(u)),
    "sigmoid times weights": (jax.nn.softmax, jax.nn.sigmoid),
}


@pytest.mark.parametrize("name", TWO_GATES)
def test_of_two_gates_the_one_that_is_not_0_at_0_is_frozen(x64, name):
    """`tests/torch/test_path_lengths_written_out.py` has the same rule."""
    scale, act = TWO_GATES[name]
    x = np.random.default_rng(3).normal(size=(3, 4))

    def fn(x):
        h = x + checkpoint_name(x @ B, "branch")
        return (scale(h) * act(h)) @ W

    result = rc.function_contributions(fn, x, branches="branch")
    h = x + x @ B
    frozen = np.asarray(scale(h) * act(h)) / h
    want = np.stack([(frozen * c) @ W for c in (x, x @ B)])
    assert_close(result.by_length, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pool", [lambda g, h: g.T @ h, lambda g, h: (h.T @ g).T])
def test_a_gate_of_one_entry_for_each_token_weighs_the_tokens(x64, pool):
    """Its other axis has one entry, before or behind the shared one."""
    x = np.random.default_rng(3).normal(size=(3, 4))

    def fn(x):
        h = x + checkpoint_name(x @ B, "branch")
        return pool(jax.nn.relu(h @ W[:, :1]), h)

    result = rc.function_contributions(fn, x, branches="branch")
    gate = np.maximum((x + x @ B) @ W[:, :1], 0)
    assert_close(result.by_length, [gate.T @ c for c in (x, x @ B)], atol=1e-12)


@pytest.mark.parametrize("branches", ["attn", {"attention": "attn", "mlp": "mlp"}])
@pytest.mark.parametrize("freeze", [True, False])
def test_experts_by_a_grouped_product(x64, branches, freeze):
    """`ragged_dot` has no rule for two axes of `jax.vmap`; tokens are sorted by their expert."""
    x, up, router = tokens(), draw(20, 2, D, 7), draw(21, D, 2)
    up, down = jnp.asarray(up), jnp.asarray(draw(22, 2, 7, D))

    def grouped(x):
        x = x + checkpoint_name(x @ W8, "attn")
        expert = jnp.argmax(x @ router, -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=2).astype(jnp.int32)
        h = jax.nn.gelu(jax.lax.ragged_dot(x[order], up, sizes))
        out = jax.lax.ragged_dot(h, down, sizes)
        return x + checkpoint_name(jnp.zeros_like(x).at[order].set(out), "mlp")

    def gathered(x):
        x = x + checkpoint_name(x @ W8, "attn")
        expert = jnp.argmax(x @ router, -1)
        h = jax.nn.gelu(jnp.einsum("nd,ndf->nf", x, up[expert]))
        return x + checkpoint_name(jnp.einsum("nf,nfd->nd", h, down[expert]), "mlp")

    result, want = (contributions(f, x, branches, freeze=freeze) for f in (grouped, gathered))
    assert_close(result.by_length, want.by_length, atol=1e-12)
    assert_close(result.total, gathered(x), atol=1e-12)


def test_what_was_refused_as_a_product_is_right_with_one_stop_gradient(x64):
    x = tokens()

    def fn(x):
        return x + checkpoint_name(jax.lax.stop_gradient(x @ x.T) @ x, "attn")

    result = rc.function_contributions(fn, x, branches="attn")
    assert_close(result.by_length, [x, x @ x.T @ x], atol=1e-12)


@pytest.mark.parametrize(
    ("act", "slope"),
    [(jnp.square, 1), (lambda u: u * u, 1), (lambda u: u**2, 1), (lambda u: u**3, 0)],
)
def test_the_quotient_of_a_power_has_a_derivative_at_zero(x64, act, slope):
    """Paths may cancel: h is 0 as x and -x are added, and h²/h = h has the derivative 1 there."""
    x = np.random.default_rng(3).normal(size=(3, 4))

    def sum_at(t):
        result = rc.function_contributions(
            lambda x: act(x + t + checkpoint_name(-x, "branch")), x, branches="branch"
        )
        return result.by_length

    assert_close(jax.jacfwd(sum_at)(0.0), np.stack([slope * x, -slope * x]), atol=1e-12)
