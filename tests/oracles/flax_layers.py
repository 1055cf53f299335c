"""Inputs of small models of Flax and Equinox, and their scalars by rc.monitor."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

import rank_collapse as rc
from tests.oracles import draws

B, N, D, H, L = 2, 6, 8, 2, 3


X = draws.normal(B, N, D)


CAUSAL = nn.make_causal_mask(jnp.ones((B, N)))


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


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x), mask=CAUSAL, deterministic=False)


class Sequence:
    """A model of functions and modules, without a class of Equinox."""

    def __init__(self, layers):
        self.layers = layers

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x, x, x)
        return x


jax.tree_util.register_pytree_node(
    Sequence, lambda m: ((m.layers,), None), lambda _, children: Sequence(*children)
)
