"""Weights, tokens and layers by hand that the models of `jax_models` and `library_blocks` share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

N, D, H, E, DEPTH = 5, 8, 2, 4, 3


class Model(NamedTuple):
    """A function, its branches, and the same network for NumPy."""

    fn: Any
    branches: Any
    layers: list
    options: dict


def draw(seed, *shape, scale=0.5):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale)


def tokens(seed=0):
    return draw(1000 + seed, N, D, scale=1.0)


def draw_layers(seed=0, *, kv=H, gated=False, **more):
    """Weights of all layers, without symmetry."""

    def one(l):
        shapes = {"q": (D, H, E), "k": (D, kv, E), "v": (D, kv, E), "o": (H, E, D)}
        shapes |= {"in": (D, 12), "out": (12, D)} | ({"gate": (D, 12)} if gated else {})
        shapes |= more
        layer = {name: draw(100 * l + i + seed, *s) for i, (name, s) in enumerate(shapes.items())}
        for i in (1, 2):
            layer[f"norm{i}"] = (1 + draw(l + 50 * i, D), draw(l + 70 * i, D))
        return layer

    return [one(l) for l in range(DEPTH)]


def without_bias(layers):
    for layer in layers:
        for name in layer:
            if isinstance(layer[name], tuple):
                layer[name] = (layer[name][0], 0.0)
    return layers


def layer_norm(x, gain, bias, eps=1e-6):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * gain + bias


def rms_norm(x, gain, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps) * gain


def softmax_by_hand(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_attention(w, h, *, weights=jax.nn.softmax, mask=None):
    q, k, v = (jnp.einsum("nd,dhe->hne", h, w[name]) for name in "qkv")
    s = jnp.einsum("hne,hme->hnm", q, k) / E**0.5
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    return jnp.einsum("hnm,hme,hed->nd", weights(s), v, w["o"])
