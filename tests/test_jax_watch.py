"""One call for Linen: the scalars are those of `rc.monitor` on the same arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse import jax_watch
from tests.oracles.flax_layers import (
    CAUSAL,
    D,
    H,
    L,
    N,
    Sequence,
    X,
    check_scalars,
    compute_weights,
    monitor_layers,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

MASK = jnp.arange(N)[None] < jnp.array([N, 4])[:, None]


class CausalAttention(nn.Module):
    """A module that is named like an attention; the attention inside of it is measured."""

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(H, dropout_rate=0.5, name="inner")
        return attention(x, mask=CAUSAL, deterministic=False)


class Block(nn.Module):
    """A user's attention around Flax's, then an MLP; its output also suits a scan."""

    @nn.compact
    def __call__(self, x, _=None):
        read = nn.LayerNorm()(x)
        self.sow("intermediates", "read", read)
        x = x + CausalAttention()(read)
        return x + nn.Dense(D)(nn.gelu(x)), None


class Stack(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        for _ in range(L):
            x, _ = block()(x)
        return x


RNGS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_linen_in_jit_and_remat(remat):
    model = Stack(remat)
    variables = {"params": jax.jit(model.init)(RNGS, X)["params"]}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(variables):
        out, state = model.apply(variables, X, mutable=["intermediates"], rngs=RNGS)
        return jnp.sum(out**2), (out, state)

    expected_gradient, (out, state) = run(variables)
    prefix = "CheckpointBlock" if remat else "Block"
    layers = [f"{prefix}_{i}" for i in range(L)]
    reads = [state["intermediates"][layer]["read"][0] for layer in layers]
    parameters = [variables["params"][layer]["CausalAttention_0"]["inner"] for layer in layers]
    weights = [compute_weights(p, x, CAUSAL) for p, x in zip(parameters, reads, strict=True)]

    @jax.jit
    def monitor_model(variables):
        measure = functools.partial(rc.monitor, mask=MASK)
        return jax_watch.linen_monitored(model, variables, X, rngs=RNGS, measure=measure)

    watched, scalars = monitor_model(variables)
    np.testing.assert_allclose(watched, out, rtol=1e-5, atol=1e-6)
    check_scalars(scalars, monitor_layers(reads, weights, mask=MASK))
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(monitor_model(v)[0] ** 2)))(variables)
    # Small entries are differences of large ones; those of the keys' biases are 0 but for rounding.
    rounding = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_gradient))
    jax.tree.map(lambda a, b: assert_close(a, b, atol=rounding), gradient, expected_gradient)


@pytest.mark.full
def test_linen_scan_and_collections_of_ones_own():
    axes = {"params": 0, "intermediates": 0}
    split = {"params": True, "dropout": True}
    model = nn.scan(Block, variable_axes=axes, split_rngs=split, length=L)()
    variables = {"params": model.init(RNGS, X, None)["params"]}
    (out, _), state = model.apply(variables, X, None, mutable=["intermediates"], rngs=RNGS)
    reads = state["intermediates"]["read"][0]
    stacked = variables["params"]["CausalAttention_0"]["inner"]
    parameters = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(L)]
    weights = [compute_weights(p, x, CAUSAL) for p, x in zip(parameters, reads, strict=True)]
    ((watched, _), collections), scalars = jax_watch.linen_monitored(
        model, variables, X, None, rngs=RNGS, mutable=["batch_stats"]
    )
    np.testing.assert_allclose(watched, out, rtol=1e-6, atol=1e-6)
    assert "intermediates" not in collections
    check_scalars(scalars, monitor_layers(reads, weights))
    bare = nn.scan(Block, variable_axes={"params": 0}, split_rngs=split, length=L)()
    _, scalars = jax_watch.linen_monitored(bare, variables, X, None, rngs=RNGS)
    check_scalars(scalars, monitor_layers(reads, weights))


class ExampleBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(H, name="attention")
        before, out = attention.attention_fn, attention(nn.LayerNorm()(x))
        assert attention.attention_fn is before  # it was replaced for the call alone
        return x + out


class VmappedStack(nn.Module):
    """Blocks that each take one example."""

    inner: bool

    @nn.compact
    def __call__(self, x):
        vmapped = nn.vmap(
            ExampleBlock,
            variable_axes={"params": None, "intermediates": 0},
            split_rngs={"params": False},
        )
        for i in range(L):
            x = (vmapped if self.inner else ExampleBlock)(name=f"block_{i}")(x)
        return x


def test_linen_examples_of_an_inner_vmap_are_a_batch_and_so_are_frames():
    variables = VmappedStack(False).init(jax.random.key(0), X)
    measure = functools.partial(rc.monitor, mask=MASK)
    scalars = [
        jax_watch.linen_monitored(VmappedStack(inner), variables, X, measure=measure)[1]
        for inner in (True, False)
    ]
    assert scalars[0]["batch_residual_ratio"].shape == (L,)
    check_scalars(*scalars)
    read = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, X)
    first = rc.monitor(read, mask=MASK)["residual_ratio"]
    np.testing.assert_allclose(scalars[0]["residual_ratio"][0], first, rtol=1e-5)
    frames = jnp.stack([X, 2 * X[::-1]])  # tokens [2, b, n, d]
    block = {"params": variables["params"]["block_0"]["attention"]}
    attention = nn.MultiHeadDotProductAttention(H)
    _, scalars = jax_watch.linen_monitored(attention, block, frames)
    weights = compute_weights(block["params"], X, jnp.ones((1, 1, N, N)))
    want = rc.monitor(jnp.stack([X, 2 * X[::-1]]))["residual_ratio"]
    np.testing.assert_allclose(scalars["residual_ratio"], want, rtol=1e-5)
    _, scalars = jax_watch.linen_monitored(attention, block, frames[:1])
    entropy = rc.monitor(X, weights)["attention_entropy"]
    np.testing.assert_allclose(scalars["attention_entropy"], entropy, rtol=1e-5)


@pytest.mark.full
def test_gradients_of_the_scalars_are_zero():
    model = nnx.MultiHeadAttention(H, D, decode=False, rngs=nnx.Rngs(0))

    def compute_scalars(model):
        _, scalars = jax_watch.nnx_monitored(model, X)
        return sum(jnp.sum(a) for a in scalars.values())

    gradients = nnx.grad(compute_scalars)(model)
    assert not any(np.any(a) for a in jax.tree.leaves(gradients))


def test_blocks_that_are_none_are_refused():
    eqx = pytest.importorskip("equinox")
    model = Sequence([eqx.nn.MultiheadAttention(H, D, key=jax.random.key(0))])
    for blocks, message in (
        (lambda m: [], "not a list of layers"),
        (lambda m: m.layers[0].query_proj.weight, "not a list of layers"),
        (lambda m: [m.layers[0].query_proj], "no attention was measured"),
    ):
        is_refused(message, jax_watch.equinox_monitored, model, X[0], blocks=blocks)


class Counted(nn.Module):
    """A layer that counts its calls, in a collection of its own; another method is no call."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", lambda: jnp.zeros(()))
        count.value += 1
        return self.double(x + 1)

    def double(self, x):
        return 2 * x


def test_collections_that_a_linen_model_changes_are_returned():
    variables = {"counts": {"calls": jnp.float32(3)}}
    (out, state), scalars = jax_watch.linen_monitored(
        Counted(),
        variables,
        X,
        select=lambda module: True,
        measure=lambda x, weights: {"first": x[0, 0]},
        mutable=["counts"],
    )
    np.testing.assert_array_equal(out, 2 * (X + 1))
    assert state["counts"]["calls"] == 4
    np.testing.assert_array_equal(scalars["first"], [X[0, 0]])
