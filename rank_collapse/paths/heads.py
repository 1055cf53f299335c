"""What each head contributes to the output: the sum of all frozen paths that pass it.

Once attention weights, norm statistics and gates are frozen, a head's output reaches the end
through an affine map. Every head's output is carried through the layers above it, without telling
path lengths apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.gains import layer_gains, scaled
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import sites_of, sublayer
from rank_collapse.network.transformer import block, scan_layers
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import layer_groups
from rank_collapse.paths.contributions import layer_rows, path_gains


@full_precision
def head_contributions(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    attention_gain: Any = None,
    cross_gain: Any = None,
    mlp_gain: Any = None,
    chunk: int = 12,
    **inputs: Any,
) -> Float[Array, "l h n d"]:
    """Sum of all paths through each head of each layer, of whatever length, biases included.

    The output is linear in the gain of each head once everything is frozen; this is the derivative
    with respect to `head_gain` of `path_contributions`. Paths that pass two heads count for both.
    Cost: about L H / 2 uses of the layers' value, output and MLP matrices.

    Args:
        params, x, config: As in `apply`.
        attention_gain, cross_gain, mlp_gain: See `path_contributions`.
        chunk: Heads carried at once, which bounds the memory beside the result: chunk · n · d_ff.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`.

    Raises:
        ValueError: As `path_contributions`; a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is below 1")
    params, entry = enter(params, x, config, **inputs)
    gains = layer_gains(config, entry.x.dtype)
    factors = {"attention": attention_gain, "cross": cross_gain, "mlp": mlp_gain}
    _, on_paths = path_gains(config, gains, None, factors)
    return _carry_heads(params, entry, config, on_paths, min(chunk, config.num_heads))


def _carried(params, constants, config, gains, states, ones, memory=None):
    """States [g, n, d] at a layer's input after the layer; `ones` [g] as in `frozen`."""
    sites = sites_of(params, config, gains)

    def attention(c):
        return frozen.frozen_attention(params.attention, constants.weights, c, ones), None

    norm = _norm_by(constants.attention_scale, config, ones)
    states, _ = sublayer(sites.attention, states, attention, norm)
    return _rest_of_layer(params, constants, config, sites, states, ones, memory)


def _started(params, constants, config, gains, whole):
    """Outputs [h, n, d] of a layer's own heads at the layer's end, from its input [1, n, d]."""
    sites = sites_of(params, config, gains)
    if sites.attention.placement == "pre":
        norm = _norm_by(constants.attention_scale, config, jnp.ones(1, whole.dtype))
        whole = norm(sites.attention, whole)
    values = jnp.einsum("nd,hdv->hnv", whole[0], params.attention.w_v)
    values = values + params.attention.b_v[:, None, :]
    mixed = jnp.einsum("hnm,hmv->hnv", constants.weights, values)
    own = jnp.einsum("hnv,hvd->hnd", mixed, params.attention.w_o)
    own = scaled(sites.attention.branch_gain, own)
    no_bias = jnp.zeros(own.shape[0], own.dtype)
    if sites.attention.placement == "post":
        own = _norm_by(constants.attention_scale, config, no_bias)(sites.attention, own)
    return _rest_of_layer(params, constants, config, sites, own, no_bias)


def _rest_of_layer(params, constants, config, sites, states, ones, memory=None):
    """Cross-attention, which heads' outputs (without a memory) pass by the skip, and the MLP."""

    def cross(c):
        if memory is None:
            return jnp.zeros_like(c), None
        weights = constants.cross_weights
        return frozen.frozen_attention(params.cross, weights, memory[None], ones), None

    def mlp(c):
        return frozen.frozen_mlp(params.mlp, constants.gate, c, ones), None

    if config.cross_attention:
        norm = _norm_by(constants.cross_scale, config, ones)
        states, _ = sublayer(sites.cross, states, cross, norm)
    if config.mlp != "none":
        norm = _norm_by(constants.mlp_scale, config, ones)
        states, _ = sublayer(sites.mlp, states, mlp, norm)
    return states


def _norm_by(scale, config, ones):
    return lambda site, c: frozen.frozen_norm(site.norm, scale, c, ones, config)


@functools.partial(jax.jit, static_argnames="chunk")
def _carry_heads(params, entry, config, on_paths, chunk):
    h, (n, d) = config.num_heads, entry.x.shape
    gains = layer_gains(config, entry.x.dtype)

    def freeze(x, step):
        layer, own = step
        trace = block(layer, x, config, own, entry)
        return trace.hidden, frozen.freeze_layer(layer, x, trace, config, own)

    last, constants = scan_layers(freeze, entry.x, params, config, gains)

    def body(carry, step):
        outputs, whole = carry
        layer, (index, own, gain) = step

        def pieces(fn, a):
            """fn of the heads, `chunk` at a time."""
            if a.shape[0] <= chunk:
                return fn(a)
            return jax.lax.map(lambda c: fn(c[None])[0], a, batch_size=chunk)

        def carried(c):
            return _carried(layer, own, config, gain, c, jnp.zeros(c.shape[0], c.dtype))

        # Rows of layers still to come are 0 and stay 0.
        outputs = pieces(carried, outputs)
        started = _started(layer, own, config, gain, whole)
        outputs = jax.lax.dynamic_update_slice(outputs, started, (index * h, 0, 0))
        one = jnp.ones(1, whole.dtype)
        return (outputs, _carried(layer, own, config, gain, whole, one, entry.memory)), None

    # `whole`: the layers' input with the gains on paths, which is the network's own without them.
    outputs, whole = jnp.zeros((0, n, d), entry.x.dtype), entry.x[None]
    steps = (jnp.arange(config.depth), constants, on_paths)
    for first, end in layer_groups(config.depth):
        rows = slice(first, end)
        outputs = jnp.pad(outputs, ((0, (end - first) * h), (0, 0), (0, 0)))
        xs = (layer_rows(params, config, rows), jax.tree.map(lambda a, r=rows: a[r], steps))
        (outputs, whole), _ = jax.lax.scan(body, (outputs, whole), xs)
    if config.final_norm:
        scale = frozen.frozen_scale(last, config)
        no_bias = jnp.zeros(outputs.shape[0], outputs.dtype)
        outputs = frozen.frozen_norm(params.final_norm, scale, outputs, no_bias, config)
    return outputs.reshape(config.depth, h, n, d)
