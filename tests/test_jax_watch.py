"""One call for Linen, NNX and Equinox: the scalars are those of `rc.monitor` on the same arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx

import rank_collapse as rc
from rank_collapse import jax_watch

B, N, D, H, L = 2, 6, 8, 2, 3
X = jax.random.normal(jax.random.key(0), (B, N, D))
MASK = jnp.arange(N)[None] < jnp.array([N, 4])[:, None]
CAUSAL = nn.make_causal_mask(jnp.ones((B, N)))


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


def monitor_layers(reads, weights, **options):
    """Computes rc.monitor of each layer, and stacks the scalars."""
    scalars = [rc.monitor(x, p, **options) for x, p in zip(reads, weights, strict=True)]
    return jax.tree.map(lambda *values: jnp.stack(values), *scalars)


def check_scalars(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def compute_weights(attention, read, mask):
    """Computes attention weights [b, h, n, n] from Flax's parameters, by hand."""
    q, k = (
        jnp.einsum("bnd,dhk->bnhk", read, attention[name]["kernel"])
        + attention[name]["bias"][None, None]
        for name in ("query", "key")
    )
    scores = jnp.einsum("bnhk,bmhk->bhnm", q, k) / np.sqrt(D / H)
    return jax.nn.softmax(jnp.where(mask != 0, scores, -jnp.inf))


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.full)])
def test_linen_in_jit_and_remat(remat):
    model = Stack(remat)
    variables = {"params": jax.jit(model.init)(RNGS, X)["params"]}
    run = jax.jit(lambda v: model.apply(v, X, mutable=["intermediates"], rngs=RNGS))
    out, state = run(variables)
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
    gradients = [
        jax.jit(jax.grad(lambda v, f=f: jnp.sum(f(v)[0] ** 2)))(variables)
        for f in (monitor_model, run)
    ]
    # Small entries are differences of large ones; those of the keys' biases are 0 but for rounding.
    rounding = 1e-6 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=rounding), *gradients)


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
    none = nn.scan(Block, variable_axes={"params": 0}, split_rngs=split, length=L)()
    with pytest.raises(ValueError, match='"intermediates": 0'):
        jax_watch.linen_monitored(none, variables, X, None, rngs=RNGS)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x), mask=CAUSAL, deterministic=False)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.full)])
def test_nnx(jit):
    model, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    states, reads, weights = [X], [], []
    for layer in other.layers:
        reads.append(layer.norm(states[-1]))
        parameters = nnx.to_pure_dict(nnx.state(layer.attention, nnx.Param))
        weights.append(compute_weights(parameters, reads[-1], CAUSAL))
        states.append(layer(states[-1]))

    def monitor_model(model):
        return jax_watch.nnx_monitored(model, X)

    before = nnx.MultiHeadAttention.__call__
    out, scalars = (nnx.jit(monitor_model) if jit else monitor_model)(model)
    assert nnx.MultiHeadAttention.__call__ is before
    assert model.layers[0].attention.attention_fn is other.layers[0].attention.attention_fn
    np.testing.assert_allclose(out, states[-1], rtol=1e-6, atol=1e-6)
    check_scalars(scalars, monitor_layers(reads, weights))
    with pytest.raises(ValueError, match="no attention was measured"):
        jax_watch.nnx_monitored(model, X, select=lambda _: False)


def test_equinox_blocks_in_jit_and_vmap():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), L)

    class Network(eqx.Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = x + layer(x, x, x)
            return x

    model = Network([eqx.nn.MultiheadAttention(H, D, key=key) for key in keys])

    @eqx.filter_jit
    def monitor_batch(model, batch):
        def monitor_example(x):
            unit = functools.partial(rc.monitor, tokens="unit")
            return jax_watch.equinox_monitored(model, x, blocks=lambda m: m.layers, measure=unit)

        return jax.vmap(monitor_example)(batch)

    out, scalars = monitor_batch(model, X)
    for example in range(B):
        x, reads = X[example], []
        for layer in model.layers:
            reads.append(x)
            x = x + layer(x, x, x)
        np.testing.assert_allclose(out[example], x, rtol=1e-5, atol=1e-6)
        example_scalars = {name: values[example] for name, values in scalars.items()}
        check_scalars(example_scalars, monitor_layers(reads, [None] * L, tokens="unit"))


def test_stacked_layers_of_equinox_are_refused_with_what_to_do():
    eqx = pytest.importorskip("equinox")

    class Network(eqx.Module):
        layers: eqx.nn.Linear

        def __call__(self, x):
            return jax.lax.scan(lambda x, layer: (jax.vmap(layer)(x), None), x, self.layers)[0]

    keys = jax.random.split(jax.random.key(0), L)
    model = Network(eqx.filter_vmap(lambda key: eqx.nn.Linear(D, D, key=key))(keys))
    with pytest.raises(ValueError, match="gives a Linear, not a list"):
        jax_watch.equinox_monitored(model, X[0], blocks=lambda m: m.layers)
