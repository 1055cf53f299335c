"""Three more models with libraries' modules: NNX in a scan, grouped keys in Equinox, Linen's setup.

They are written as `tests.oracles.jax_models` describes.
"""

import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.oracles.frozen_paths import silu
from tests.oracles.jax_layers import DEPTH, D, E, H, Model, N, tokens
from tests.oracles.library_blocks import LinenList, NNXBlock, linen_for_numpy


def nnx_scan_of_remat():
    """Blocks made by `nnx.vmap`, run by `nnx.scan`, which needs a clone inside of a trace."""
    stack = nnx.vmap(lambda key: NNXBlock(nnx.Rngs(key)))(
        jax.random.split(jax.random.key(2), DEPTH)
    )
    graphdef, state = nnx.split(stack)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, block):
        return block(x)

    layers = [
        nnx.merge(graphdef, jax.tree.map(lambda a, l=l: a[l], state), copy=True).for_numpy()
        for l in range(DEPTH)
    ]
    return Model(lambda x: run(x, nnx.clone(stack)), "attention", layers, {})


class GroupedAttention(eqx.Module):
    """Two query heads for one key head, with rotary positions by complex numbers."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: jax.Array

    def __init__(self, key):
        shapes = (H, E, D), (1, E, D), (1, E, D), (D, H, E)
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value, self.out = (
            0.4 * jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, shapes, strict=True)
        )

    @jax.named_scope("GroupedAttention")
    def __call__(self, h):
        q, k, v = (jnp.einsum("hed,nd->nhe", w, h) for w in (self.query, self.key, self.value))
        q, k = turn(q).reshape(N, 1, H, E), turn(k)
        s = jnp.einsum("ngre,mge->grnm", q, k) / jnp.sqrt(E)
        s = s + jnp.triu(jnp.full((N, N), -1e30), 1)
        mixed = jnp.einsum("grnm,mge->ngre", jax.nn.softmax(s), v)
        return jnp.einsum("dhe,nhe->nd", self.out, mixed.reshape(N, H, E))


def turn(x):
    half = E // 2
    angles = jnp.arange(N)[:, None, None] * 100.0 ** (-jnp.arange(half) / half)
    z = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], axis=-1)


class GroupedBlock(eqx.Module):
    attention: GroupedAttention
    norms: list
    up: eqx.nn.Linear
    gate: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.attention = GroupedAttention(keys[0])
        self.norms = [eqx.nn.RMSNorm(D, use_bias=False, dtype=jnp.float64) for _ in range(2)]
        options = {"use_bias": False, "dtype": jnp.float64}
        self.up = eqx.nn.Linear(D, 12, key=keys[1], **options)
        self.gate = eqx.nn.Linear(D, 12, key=keys[2], **options)
        self.down = eqx.nn.Linear(12, D, key=keys[3], **options)

    def __call__(self, x):
        x = x + self.attention(jax.vmap(self.norms[0])(x))

        def feed(token):
            h = self.norms[1](token)
            return token + self.down(jax.nn.swish(self.gate(h)) * self.up(h))

        return jax.vmap(feed)(x)

    def for_numpy(self):
        a = self.attention
        return {
            **{n: np.transpose(w, (2, 0, 1)) for n, w in (("q", a.query), ("k", a.key))},
            "v": np.transpose(a.value, (2, 0, 1)),
            "o": np.transpose(a.out, (1, 2, 0)),
            "norm1": (self.norms[0].weight, 0.0),
            "norm2": (self.norms[1].weight, 0.0),
            "in": self.up.weight.T,
            "gate": self.gate.weight.T,
            "out": self.down.weight.T,
        }


def equinox_grouped():
    blocks = [GroupedBlock(key) for key in jax.random.split(jax.random.key(3), DEPTH)]
    fn = eqx.nn.Sequential([eqx.nn.Lambda(block) for block in blocks])
    options = {"norm": "rms", "eps": 1e-5, "causal": True, "rotary": True, "act": silu}
    return Model(lambda x: fn(x), "GroupedAttention", [b.for_numpy() for b in blocks], options)


class SandwichBlock(nn.Module):
    """Modules made in `setup`, norms around each branch, dropout that is switched off."""

    def setup(self):
        wide = {"param_dtype": jnp.float64}
        self.attention = nn.MultiHeadDotProductAttention(
            H, dropout_rate=0.3, deterministic=True, **wide
        )
        self.up, self.down = nn.Dense(12, **wide), nn.Dense(D, **wide)
        self.norms = [nn.LayerNorm(**wide) for _ in range(4)]
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, is_training=False):
        a = self.norms[1](self.attention(self.norms[0](x), mask=nn.make_causal_mask(x[..., 0])))
        x = x + self.drop(a, deterministic=not is_training)
        h = nn.gelu(self.up(self.norms[2](x)), approximate=False)
        return x + self.norms[3](self.down(h))


def linen_sandwich():
    model = LinenList(SandwichBlock)
    params = model.init(jax.random.key(1), tokens())
    # Gains and biases as after training, but for those of the projections, which NumPy leaves out.
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: a + 0.1 * jnp.sin(jnp.arange(D)) if "norms" in str(path) else a, params
    )
    layers = []
    for l in range(DEPTH):
        p = dict(params["params"][f"block_{l}"])
        norms = [(p[f"norms_{i}"]["scale"], p[f"norms_{i}"]["bias"]) for i in range(4)]
        p |= {"norm1": p["norms_0"], "norm2": p["norms_2"], "in": p["up"], "out": p["down"]}
        layers.append(linen_for_numpy(p) | {"after1": norms[1], "after2": norms[3]})

    def gelu(u):
        return u * (1 + np.vectorize(math.erf)(u / np.sqrt(2))) / 2

    options = {"order": "sandwich", "causal": True, "act": gelu}
    return Model(lambda x: model.apply(params, x), "attention", layers, options)


LIBRARY_MODELS = {
    make.__name__: make for make in (nnx_scan_of_remat, equinox_grouped, linen_sandwich)
}
