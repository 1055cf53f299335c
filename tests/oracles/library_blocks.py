"""Transformers as modules of Equinox, Flax Linen and Flax NNX, for `jax_models`."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tests.oracles.frozen_paths import silu
from tests.oracles.jax_layers import DEPTH, D, E, H, Model, tokens

# Equinox


class EquinoxBlock(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(H, D, key=keys[0])
        self.norm1, self.norm2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.mlp = eqx.nn.MLP(D, D, 12, 1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))

    def for_numpy(self):
        a, mlp = self.attention, self.mlp.layers
        heads = {
            name: getattr(a, f"{long}_proj").weight.T.reshape(D, H, E)
            for name, long in (("q", "query"), ("k", "key"), ("v", "value"))
        }
        return heads | {
            "o": a.output_proj.weight.T.reshape(H, E, D),
            "norm1": (self.norm1.weight, self.norm1.bias),
            "norm2": (self.norm2.weight, self.norm2.bias),
            "in": mlp[0].weight.T,
            "b_in": mlp[0].bias,
            "out": mlp[1].weight.T,
            "b_out": mlp[1].bias,
        }


def equinox_blocks():
    blocks = [EquinoxBlock(key) for key in jax.random.split(jax.random.key(0), DEPTH)]
    return jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_array(a) else a, blocks)


def equinox_list():
    blocks = equinox_blocks()

    def fn(x):
        for block in blocks:
            x = block(x)
        return x

    layers = [b.for_numpy() for b in blocks]
    return Model(fn, "eqx.nn.MultiheadAttention", layers, {"eps": 1e-5})


def equinox_scan():
    blocks = equinox_blocks()
    static = eqx.partition(blocks[0], eqx.is_array)[1]
    stacked = jax.tree.map(
        lambda *a: jnp.stack(a), *(eqx.partition(b, eqx.is_array)[0] for b in blocks)
    )

    @eqx.filter_jit
    def fn(x):
        def body(x, arrays):
            return jax.checkpoint(lambda x: eqx.combine(arrays, static)(x))(x), None

        return jax.lax.scan(body, x, stacked, unroll=2)[0]

    layers = [b.for_numpy() for b in blocks]
    return Model(fn, r"eqx\.nn\.Multi.*", layers, {"eps": 1e-5})


def equinox_attention_alone():
    blocks = equinox_blocks()

    def fn(x):
        for block in blocks:
            x = block.attention(x, x, x)
        return x

    layers = [{k: b.for_numpy()[k] for k in "qkvo"} for b in blocks]
    return Model(fn, "eqx.nn.MultiheadAttention", layers, {"skip": False})


# Flax


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(H, name="attention", param_dtype=jnp.float64)(
            nn.LayerNorm(name="norm1", param_dtype=jnp.float64)(x)
        )
        h = nn.LayerNorm(name="norm2", param_dtype=jnp.float64)(x)
        h = nn.silu(nn.Dense(12, name="in", param_dtype=jnp.float64)(h))
        return x + nn.Dense(D, name="out", param_dtype=jnp.float64)(h)


def linen_for_numpy(p):
    a = p["attention"]
    return {
        **{n: a[long]["kernel"] for n, long in (("q", "query"), ("k", "key"), ("v", "value"))},
        "o": a["out"]["kernel"],
        "norm1": (p["norm1"]["scale"], p["norm1"]["bias"]),
        "norm2": (p["norm2"]["scale"], p["norm2"]["bias"]),
        "in": p["in"]["kernel"],
        "out": p["out"]["kernel"],
    }


class LinenList(nn.Module):
    """Blocks of one class, one after the other."""

    block: type[nn.Module] = LinenBlock

    @nn.compact
    def __call__(self, x):
        for l in range(DEPTH):
            x = self.block(name=f"block_{l}")(x)
        return x


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=DEPTH,
        )
        return scan(nn.remat(LinenBlock)(name="block"), x, None)[0]


def linen_list():
    model = LinenList()
    params = model.init(jax.random.key(1), tokens())
    layers = [linen_for_numpy(params["params"][f"block_{l}"]) for l in range(DEPTH)]
    return Model(
        functools.partial(model.apply, params), r"block_\d/attention", layers, {"act": silu}
    )


def linen_scan_of_remat():
    model = LinenScan()
    params = model.init(jax.random.key(2), tokens())
    stacked = params["params"]["block"]
    layers = [linen_for_numpy(jax.tree.map(lambda a, l=l: a[l], stacked)) for l in range(DEPTH)]
    return Model(functools.partial(model.apply, params), "attention", layers, {"act": silu})


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        wide = {"rngs": rngs, "param_dtype": jnp.float64}
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, **wide)
        self.norm1, self.norm2 = nnx.LayerNorm(D, **wide), nnx.LayerNorm(D, **wide)
        self.up, self.down = nnx.Linear(D, 12, **wide), nnx.Linear(12, D, **wide)

    def __call__(self, x):
        x = x + checkpoint_name(self.attention(self.norm1(x)), "attention")
        return x + checkpoint_name(self.down(nnx.gelu(self.up(self.norm2(x)))), "mlp")

    def for_numpy(self):
        a = self.attention
        return {
            "q": a.query.kernel[...],
            "k": a.key.kernel[...],
            "v": a.value.kernel[...],
            "o": a.out.kernel[...],
            "norm1": (self.norm1.scale[...], self.norm1.bias[...]),
            "norm2": (self.norm2.scale[...], self.norm2.bias[...]),
            "in": self.up.kernel[...],
            "out": self.down.kernel[...],
        }


def nnx_blocks():
    blocks = [NNXBlock(nnx.Rngs(l)) for l in range(DEPTH)]

    def fn(x):
        for block in blocks:
            x = block(x)
        return x

    return Model(fn, "attention", [b.for_numpy() for b in blocks], {})
