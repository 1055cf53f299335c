"""From which layer on the diameter bound certifies that a residual falls by the cubic law.

The bound of `mean_bounds` is extended through norms and gated MLPs with what they see in the pass
that is measured: the standard deviations of its tokens, and its hidden units.

Axis letters: n tokens, d width, f hidden units, h heads, l layers.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import replay
from rank_collapse.network.trace import Trace
from rank_collapse.network.transformer import Layer, SublayerValues
from rank_collapse.theory.bounds import largest_slope, lipschitz_constants
from rank_collapse.theory.mean_bounds import attention_norms, spectral_norm


class LayerGrowth(struct.Struct):
    """By how much a layer may multiply distances of tokens, as natural logarithms."""

    before: Any  # From X^l to the input of its attention: its norm, where it comes before
    cubic: Any  # log c, with which diam(SA(X)) ≤ c diam³
    after: Any  # From SA(X) to X^{l+1}: gains, norms and the MLP


def log10_growth(
    params: TransformerParams,
    trace: Trace,
    log10_diameters: Float[Array, "l"],
    config: TransformerConfig,
    keep: Bool[Array, "n"],
) -> Float[Array, "l"]:
    """log10 of the largest growth per layer that the diameter bound allows from layer l on.

    With Δ_m the diameter of the input of layer m's attention, the one measured for m = l, and
    Δ_{m+1} = g_m Δ_m³ the bound of the next one's, it is max_{m ≥ l} log10(g_m Δ_m²): where it is
    negative, distances fall in every layer from l on and ever faster, hence so does the leading
    order of attention, which obeys the same bound. g_m is c of the attention times

        max|gain|/min_i σ_i of every norm, since |LN x − LN y| ≤ max|gain| |x − y|/√(σ_x σ_y),

    σ² = variance + eps of the tokens that it sees in the pass (RMSNorm: mean square + eps), |γ| of
    gains, and λ + |γ| Lipschitz constant of the MLP sublayer.

    Args:
        params, config: The network, of those that `cubic_law.COVERS` has.
        log10_diameters: Of the input of each layer's attention.

    Source: derived here. (x, y) ↦ |x/|x| − y/|y|| ≤ |x − y|/√(|x||y|) is sharp, of the centred
    tokens with √(d eps) as one more feature.
    """
    found = replay(partial(layer_growth, keep=keep), params, trace, config)
    step = found.cubic + found.after + jnp.append(found.before[1:], 0)
    start = log10_diameters * math.log(10)

    def iterated(first):
        def body(diameter, layer):
            index, growth, measured = layer
            diameter = jnp.where(index <= first, measured, diameter)
            now = jnp.where(index < first, -jnp.inf, growth + 2 * diameter)
            return diameter + now, now

        _, seen = jax.lax.scan(body, start[0], (jnp.arange(len(step)), step, start))
        return jnp.max(seen)

    return jax.vmap(iterated)(jnp.arange(len(step))) / math.log(10)


def layer_growth(
    layer: Layer, passages: dict[str, SublayerValues], keep: Bool[Array, "n"]
) -> LayerGrowth:
    """The factors of one layer; see `log10_growth`."""
    params, config = layer.params, layer.config
    scores, values = attention_norms(params.attention, layer.gains.temperature, config)
    before, inside, after = _around(passages["attention"], keep)
    growth = inside + after
    if "mlp" in passages:
        passage = passages["mlp"]
        norm_before, inside, after = _around(passage, keep)
        lipschitz = mlp_lipschitz(params.mlp, passage.branch_input, config.mlp, keep)
        inside = inside + norm_before + jnp.log(lipschitz)
        if passage.spec.skip:
            inside = jnp.logaddexp(inside, jnp.log(jnp.max(jnp.abs(passage.spec.skip_gain))))
        growth = growth + inside + after
    return LayerGrowth(before, jax.nn.logsumexp(scores + values), growth)


def mlp_lipschitz(
    params: layers.MLPParams, x: Float[Array, "n d"], kind: str, keep: Bool[Array, "n"]
) -> Float[Array, ""]:
    """λ with |MLP(x_i) − MLP(x_k)|₂ ≤ λ |x_i − x_k|₂ for these tokens.

    sup|φ'| ‖W_in‖₂ ‖W_out‖₂, for all tokens; of gated MLPs, which multiply u = φ(x W_gate + b) by
    z = x W_in + b', (sup|φ'| ‖W_gate‖₂ max|z| + ‖W_in‖₂ max|u|) ‖W_out‖₂ over these ones:
    u_i z_i − u_k z_k = (u_i − u_k) z_i + u_k (z_i − z_k).
    """
    if kind not in layers.GATED:
        return lipschitz_constants(params, kind, (spectral_norm,))[0]
    z = x @ params.w_in + params.b_in[None, :]
    u = layers.get_activation(kind).fn(x @ params.w_gate + params.b_gate[None, :])
    largest = [jnp.max(jnp.where(keep[:, None], jnp.abs(a), 0)) for a in (z, u)]
    slope = largest_slope(layers.GATED[kind], x.dtype) * spectral_norm(params.w_gate)
    size = slope * largest[0] + spectral_norm(params.w_in) * largest[1]
    return size * spectral_norm(params.w_out)


def _around(passage, keep):
    """log factors of the norm before the branch, of what follows it, and of the norm of the sum."""
    spec = passage.spec
    inside = jnp.log(jnp.max(jnp.abs(spec.branch_gain)))
    none = jnp.zeros_like(inside)
    outer = none if passage.norm_input is None else _norm_factor(spec, passage.norm_input, keep)
    if spec.norms_branch:
        inside = inside + _norm_factor(spec.at_branch, passage.branch_output, keep)
    return (outer, inside, none) if spec.norms_input else (none, inside, outer)


def _norm_factor(spec, tokens, keep):
    _, inverse = layers.norm_statistics(tokens, spec.norm_kind, spec.eps)
    gain = 1.0 if spec.norm is None else jnp.max(jnp.abs(spec.norm.gain))
    return jnp.log(gain * jnp.max(jnp.where(keep[:, None], inverse, 0)))
