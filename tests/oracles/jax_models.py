"""Transformers as others write them in JAX, each with the weights that `frozen_numpy` reads.

A model is a function of the residual stream [n, d], what its branches are called, and the layers
and options of the NumPy enumeration. All are of float64 and have 3 layers of width 8.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tests.oracles.frozen_paths import silu
from tests.oracles.jax_layers import (
    DEPTH,
    D,
    E,
    H,
    Model,
    N,
    draw,
    draw_layers,
    layer_norm,
    plain_attention,
    rms_norm,
    softmax_by_hand,
    without_bias,
)
from tests.oracles.library_blocks import (
    equinox_attention_alone,
    equinox_list,
    equinox_scan,
    linen_list,
    linen_scan_of_remat,
    nnx_blocks,
)

# Written by hand


def plain_post():
    """Norms after sums, ReLU by max, softmax by hand."""
    layers = draw_layers()

    def fn(x):
        for w in layers:
            with jax.named_scope("self_attention"):
                a = plain_attention(w, x, weights=softmax_by_hand)
            x = layer_norm(x + a, *w["norm1"])
            x = layer_norm(x + jnp.maximum(x @ w["in"], 0) @ w["out"], *w["norm2"])
        return x

    options = {"order": "post", "act": lambda u: np.maximum(u, 0)}
    return Model(fn, ".*attention", layers, options)


def nanodo_like():
    """Causal, biases left out, GELU spelled by hand, a final norm; scopes of blocks inside jit."""
    layers = draw_layers(3)
    final = (1 + draw(9, D), draw(8, D))

    @jax.named_scope("CausalAttn")
    def attend(w, h):
        n = h.shape[0]
        return plain_attention(w, h, mask=jnp.tril(jnp.ones((n, n), bool))[None])

    def gelu(u):
        return 0.5 * u * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (u + 0.044715 * u**3)))

    @jax.jit
    def block(w, x):
        x = x + attend(w, layer_norm(x, *w["norm1"]))
        return x + gelu(layer_norm(x, *w["norm2"]) @ w["in"]) @ w["out"]

    def fn(x):
        for l, w in enumerate(layers):
            with jax.named_scope(f"blocks_{l}"):
                x = block(w, x)
        return layer_norm(x, *final)

    return Model(fn, "CausalAttn", layers, {"causal": True, "final": final})


def rotary(x):
    """[n, h, e], halves."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[0])[:, None] * 100.0 ** (-jnp.arange(half) / half)
    c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def maxtext_like():
    """Names for remat, a scan, grouped keys, rotary positions, QK-norm, SwiGLU."""
    layers = without_bias(draw_layers(5, kv=1, gated=True, q_norm=(E,), k_norm=(E,)))
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    def layer(x, w):
        h = rms_norm(x, w["norm1"][0])
        q, k, v = (jnp.einsum("nd,dhe->nhe", h, w[name]) for name in "qkv")
        q, k, v = (checkpoint_name(a, f"{name}_proj") for a, name in ((q, "q"), (k, "k"), (v, "v")))
        q, k = rotary(rms_norm(q, w["q_norm"])), rotary(rms_norm(k, w["k_norm"]))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        x = x + checkpoint_name(jnp.einsum("nhe,hed->nd", mixed, w["o"]), "out_proj")
        h = rms_norm(x, w["norm2"][0])
        units = jax.nn.silu(h @ w["gate"]) * (h @ w["in"])
        return x + checkpoint_name(checkpoint_name(units, "mlpwi") @ w["out"], "mlpwo"), None

    policy = jax.checkpoint_policies.save_only_these_names("out_proj")

    def fn(x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, stacked)[0]

    options = {"norm": "rms", "causal": True, "rotary": True, "qk_norm": True, "act": silu}
    return Model(fn, "out_proj", layers, options)


def gemma_like():
    """Capped scores, attention sinks, norms before and after each branch."""
    layers = draw_layers(7, sink=(H,))
    for l, w in enumerate(layers):
        w["after1"], w["after2"] = ((1 + draw(l + s, D), draw(l + s + 1, D)) for s in (30, 40))

    def fn(x):
        for w in layers:
            with jax.named_scope("attn"):
                h = layer_norm(x, *w["norm1"])
                q, k, v = (jnp.einsum("nd,dhe->hne", h, w[name]) for name in "qkv")
                s = 2.0 * jnp.tanh(jnp.einsum("hne,hme->hnm", q, k) / E**0.5 / 2.0)
                sinks = jnp.broadcast_to(w["sink"][:, None, None], (*s.shape[:2], 1))
                p = jax.nn.softmax(jnp.concatenate([s, sinks], axis=-1), axis=-1)[..., :-1]
                a = jnp.einsum("hnm,hme,hed->nd", p, v, w["o"])
                x1 = layer_norm(a, *w["after1"])
            x = x + x1
            m = jax.nn.gelu(layer_norm(x, *w["norm2"]) @ w["in"]) @ w["out"]
            x = x + layer_norm(m, *w["after2"])
        return x

    return Model(fn, "attn", layers, {"order": "sandwich", "cap": 2.0})


