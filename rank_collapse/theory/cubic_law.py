"""The constant of the 3^L law: what ‖res(X^L)‖^{1/3^L} tends to, measured and in closed form.

Axis letters: n tokens, d width, h heads, k per-head query/key width, v value width, l layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network import covers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import at_least_float32, enter
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import walk, walk_layer
from rank_collapse.theory import tangent
from rank_collapse.theory.bounds import not_covered, score_width

# Dot-product attention without skip, all rows sharing keys and biases.
COVERS = covers.Covers(
    "the cubic law",
    covers.SIZES
    | covers.STREAM
    | covers.MLPS
    | covers.EXPERTS
    | covers.anything("scale_scores", "temperature")
    | {"attention_skip": (False,)},
)


@struct.dataclass
class RateConstant:
    """Λ of log10‖R_L‖ ≈ 3^L Λ; all logarithms are decimal.

    Attributes:
        kappa: κ_l = log‖R_{l+1}‖ − 3 log‖R_l‖, [..., L]; NaN from where a logarithm leaves range.
        log10_lambda: Λ = log‖R_0‖ + Σ_l κ_l/3^{l+1} = log‖R_L‖/3^L.
        error: How far the sum over more layers can lie from it if no κ is larger than those seen:
            sup|κ|/(2·3^L).
        log10_c_eff: 2(Λ − log‖R_0‖): the c with which c^{(3^L − 1)/2}‖R_0‖^{3^L} has this Λ.
    """

    kappa: Any
    log10_lambda: Any
    error: Any
    log10_c_eff: Any


def measured_constant(profile: Any) -> RateConstant:
    """Λ and c_eff of a profile; it means something where the residual falls by the cubic law.

    Args:
        profile: log10‖res(X^l)‖ [..., L + 1], from `log_residual_profile`. The layers after the
            last finite one are left out.
    """
    profile = jnp.asarray(profile)
    kappa = profile[..., 1:] - 3 * profile[..., :-1]
    seen = jnp.cumprod(jnp.isfinite(profile), axis=-1) > 0
    kappa = jnp.where(seen[..., 1:], kappa, jnp.nan)
    depth = jnp.sum(seen, axis=-1) - 1
    last = jnp.take_along_axis(profile, jnp.maximum(depth, 0)[..., None], axis=-1)[..., 0]
    power = jnp.asarray(3.0, profile.dtype) ** depth
    value = jnp.where(depth < 0, jnp.nan, last / power)
    worst = jnp.max(jnp.where(seen[..., 1:], jnp.abs(kappa), 0), axis=-1, initial=0)
    error = jnp.where(depth < 1, jnp.inf, worst / (2 * power))
    return RateConstant(kappa, value, error, 2 * (value - profile[..., 0]))


def theorem_constant(report: Any, config: TransformerConfig) -> Float[Array, "..."]:
    """log10 c of theorems 2.2 and 2.3, c = 4γ*βH/√k, beside `RateConstant.log10_c_eff`.

    Args:
        report: From `bound_report`.
        config: The network.
    """
    c = 4 * report.stack_gamma * report.stack_beta * config.num_heads
    return jnp.log10(c / np.sqrt(score_width(config)))


def closed_constant(params: Any, x: Any, config: TransformerConfig, **inputs: Any) -> RateConstant:
    """Λ and c_eff from the closed recursion, `measured_constant` of `cubic_profile`.

    Args, Raises: See `cubic_profile`.
    """
    return measured_constant(cubic_profile(params, x, config, **inputs))


@full_precision
def cubic_profile(
    params: Any, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "l"]:
    """log10‖R_l‖_{1,∞} for l = 0..L by the leading order of attention in its residual.

        R_{l+1} = R_l A_l,  A_l = (1/√k) Σ_h W_QK,h C_l W_h,  C_l = R_lᵀ R_l/n.

    Tokens enter through their covariance C alone: attention weights tend to uniform ones, for any
    biases, which move the mean token. Norms and MLPs multiply by their Jacobian at the mean token,
    branch gains and the temperature as usual. In logarithms, to any depth up to 3^80.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network: dot-product attention without skip, all rows sharing keys and biases.
        **inputs: mask (Bool [n]), segments and positions of `apply`.

    Raises:
        ValueError: A network whose residual does not fall by the cubic law, or whose scores have no
            W_QK; inputs of the wrong shape.

    Source: the leading order of theorem 2.3's inequality (Dong et al. 2021), as an equation.
    """
    reasons = not_covered(config, mask=inputs.get("mask"), bias=inputs.get("bias"))
    params, entry = at_least_float32(*enter(params, x, config, covers=COVERS, **inputs))
    rows = [reason for reason in reasons if reason.startswith("rows")]
    if rows:
        raise ValueError(f"{COVERS.name} does not cover this input: {rows[0]}")
    return _cubic_pass(params, entry, config)


@jax.jit
def _cubic_pass(params, entry, config):
    keep = entry.keep
    start = tangent.around_mean(entry.x, keep)

    def step(layer, state):
        state, _ = walk_layer(CubicAttention(), layer, state)
        return state, tangent.log10_norm(state)

    _, profile = walk(step, start, params, entry, config)
    return jnp.concatenate([tangent.log10_norm(start)[None], profile])


class CubicAttention(tangent.Tangents):
    """x̄ Σ_h W_h + b and R Σ_h W_QK,h C W_h/√k, formed per head as R W_Q ((R W_K)ᵀ R W_V/n) W_O."""

    def attention(self, layer, seen):
        params, keep = layer.params.attention, layer.inputs.keep
        values = jnp.einsum("d,hdv->hv", seen.mean, params.w_v) + params.b_v
        mean = jnp.einsum("hv,hvd->d", values, params.w_o) + params.b_o
        query, key, value = (
            jnp.einsum("nd,hdk->hnk", seen.rest, w) for w in (params.w_q, params.w_k, params.w_v)
        )
        width = np.sqrt(score_width(layer.config))
        factor = layer.gains.temperature * width * jnp.sum(keep)
        covariance = jnp.einsum("hnk,hnv->hkv", key, value) / factor
        rest = jnp.einsum("hnk,hkv,hvd->nd", query, covariance, params.w_o)
        return tangent.Tangent(mean, rest, 3 * seen.log_scale), None
