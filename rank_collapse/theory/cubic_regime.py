"""From which layer on the diameter bound certifies that a residual falls by the cubic law.

The bound of `mean_bounds` is extended through norms and gated MLPs with what they see in the pass
that is looked at: the standard deviations of its tokens, and its hidden units.

Axis letters: n tokens, d width, f hidden units, h heads, l layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.network.sublayer import Site, looked_at, norm_input, sites_of
from rank_collapse.network.transformer import LayerTrace, Trace, scan_layers
from rank_collapse.theory.bounds import largest_slope
from rank_collapse.theory.mean_bounds import attention_norms, spectral_norm


@struct.dataclass
class LayerGrowth:
    """By how much a layer may multiply distances of tokens, as natural logarithms.

    Attributes:
        before: From X^l to what its attention looks at: its norm, where it comes before.
        cubic: log c, with which diam(SA(X)) ≤ c diam³.
        after: From SA(X) to X^{l+1}: gains, norms and the MLP.
    """

    before: Any
    cubic: Any
    after: Any


def log10_growth(
    params: TransformerParams,
    trace: Trace,
    log10_diameters: Float[Array, "l"],
    config: TransformerConfig,
    keep: Bool[Array, "n"],
) -> Float[Array, "l"]:
    """log10 of the largest growth per layer that the diameter bound allows from layer l on.

    With Δ_m the diameter of what layer m's attention looks at, the one measured for m = l, and
    Δ_{m+1} = g_m Δ_m³ the bound of the next one's, it is max_{m ≥ l} log10(g_m Δ_m²): where it is
    negative, distances fall in every layer from l on and ever faster, hence so does the leading
    order of attention, which obeys the same bound. g_m is c of the attention times

        max|gain|/min_i σ_i of every norm, since |LN x − LN y| ≤ max|gain| |x − y|/√(σ_x σ_y),

    σ² = variance + eps of the tokens that it sees in the pass (RMSNorm: mean square + eps), |γ| of
    gains, and λ + |γ| Lipschitz constant of the MLP sublayer.

    Args:
        params, config: The network, of those that `cubic_law.not_cubic` lets through.
        trace: Of the forward pass.
        log10_diameters: Of what each layer's attention looks at.
        keep: Which tokens exist.

    Source: derived here. (x, y) ↦ |x/|x| − y/|y|| ≤ |x − y|/√(|x||y|) is sharp, of the centred
    tokens with √(d eps) as one more feature.
    """
    gains = layer_gains(config, trace.hidden.dtype, params)

    def body(_, step):
        layer, (own, x, told) = step
        return None, layer_growth(layer, own, x, told, config, keep)

    _, found = scan_layers(body, None, params, config, (gains, trace.hidden[:-1], trace.layers))
    step = found.cubic + found.after + jnp.append(found.before[1:], 0)
    start = log10_diameters * np.log(10.0)

    def iterated(first):
        def body(diameter, layer):
            index, growth, measured = layer
            diameter = jnp.where(index <= first, measured, diameter)
            now = jnp.where(index < first, -jnp.inf, growth + 2 * diameter)
            return diameter + now, now

        _, seen = jax.lax.scan(body, start[0], (jnp.arange(len(step)), step, start))
        return jnp.max(seen)

    return jax.vmap(iterated)(jnp.arange(len(step))) / np.log(10.0)


def layer_growth(
    params: BlockParams,
    gains: LayerGains,
    x: Float[Array, "n d"],
    told: LayerTrace,
    config: TransformerConfig,
    keep: Bool[Array, "n"],
) -> LayerGrowth:
    """The factors of one layer; see `log10_growth`.

    Args:
        params, gains: Of the layer.
        x: X^l.
        told: What the pass has of the layer.
        config: The network.
        keep: Which tokens exist.
    """
    sites = sites_of(params, config, gains)
    scores, values = attention_norms(params.attention, gains.temperature, config)
    before, inside, after = _around(sites.attention, x, told.attention_branch, keep)
    growth = inside + after
    if config.mlp != "none":
        x = told.after_attention
        norm_before, inside, after = _around(sites.mlp, x, told.mlp_branch, keep)
        seen = looked_at(sites.mlp, x)
        inside = inside + norm_before + jnp.log(mlp_lipschitz(params.mlp, seen, config.mlp, keep))
        if sites.mlp.skip:
            inside = jnp.logaddexp(inside, jnp.log(jnp.max(jnp.abs(sites.mlp.skip_gain))))
        growth = growth + inside + after
    return LayerGrowth(before, jax.nn.logsumexp(scores + values), growth)


def mlp_lipschitz(
    params: layers.MLPParams, x: Float[Array, "n d"], kind: str, keep: Bool[Array, "n"]
) -> Float[Array, ""]:
    """λ with |MLP(x_i) − MLP(x_k)|₂ ≤ λ |x_i − x_k|₂ for these tokens.

    sup|φ'| ‖W_in‖₂ ‖W_out‖₂, for all tokens; of gated MLPs, which multiply u = φ(x W_gate + b) by
    z = x W_in + b', (sup|φ'| ‖W_gate‖₂ max|z| + ‖W_in‖₂ max|u|) ‖W_out‖₂ over these ones:
    u_i z_i − u_k z_k = (u_i − u_k) z_i + u_k (z_i − z_k).

    Args:
        params: Of the layer.
        x: What the MLP looks at.
        kind: Of `layers.MLP_KINDS` but "none".
        keep: Which tokens exist.
    """
    size, out = spectral_norm(params.w_in), spectral_norm(params.w_out)
    if kind not in layers.GATED:
        return largest_slope(kind, x.dtype) * size * out
    z = x @ params.w_in + params.b_in[None, :]
    u = layers.activation_of(kind).fn(x @ params.w_gate + params.b_gate[None, :])
    largest = [jnp.max(jnp.where(keep[:, None], jnp.abs(a), 0)) for a in (z, u)]
    slope = largest_slope(layers.GATED[kind], x.dtype) * spectral_norm(params.w_gate)
    return (slope * largest[0] + size * largest[1]) * out


def _around(site: Site, x, part, keep):
    """log factors of the norm before the branch, of what follows it, and of the norm of the sum."""
    placed = norm_input(site, x, part)
    outer = 0.0 if placed is None else _norm_factor(site, placed, keep)
    inside = jnp.log(jnp.max(jnp.abs(site.branch_gain)))
    if site.norms_branch:
        inside = inside + _norm_factor(site.at_branch, part, keep)
    return (outer, inside, 0.0) if site.norms_input else (0.0, inside, outer)


def _norm_factor(site, tokens, keep):
    _, inverse = layers.norm_statistics(tokens, site.kind, site.eps)
    gain = 1.0 if site.norm is None else jnp.max(jnp.abs(site.norm.gain))
    return jnp.log(gain * jnp.max(jnp.where(keep[:, None], inverse, 0)))