def squared_relu_alibi():
    """Linear position biases, squared ReLU, RMSNorm without a gain, exp of log_softmax."""
    layers = without_bias(draw_layers(11, slopes=(H,)))
    for w in layers:
        w["norm1"] = w["norm2"] = (1.0, 0.0)

    def fn(x):
        distance = jnp.abs(jnp.arange(N)[:, None] - jnp.arange(N))
        for w in layers:
            h = rms_norm(x, 1.0)
            q, k, v = (jnp.einsum("nd,dhe->hne", h, w[name]) for name in "qkv")
            s = jnp.einsum("hne,hme->hnm", q, k) / E**0.5
            p = jnp.exp(jax.nn.log_softmax(s - distance * w["slopes"][:, None, None]))
            x = x + checkpoint_name(jnp.einsum("hnm,hme,hed->nd", p, v, w["o"]), "attn_out")
            x = x + jnp.square(jax.nn.relu(rms_norm(x, 1.0) @ w["in"])) @ w["out"]
        return x

    options = {"norm": "rms", "alibi": True, "act": lambda u: np.maximum(u, 0) ** 2}
    return Model(fn, "attn_out", layers, options)


def parallel_vmapped():
    """Attention and MLP side by side, over a batch of one, with the norm written per token."""
    layers = draw_layers(13)
    for w in layers:
        w["norm2"] = w["norm1"]

    def norm_token(v, gain, bias):
        return (v - jnp.mean(v)) * jax.lax.rsqrt(jnp.var(v) + 1e-6) * gain + bias

    def one(x):
        for w in layers:
            h = jax.vmap(norm_token, (0, None, None))(x, *w["norm1"])
            with jax.named_scope("Attention"):
                a = plain_attention(w, h)
            x = x + a + jax.nn.gelu(h @ w["in"]) @ w["out"]
        return x

    def fn(x):
        return jax.vmap(one)(x[None])[0]

    return Model(fn, "Attention", layers, {"order": "parallel"})


def with_experts(layers, moe, **options):
    """Layers whose MLP is a choice of experts, moe(layer, normed state)."""

    def fn(x):
        for w in layers:
            with jax.named_scope("attn"):
                a = plain_attention(w, layer_norm(x, *w["norm1"]))
            x = x + a
            x = x + moe(w, layer_norm(x, *w["norm2"]))
        return x

    return Model(fn, "attn", layers, {"act": silu} | options)


def experts_by_one_hot():
    """Two of four experts, softmax over the chosen, dispatched by one-hot products."""
    layers = draw_layers(17, router=(D, 4), **{"in": (4, D, 6), "out": (4, 6, D)})

    def moe(w, h):
        top, index = jax.lax.top_k(h @ w["router"], 2)
        shares = jnp.einsum("nk,nke->ne", jax.nn.softmax(top), jax.nn.one_hot(index, 4))
        units = jax.nn.silu(jnp.einsum("nd,edf->nef", h, w["in"]))
        return jnp.einsum("ne,nef,efd->nd", shares, units, w["out"])

    return with_experts(layers, moe)


def experts_by_gather():
    """Two of four experts by a sigmoid router, whose weights are gathered for each token."""
    layers = draw_layers(19, router=(D, 4), **{"in": (4, D, 6), "out": (4, 6, D)})

    def moe(w, h):
        shares, index = jax.lax.top_k(jax.nn.sigmoid(h @ w["router"]), 2)
        units = jax.nn.silu(jnp.einsum("nd,nkdf->nkf", h, w["in"][index]))
        return (shares[..., None] * jnp.einsum("nkf,nkfd->nkd", units, w["out"][index])).sum(1)

    return with_experts(layers, moe, sigmoid_router=True)


def blockwise_attention():
    """Softmax in blocks of keys, with a running maximum and a running sum, in a scan."""
    layers = draw_layers(23)

    def attend(w, h):
        q, k, v = (jnp.einsum("nd,dhe->hne", h, w[name]) for name in "qkv")

        def block(carry, kv):
            top, total, mixed = carry
            key, value = kv
            s = jnp.einsum("hne,he->hn", q, key) / E**0.5
            new_top = jnp.maximum(top, s)
            old, new = jnp.exp(top - new_top), jnp.exp(s - new_top)
            mixed = mixed * old[..., None] + new[..., None] * value[:, None]
            return (new_top, total * old + new, mixed), None

        start = (jnp.full((H, N), -jnp.inf), jnp.zeros((H, N)), jnp.zeros((H, N, E)))
        keys = (k.transpose(1, 0, 2), v.transpose(1, 0, 2))
        (_, total, mixed), _ = jax.lax.scan(block, start, keys)
        return jnp.einsum("hne,hed->nd", mixed / total[..., None], w["o"])

    def fn(x):
        for w in layers:
            x = x + checkpoint_name(attend(w, layer_norm(x, *w["norm1"])), "attn")
            x = x + jax.nn.gelu(layer_norm(x, *w["norm2"]) @ w["in"]) @ w["out"]
        return x

    return Model(fn, "attn", layers, {})


def fori_loop_with_cond():
    """A loop that chooses its layer by index, and a branch that is there under a condition."""
    layers = draw_layers(29)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    def body(l, x):
        w = jax.tree.map(lambda a: a[l], stacked)
        with jax.named_scope("attn"):
            h = layer_norm(x, *w["norm1"])
            a = jax.lax.cond(l >= 0, lambda h: plain_attention(w, h), jnp.zeros_like, h)
        x = x + a
        return x + jax.nn.gelu(layer_norm(x, *w["norm2"]) @ w["in"]) @ w["out"]

    return Model(lambda x: jax.lax.fori_loop(0, DEPTH, body, x), "attn", layers, {})


MODELS = {
    make.__name__: make
    for make in (
        equinox_list,
        equinox_scan,
        equinox_attention_alone,
        linen_list,
        linen_scan_of_remat,
        nnx_blocks,
        plain_post,
        nanodo_like,
        maxtext_like,
        gemma_like,
        squared_relu_alibi,
        parallel_vmapped,
        experts_by_one_hot,
        experts_by_gather,
        blockwise_attention,
        fori_loop_with_cond,
    )
}
