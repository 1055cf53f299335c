"""Branches that contain their own skip are refused."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from tests.oracles.function_paths import ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import tokens
from tests.oracles.library_blocks import LinenList, LinenScan, NNXBlock, equinox_blocks
from tests.oracles.skip_layers import (
    DEPTH,
    GAIN,
    KEEP,
    D,
    N,
    U,
    V,
    W,
    attend,
    drop,
    in_scope,
    mlp,
    norm,
    pre_norm,
    repeat,
    scanned,
    weights,
)
from tests.support.marks import full_but
from tests.support.refusals import is_refused


def two_sublayers(x):
    x = pre_norm(x)
    return x + mlp(x)


def residual_enters(x):
    h = norm(x)
    with jax.named_scope("layer"):
        return attend(h) + x


def gated(x):
    gate = jax.nn.sigmoid(x @ W)
    return (1 - gate) * x + gate * attend(x)


def halves(x):
    first, second = jnp.split(x, 2, axis=-1)
    first = first + attend(x)[:, : D // 2]
    return jnp.concatenate([first, second + jnp.tanh(first @ W[: D // 2, : D // 2])], axis=-1)


def in_bfloat16(x):
    half = x.astype(jnp.bfloat16)
    return (half + attend(norm(half)).astype(jnp.bfloat16)).astype(x.dtype)


@jax.custom_jvp
def with_own_rule(x):
    return pre_norm(x)


with_own_rule.defjvp(lambda primals, tangents: jax.jvp(pre_norm, primals, tangents))


def behind_good_layers(layer):
    return lambda x: layer(x + in_scope(attend)(x)) + in_scope(attend)(norm(x))


def value_residuals(x):
    """A whole layer in a scope, whose values are mixed with those of the first."""
    first, state = x @ V, x
    for _ in range(DEPTH):
        with jax.named_scope("layer"):
            p = weights(norm(state))
            with jax.named_scope("attn"):
                a = p @ (norm(state) @ V + first) @ U
            state = state + a
            state = state + mlp(state)
    return state


def among_good_layers(x):
    x = x + in_scope(attend)(norm(x))
    x = in_scope(pre_norm)(x)
    return x + in_scope(attend)(norm(x))


REFUSED = {
    "plain": repeat(in_scope(pre_norm)),
    "norm after the sum": repeat(in_scope(lambda x: norm(x + attend(x)))),
    "norm outside, after the sum": repeat(lambda x: norm(in_scope(pre_norm)(x))),
    "relu after the sum": repeat(in_scope(lambda x: jax.nn.relu(x + attend(x)))),
    "relu outside, after the sum": repeat(lambda x: jax.nn.relu(in_scope(pre_norm)(x))),
    "no scope inside": repeat(in_scope(lambda x: x + weights(x) @ x @ V)),
    "a whole layer": repeat(in_scope(two_sublayers)),
    "parallel layers": repeat(in_scope(lambda x: x + attend(norm(x)) + mlp(x))),
    "the residual is an argument": repeat(residual_enters),
    "the addition alone": repeat(lambda x: in_scope(jnp.add)(x, attend(norm(x)))),
    "behind an embedding": lambda x: repeat(residual_enters)(x @ U),
    "a scaled skip": repeat(in_scope(lambda x: 0.9 * x + attend(x))),
    "a vector of scales": repeat(in_scope(lambda x: jnp.einsum("nd,d->nd", x, GAIN) - attend(x))),
    "a normed skip": repeat(in_scope(lambda x: norm(x) + attend(norm(x)))),
    "a rectified skip": repeat(in_scope(lambda x: jax.nn.relu(x) + attend(jax.nn.relu(x)))),
    "the skip is added last": repeat(in_scope(lambda x: x + (norm(x) @ W + attend(norm(x))))),
    "a dropout mask": repeat(in_scope(lambda x: drop(drop(x) + drop(attend(x))))),
    "a gated skip": repeat(in_scope(gated)),
    "a choice by a mask": repeat(in_scope(lambda x: jnp.where(KEEP, x, attend(x)))),
    "a sum where it is kept": repeat(in_scope(lambda x: jnp.where(KEEP, pre_norm(x), 0))),
    "a sum where it is not dropped": repeat(in_scope(lambda x: jnp.where(~KEEP, 0, pre_norm(x)))),
    "a sum where the state is positive": repeat(
        in_scope(lambda x: jnp.where(x > 0, pre_norm(x), 0))
    ),
    "two halves": repeat(in_scope(halves)),
    "reshaped": repeat(
        in_scope(lambda x: (x.T.reshape(-1) + attend(x).T.reshape(-1)).reshape(D, N).T)
    ),
    "bfloat16": repeat(in_scope(in_bfloat16)),
    "the sum of a stack": repeat(in_scope(lambda x: jnp.stack([x, attend(x)]).sum(0))),
    "some tokens": repeat(in_scope(lambda x: x.at[:2].add(attend(x)[:2]))),
    "jit inside": repeat(in_scope(jax.jit(pre_norm))),
    "jit outside": jax.jit(repeat(jax.jit(in_scope(pre_norm)))),
    "remat": repeat(jax.checkpoint(in_scope(two_sublayers))),
    "scan": scanned(in_scope(pre_norm)),
    "scan of remat": scanned(jax.checkpoint(in_scope(pre_norm))),
    "scan, the residual is an argument": scanned(residual_enters),
    "a scan inside": in_scope(scanned(pre_norm)),
    "vmap": lambda x: jax.vmap(repeat(in_scope(pre_norm)))(x[None])[0],
    "custom_jvp": repeat(in_scope(with_own_rule)),
    "cond inside": repeat(
        in_scope(lambda x: jax.lax.cond(W[0, 0] > 0, pre_norm, lambda x: x + 2 * attend(x), x))
    ),
    "cond outside": repeat(
        lambda x: jax.lax.cond(W[0, 0] > 9, in_scope(pre_norm), lambda x: x @ V, x)
    ),
    "cond or a constant": repeat(
        lambda x: jax.lax.cond(W[0, 0] > 9, in_scope(pre_norm), jnp.ones_like, x)
    ),
    "cond, a constant first": repeat(
        lambda x: jax.lax.cond(W[0, 0] > 9, jnp.ones_like, in_scope(pre_norm), x)
    ),
    "nested scopes": in_scope(repeat(in_scope(pre_norm, "block"))),
    "beside an MLP with a skip around it": repeat(lambda x: two_sublayers(in_scope(pre_norm)(x))),
    "among good layers": among_good_layers,
    "two towers": lambda x: repeat(in_scope(pre_norm))(x) + repeat(in_scope(pre_norm))(x),
    "value residuals": value_residuals,
    "a name": repeat(lambda x: checkpoint_name(pre_norm(x), "layer")),
    "a name of a whole layer": repeat(lambda x: checkpoint_name(two_sublayers(x), "layer")),
    "a name in a scan": scanned(lambda x: checkpoint_name(norm(x + attend(x)), "layer")),
}


@pytest.mark.parametrize("freeze", full_but([True, False], True))
@pytest.mark.parametrize("name", REFUSED)
def test_a_branch_that_contains_its_skip_is_refused(x64, name, freeze):
    """As soon as it is traced."""
    kind = "name" if "name" in name.split() else "scope"
    message = rf"branches: the {kind} 'layer' contains its own skip at .*\.py:\d+.*, so every path"
    if name == "no scope inside":
        message += ".*; match only what is added to the skip(?!,)"
    elif name != "the addition alone":
        message += ".*such as 'attn'"
    run = functools.partial(rc.function_contributions, branches="layer", freeze=freeze)
    is_refused(message, jax.eval_shape, functools.partial(run, REFUSED[name]), tokens())


def test_the_kind_of_the_branch_is_named(x64):
    def fn(x):
        for _ in range(DEPTH):
            x = in_scope(pre_norm)(x)
            x = x + in_scope(mlp, "mlp")(x)
        return x

    both = {"attention": "layer", "mlp": "mlp"}
    message = r"branches\['attention'\]: the scope 'layer' contains its own skip"
    is_refused(message, rc.function_contributions, fn, tokens(), branches=both)


def equinox_model(x):
    for block in equinox_blocks():
        with jax.named_scope("block"):
            h = jax.vmap(block.norm1)(x)
            x = x + block.attention(h, h, h)
    return x


def linen_model(model):
    params = model.init(jax.random.key(1), tokens())
    return functools.partial(model.apply, params)


def nnx_model(x):
    for l in range(DEPTH):
        with jax.named_scope("block"):
            x = NNXBlock(nnx.Rngs(l))(x)
    return x


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "branches", "inside"),
    [
        (lambda: equinox_model, "block", "eqx.nn.MultiheadAttention"),
        pytest.param(
            lambda: linen_model(LinenList()), r"block_\d", "attention", marks=pytest.mark.full
        ),
        (lambda: linen_model(LinenScan()), "block", "attention"),
        (lambda: nnx_model, "block", "attention"),
        pytest.param(
            lambda: linen_model(LinenList()), "LinenList", "attention", marks=pytest.mark.full
        ),
    ],
)
def test_modules_of_libraries_that_contain_their_skip_are_refused(x64, make, branches, inside):
    message = f"contains its own skip.*such as '{inside}'"
    is_refused(message, rc.function_contributions, make(), tokens(), branches=branches)


@pytest.mark.full
def test_transport_refuses_it_as_well(x64):
    def named(x):
        return checkpoint_name(in_scope(pre_norm)(x), "residual")

    def fn(ids):
        return repeat(named)(checkpoint_name(tokens()[ids], "residual"))

    def scan(ids):
        return scanned(named)(tokens()[ids])

    run = functools.partial(rc.paths.transport, layer=1, branches="layer", first_position=0)
    for model in (fn, scan):
        message = "the scope 'layer' contains its own skip.*'attn'"
        is_refused(message, run, model, jnp.arange(N), GAIN)
