"""Small layers for tests of branches with and without their skip, and how they are repeated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles.jax_layers import draw, layer_norm

DEPTH, D, N = 3, 8, 5
Q, V, W, U = (draw(40 + i, D, D) for i in range(4))
GAIN = 1 + draw(45, D)
KEEP = np.asarray(np.random.default_rng(0).random((N, D)) < 0.8)


def weights(h):
    return jax.nn.softmax(h @ Q @ h.T)


def attend(h):
    with jax.named_scope("attn"):
        return weights(h) @ h @ V


def norm(x):
    return layer_norm(x, GAIN, 0.0)


def mlp(x):
    return jax.nn.gelu(norm(x) @ W) @ U


def repeat(layer):
    return lambda x: functools.reduce(lambda x, _: layer(x), range(DEPTH), x)


def scanned(layer):
    return lambda x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=DEPTH)[0]


def in_scope(layer, name="layer"):
    return jax.named_scope(name)(layer)


def pre_norm(x):
    return x + attend(norm(x))


def drop(a):
    return jnp.where(KEEP, a / 0.8, 0)
