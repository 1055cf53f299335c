"""The constant of the 3^L law: what ‖res(X^L)‖^{1/3^L} tends to, measured and in closed form."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments.paper.collapse.cubic_regime import log10_growth
from rank_collapse import struct
from rank_collapse.network import covers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import at_least_float32, prepare_inputs
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import apply, walk_layer, walk_layers
from rank_collapse.theory import tangent
from rank_collapse.theory.bounds import not_covered, score_width
from rank_collapse.theory.log_operations import LogState, around_mean, log10_norm
from rank_collapse.theory.logdomain import LogTrace, log_trace

# Dot-product attention without skip, all rows sharing keys and biases.
COVERS = covers.Covers(
    "the cubic law",
    covers.SIZES
    | covers.STREAM
    | covers.MLPS
    | covers.EXPERTS
    | covers.at_any_value("scale_scores", "temperature")
    | {"attention_skip": (False,)},
)


class RateConstant(struct.Struct):
    """Λ of log10‖R_L‖ ≈ 3^L Λ; all logarithms are decimal.

    Attributes:
        kappa: κ_l = log‖R_{l+1}‖ − 3 log‖R_l‖, [..., L]; NaN from where a logarithm leaves range.
        log10_lambda: Λ = log‖R_0‖ + Σ_l κ_l/3^{l+1} = log‖R_L‖/3^L.
        error: The largest change by further layers, if no κ there exceeds the measured ones:
            sup|κ|/(2·3^L).
        log10_c_eff: 2(Λ − log‖R_0‖): the c with which c^{(3^L − 1)/2}‖R_0‖^{3^L} has this Λ.
    """

    kappa: struct.Leaf
    log10_lambda: struct.Leaf
    error: struct.Leaf
    log10_c_eff: struct.Leaf


def measured_constant(profile: Any) -> RateConstant:
    """Λ and c_eff of a profile; valid where the residual falls by the cubic law.

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


@full_precision
def closed_profile(
    params: Any, x: Any, config: TransformerConfig, *, log: LogTrace | None = None, **inputs: Any
) -> tuple[Float[Array, "p"], Array, Float[Array, "l"]]:
    """(log10‖R_l‖_{1,∞} for l = 0..L, the layer s that the closed form starts at, log10 growth).

    Up to R_s it is the measured residual; from layer s on the recursion of `cubic_profile`, started
    at the input of layer s's attention in the measured pass. s is the first layer from which
    the diameter bound, extended through norms, falls in every layer (`cubic_regime.log10_growth`).
    Where it falls, the leading order of attention does, so that the constant has the right sign; a
    closed form that starts where residuals are not small need not. NaN in all layers, and s = L,
    where no layer is certified.

    Args:
        params, x, config, **inputs: As of `cubic_profile`.
        log: What `log_trace` gives of the same arguments, where it is known.

    Raises:
        ValueError: As `cubic_profile`; also a network that has no residual in logarithms.
    """
    params, prepared = _prepared(params, x, config, inputs)
    log = log_trace(params, x, config, **inputs) if log is None else log
    trace = apply(params, x, config, **inputs)
    return _closed_pass(params, prepared, config, log, trace)


@jax.jit
def _closed_pass(params, prepared, config, log, trace):
    diameters = log.input_diameters + log.inputs.log_scale / math.log(10)
    growth = log10_growth(params, trace, diameters, config, prepared.existing_tokens)
    growth = jnp.where(jnp.isfinite(log.profile[:-1]), growth, jnp.nan)
    certified = growth < 0
    start = jnp.where(jnp.any(certified), jnp.argmax(certified), config.depth)
    profile = _cubic_pass(params, prepared, config, (start, log.inputs))
    profile = jnp.where(jnp.arange(config.depth + 1) <= start, log.profile, profile)
    return jnp.where(start < config.depth, profile, jnp.nan), start, growth


@full_precision
def cubic_profile(
    params: Any, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "l"]:
    """log10‖R_l‖_{1,∞} for l = 0..L by the leading order of attention in its residual.

        R_{l+1} = R_l A_l,  A_l = (1/√k) Σ_h W_QK,h C_l W_h,  C_l = R_lᵀ R_l/n.

    Tokens enter through their covariance C alone: attention weights tend to uniform ones, for any
    biases, which move the mean token. Norms and MLPs multiply by their Jacobian at the mean token,
    branch gains and the temperature as usual. In logarithms, to any depth up to 3^80. It holds
    where the residual is small from the first layer on: elsewhere `closed_profile` does.

    Args:
        params, x, config: As in `apply`: dot products, no skip, all rows sharing keys and biases.
        **inputs: mask (Bool [n]), segments and positions of `apply`.

    Raises:
        ValueError: A network whose residual does not fall by the cubic law, or whose scores have no
            W_QK; inputs of the wrong shape.

    Source: the leading order of theorem 2.3's inequality (Dong et al. 2021), as an equation.
    """
    params, prepared = _prepared(params, x, config, inputs)
    return _cubic_pass(params, prepared, config)


def _prepared(params, x, config, inputs):
    reasons = not_covered(config, mask=inputs.get("mask"), bias=inputs.get("bias"))
    params, prepared = at_least_float32(*prepare_inputs(params, x, config, covers=COVERS, **inputs))
    rows = [reason for reason in reasons if reason.startswith("rows")]
    if rows:
        raise ValueError(f"{COVERS.name} does not cover this input: {rows[0]}")
    return params, prepared


@jax.jit
def _cubic_pass(params, prepared, config, measured=None):
    """The profile; with `measured` (s, LogStates [L]) attention reads those up to layer s."""
    start = around_mean(prepared.x, prepared.existing_tokens)
    first, states = (None, None) if measured is None else measured

    def step(layer, state):
        state, _ = walk_layer(CubicAttention(first), layer, state)
        return state, log10_norm(state)

    _, profile = walk_layers(step, start, params, prepared, config, extra=states)
    return jnp.concatenate([log10_norm(start)[None], profile])


class CubicAttention(tangent.Tangents):
    """x̄ Σ_h W_h + b and R Σ_h W_QK,h C W_h/√k, formed per head as R W_Q ((R W_K)ᵀ R W_V/n) W_O.

    Up to layer `first` the branch input is the `LogState` of `Layer.extra`.
    """

    def __init__(self, first: Any = None):
        self.first = first

    def apply_attention(self, layer, branch_input):
        params, keep, given = layer.params.attention, layer.inputs.existing_tokens, layer.extra
        if given is not None:
            use = layer.index <= self.first
            branch_input = jax.tree.map(lambda a, b: jnp.where(use, a, b), given, branch_input)
        query, key, value = (
            jnp.einsum("nd,hdk->hnk", branch_input.rest, w)
            for w in (params.w_q, params.w_k, params.w_v)
        )
        width = math.sqrt(score_width(layer.config))
        factor = layer.gains.temperature * width * jnp.sum(keep)
        covariance = jnp.einsum("hnk,hnv->hkv", key, value) / factor
        rest = jnp.einsum("hnk,hkv,hvd->nd", query, covariance, params.w_o)
        return LogState(
            tangent.attended(params, branch_input.mean), rest, 3 * branch_input.log_scale
        ), None
