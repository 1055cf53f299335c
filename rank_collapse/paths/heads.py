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
from rank_collapse.network.sublayer import sites_of, sublayer, token_norm
from rank_collapse.network.transformer import block, scan_layers
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import layer_groups
from rank_collapse.paths.contributions import layer_rows, path_gains


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


def _carried(params, constants, config, gains, outputs):
    """Heads' outputs [g, n, d] of earlier layers after one more layer, biases left aside."""
    sites = sites_of(params, config, gains)
    no_bias = jnp.zeros(outputs.shape[0], outputs.dtype)

    def attention(c):
        weights = constants.weights
        return frozen.frozen_attention(params.attention, weights, c, no_bias), None

    outputs, _ = sublayer(
        sites.attention, outputs, attention, _norm_by(constants.attention_scale, config)
    )
    return _rest_of_layer(params, constants, config, sites, outputs)


def _started(params, constants, config, gains, seen):
    """Outputs [h, n, d] of a layer's own heads at the layer's end."""
    sites = sites_of(params, config, gains)
    values = jnp.einsum("nd,hdv->hnv", seen, params.attention.w_v)
    values = values + params.attention.b_v[:, None, :]
    mixed = jnp.einsum("hnm,hmv->hnv", constants.weights, values)
    own = jnp.einsum("hnv,hvd->hnd", mixed, params.attention.w_o)
    own = scaled(sites.attention.branch_gain, own)
    if sites.attention.placement == "post":
        own = _norm_by(constants.attention_scale, config)(sites.attention, own)
    return _rest_of_layer(params, constants, config, sites, own)


def _rest_of_layer(params, constants, config, sites, outputs):
    """Cross-attention, which heads' outputs pass by the skip alone, and the MLP."""
    no_bias = jnp.zeros(outputs.shape[0], outputs.dtype)

    def nothing(c):
        return jnp.zeros_like(c), None

    def mlp(c):
        return frozen.frozen_mlp(params.mlp, constants.gate, c, no_bias), None

    if config.cross_attention:
        norm = _norm_by(constants.cross_scale, config)
        outputs, _ = sublayer(sites.cross, outputs, nothing, norm)
    if config.mlp != "none":
        outputs, _ = sublayer(sites.mlp, outputs, mlp, _norm_by(constants.mlp_scale, config))
    return outputs


def _norm_by(scale, config):
    def norm(site, c):
        no_bias = jnp.zeros(c.shape[0], c.dtype)
        return frozen.frozen_norm(site.norm, scale, c, no_bias, config)

    return norm


@functools.partial(jax.jit, static_argnames="chunk")
def _carry_heads(params, entry, config, on_paths, chunk):
    h, (n, d) = config.num_heads, entry.x.shape
    gains = layer_gains(config, entry.x.dtype)

    def freeze(x, step):
        layer, own = step
        trace = block(layer, x, config, own, entry)
        site = sites_of(layer, config, own).attention
        seen = token_norm(site, x) if site.placement == "pre" else x
        return trace.hidden, (frozen.freeze_layer(layer, x, trace, config, own), seen)

    last, (constants, seen) = scan_layers(freeze, entry.x, params, config, gains)

    def body(outputs, step):
        layer, (index, own, seen, gain) = step

        def pieces(fn, a):
            """fn of the heads, `chunk` at a time."""
            if a.shape[0] <= chunk:
                return fn(a)
            return jax.lax.map(lambda c: fn(c[None])[0], a, batch_size=chunk)

        # Rows of layers still to come are 0 and stay 0.
        outputs = pieces(lambda c: _carried(layer, own, config, gain, c), outputs)
        started = _started(layer, own, config, gain, seen)
        return jax.lax.dynamic_update_slice(outputs, started, (index * h, 0, 0)), None

    outputs = jnp.zeros((0, n, d), entry.x.dtype)
    steps = (jnp.arange(config.depth), constants, seen, on_paths)
    for first, end in layer_groups(config.depth):
        rows = slice(first, end)
        outputs = jnp.pad(outputs, ((0, (end - first) * h), (0, 0), (0, 0)))
        xs = (layer_rows(params, config, rows), jax.tree.map(lambda a, r=rows: a[r], steps))
        outputs, _ = jax.lax.scan(body, outputs, xs)
    if config.final_norm:
        scale = frozen.frozen_scale(last, config)
        no_bias = jnp.zeros(outputs.shape[0], outputs.dtype)
        outputs = frozen.frozen_norm(params.final_norm, scale, outputs, no_bias, config)
    return outputs.reshape(config.depth, h, n, d)
