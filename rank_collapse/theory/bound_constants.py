"""The constants of the bounds: norms of weights, Lipschitz constants, spreads of scores."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.annotations import DType, Leaf, Number
from rank_collapse.measures.norms import composite_norm, norm_1, norm_inf
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import LayerGains
from rank_collapse.theory.log_operations import LogState


@full_precision
def head_weights(
    params: AttentionParams, temperature: Number = 1.0
) -> tuple[Float[Array, "h d d"], Float[Array, "h d d"]]:
    """Compute (W_QK,h = W_Q W_Kᵀ/temperature, W_h = W_V W_O) of one layer, [h, d, d] each.

    Args:
        params: `AttentionParams` of the layer.
        temperature: Divisor of the scores.
    """
    params = repeat_groups(params)
    w_qk = jnp.einsum("hdk,hek->hde", params.w_q, params.w_k) / temperature
    return w_qk, jnp.einsum("hdv,hve->hde", params.w_v, params.w_o)


def largest_slope(kind: str, dtype: DType) -> Float[Array, ""]:
    """Compute sup|φ'| of an MLP's activation; inf for gated MLPs, which multiply two functions.

    Args:
        kind: `TransformerConfig.mlp`.
        dtype: Number format of the result.
    """
    if kind in layers.GATED:
        return jnp.asarray(jnp.inf, dtype)
    phi = layers.get_activation(kind).fn
    # At the ends of the grid the slopes lie within 1e-6 of their limits.
    grid = jnp.linspace(-8, 8, 16001, dtype=dtype)
    slope = jnp.max(jnp.abs(jax.jvp(phi, (grid,), (jnp.ones_like(grid),))[1]))
    return slope * (1 + 1e-6)  # what may hide between two points of the grid


@full_precision
def lipschitz_constants(
    params: MLPParams, kind: str, norms: tuple[Callable, ...] = (norm_1, norm_inf)
) -> tuple[Float[Array, ""], ...]:
    """Compute λ_p of an MLP for each norm: ‖MLP(X) − 1 MLP(x)ᵀ‖_p ≤ λ_p ‖X − 1xᵀ‖_p.

    In ‖.‖_{1,∞} λ = √(λ_1 λ_∞). λ_p = sup|φ'| ‖W_in‖_p ‖W_out‖_p: an activation acts entry by
    entry, hence on all norms alike. Gated MLPs multiply two functions of the input and have no such
    constant: inf.

    Args:
        params: Parameters of the MLP.
        kind: `TransformerConfig.mlp`.
        norms: Norms of matrices.
    """
    slope = largest_slope(kind, params.w_in.dtype)
    return tuple(slope * norm(params.w_in) * norm(params.w_out) for norm in norms)


def sublayer_lipschitz(
    params: BlockParams, gains: LayerGains, config: TransformerConfig, *norms: Callable
) -> tuple[Float[Array, ""], ...]:
    """Compute the Lipschitz constants of the MLP sublayer, skip included, in each norm; 1 without
    MLP.

    The sublayer is λ x·[mlp_skip] + γ MLP(x); the constant of the MLP is from
    `lipschitz_constants`.

    Args:
        params, gains: Parameters and gains of the layer.
        config: Configuration of the network.
        *norms: Norms of matrices.
    """
    if config.mlp == "none":
        return (jnp.ones((), gains.temperature.dtype),) * len(norms)
    skip = jnp.max(jnp.abs(gains.skip.mlp)) if config.mlp_skip else 0.0
    factor = jnp.max(jnp.abs(gains.branch.mlp))
    return tuple(skip + factor * c for c in lipschitz_constants(params.mlp, config.mlp, norms))


class LayerConstants(struct.Struct):
    """The constants of a layer that the bounds use; see `BoundReport`. The input's residual is
    10^(log10_mantissa + log10_scale); log10_c belongs to the attention alone."""

    beta: Leaf
    gamma: Leaf
    log10_c: Leaf
    lipschitz: Leaf
    log10_spread: Leaf
    log10_mantissa: Leaf
    log10_scale: Leaf


def score_spread(
    w_qk: Float[Array, "h d d"],
    state: LogState,
    config: TransformerConfig,
    allowed: Bool[Array, "#h #n m"],
    keep: Bool[Array, "n"],
) -> Float[Array, "h n"]:
    """Compute D_ii e^{−2s}, the spread of the scores R W_QK Rᵀ/√k in a row; 0 in masked rows.

    Args:
        w_qk: Matrices W_QK, from `head_weights`.
        state: Input of the layer's attention.
        config: Configuration of the network.
        allowed: Bool, the keys that each row may see.
        keep: Bool [n], the tokens that exist.
    """
    deviation = jnp.einsum("nd,hde,me->hnm", state.residual, w_qk, state.residual)
    deviation = deviation / math.sqrt(score_width(config))
    high = jnp.max(jnp.where(allowed, deviation, -jnp.inf), axis=-1)
    low = jnp.min(jnp.where(allowed, deviation, jnp.inf), axis=-1)
    return jnp.where(keep[None, :] & (high >= low), high - low, 0)


def layer_constants(
    params: BlockParams,
    state: LogState,
    gains: LayerGains,
    config: TransformerConfig,
    spread: Float[Array, "h n"],
) -> LayerConstants:
    """Compute β, γ*, c, D and λ of one layer; their formulas are at `BoundReport`.

    With R e^s the residual of `state`, `spread` is D e^{−2s}. γ* and c are D over ‖R e^s‖², up to
    factors, so that e^{2s} cancels.

    Args:
        params, gains: Parameters and gains of the layer.
        state: Input of the layer's attention.
        config: Configuration of the network.
        spread: Result of `score_spread`.
    """
    width = score_width(config)
    w_qk, w = head_weights(params.attention, gains.temperature)
    norm_qk = jax.vmap(norm_1)(w_qk)
    norm_r = composite_norm(state.residual)
    total, largest = jnp.sum(spread, axis=-1), jnp.max(spread, axis=-1)
    numerator = jnp.sqrt(total) * jnp.sqrt(largest)
    denominator = 2 * norm_qk * norm_r**2
    column_sum = jnp.sum(total * jax.vmap(norm_1)(w))
    row_sum = jnp.sum(largest * jax.vmap(norm_inf)(w))
    log10_c = math.log10(2) + (jnp.log10(column_sum) + jnp.log10(row_sum)) / 2
    log10_scale = state.log_scale / math.log(10)
    lipschitz_1, lipschitz_inf = sublayer_lipschitz(params, gains, config, norm_1, norm_inf)
    return LayerConstants(
        beta=norm_qk * jax.vmap(composite_norm)(w),
        gamma=math.sqrt(width) * numerator / jnp.where(denominator == 0, 1, denominator),
        log10_c=log10_c - 2 * jnp.log10(jnp.where(norm_r == 0, 1, norm_r)),
        lipschitz=jnp.sqrt(lipschitz_1) * jnp.sqrt(lipschitz_inf),
        log10_spread=jnp.log10(spread) + 2 * log10_scale,
        log10_mantissa=jnp.log10(norm_r),
        log10_scale=log10_scale,
    )


def score_width(config):
    """Returns k where scores are divided by √k, else 1."""
    return config.qk_width if config.scale_scores else 1


def gain_size(gain):
    """Compute |γ| of each layer; its largest entry where it is given per feature."""
    gain = jnp.abs(gain)
    return gain if gain.ndim == 1 else jnp.max(gain, axis=-1)
