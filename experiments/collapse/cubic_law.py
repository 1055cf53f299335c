"""The 3^L law of the residual: its constant, its closed form, and the layer from which it holds.

The constant is the limit of ‖res(X^L)‖^{1/3^L}. The diameter bound of `mean_bounds` certifies the
layer from which the residual falls by the law. The bound is extended through norms, with the
standard deviations of the tokens in the measured pass.

Axis letters: n tokens, d width, h heads, l layers.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

import rank_collapse as rc
from rank_collapse import struct
from rank_collapse.annotations import Leaf
from rank_collapse.network import covers, layers
from rank_collapse.network.inputs import at_least_float32, prepare_inputs
from rank_collapse.network.passes import replay
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import Layer, SublayerValues, walk_layer, walk_layers
from rank_collapse.theory import bounds, mean_bounds, tangent
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


class LawConstant(NamedTuple):
    """The constant of a profile that falls by the cubic law; logarithms are decimal."""

    log10_lambda: Array  # Λ of log10‖R_L‖ ≈ 3^L Λ
    log10_c_eff: Array  # 2(Λ − log‖R_0‖): the c with which c^{(3^L − 1)/2}‖R_0‖^{3^L} has this Λ


def measured_constant(profile: Array | np.ndarray) -> LawConstant:
    """Computes Λ = log‖R_L‖/3^L and c_eff of a profile; valid where it falls by the cubic law.

    Args:
        profile: log10‖res(X^l)‖ [..., L + 1], from `log_residual_profile`, of NumPy or JAX. The
            layers after the last finite one are left out.
    """
    xp = np if isinstance(profile, np.ndarray) else jnp  # JAX would compile for each number of rows
    profile = xp.asarray(profile)
    is_finite = xp.cumprod(xp.isfinite(profile), axis=-1) > 0
    depth = xp.sum(is_finite, axis=-1) - 1
    last = xp.take_along_axis(profile, xp.maximum(depth, 0)[..., None], axis=-1)[..., 0]
    power = (xp.asarray(3.0, profile.dtype) ** depth).astype(profile.dtype)
    value = xp.where(depth < 0, xp.nan, last / power).astype(profile.dtype)
    return LawConstant(value, 2 * (value - profile[..., 0]))


@full_precision
def closed_profile(
    params: rc.network.TransformerParams,
    x: Array,
    config: rc.TransformerConfig,
    *,
    log: LogTrace | None = None,
    **inputs: Array | None,
) -> tuple[Float[Array, "p"], Array, Float[Array, "l"]]:
    """Computes log10‖R_l‖_{1,∞} for l = 0..L by the law, from the first certified layer on.

    Up to R_s it is the measured residual; from layer s on it follows the recursion of
    `cubic_profile`, started at the input of layer s's attention in the measured pass. s is the
    first layer from which the diameter bound, extended through norms, falls in every layer
    (`log10_growth`). Where the bound falls, the leading order of attention falls, too, so the
    constant has the right sign; a closed form that starts at large residuals may have the wrong
    sign.

    Args:
        params, x, config, **inputs: See `cubic_profile`.
        log: Result of `log_trace` for the same arguments, if known.

    Returns:
        The profile [L + 1], s, and log10 of the growth of each layer. NaN in all layers, and s = L,
        where no layer is certified.

    Raises:
        ValueError: In the cases of `cubic_profile`; also a network without a residual in
            logarithms, or with MLPs.
    """
    if config.mlp != "none":
        raise ValueError("layers with MLPs are not certified")
    params, prepared = _prepared(params, x, config, inputs)
    log = log_trace(params, x, config, **inputs) if log is None else log
    trace = rc.apply(params, x, config, **inputs)
    return _closed_pass(params, prepared, config, log, trace)


@jax.jit
def _closed_pass(params, prepared, config, log, trace):
    """Computes the profile: as measured up to the first certified layer, and by the cubic law after
    it.

    A layer is certified if no layer from there on can let distances between tokens grow: the
    logarithm of the largest growth that the diameter bound allows is below 0.

    Args:
        params, prepared, config: See `prepare_inputs`.
        log: Measured trace in logarithms.
        trace: Trace of the network.

    Returns:
        (the profile [L + 1], NaN if no layer is certified; the first certified layer, L for none;
        log10 of the growth by layer [L]).
    """
    diameters = log.input_diameters + log.inputs.log_scale / math.log(10)
    growth = log10_growth(params, trace, diameters, config, prepared.existing_tokens)
    growth = jnp.where(jnp.isfinite(log.profile[:-1]), growth, jnp.nan)
    is_certified = growth < 0
    start = jnp.where(jnp.any(is_certified), jnp.argmax(is_certified), config.depth)
    profile = _cubic_pass(params, prepared, config, (start, log.inputs))
    profile = jnp.where(jnp.arange(config.depth + 1) <= start, log.profile, profile)
    return jnp.where(start < config.depth, profile, jnp.nan), start, growth


@full_precision
def cubic_profile(
    params: rc.network.TransformerParams,
    x: Array,
    config: rc.TransformerConfig,
    **inputs: Array | None,
) -> Float[Array, "l"]:
    """Computes log10‖R_l‖_{1,∞} for l = 0..L by the leading order of attention in its residual.

        R_{l+1} = R_l A_l,  A_l = (1/√k) Σ_h W_QK,h C_l W_h,  C_l = R_lᵀ R_l/n.

    Tokens enter only through their covariance C: attention weights tend to uniform ones, for any
    biases, which move the mean token. Norms and MLPs multiply by their Jacobian at the mean token,
    branch gains and the temperature as usual. In logarithms, to any depth up to 3^80. It holds if
    the residual is small from the first layer on; otherwise use `closed_profile`.

    Args:
        params, x, config: See `apply`; the network has dot products, no skip, and the same keys and
            biases for all rows.
        **inputs: mask (Bool [n]), segments and positions of `apply`.

    Raises:
        ValueError: A network whose residual does not fall by the cubic law, or whose scores have no
            W_QK; inputs of the wrong shape.

    Source: the leading order of theorem 2.3's inequality (Dong et al. 2021), as an equation.
    """
    params, prepared = _prepared(params, x, config, inputs)
    return _cubic_pass(params, prepared, config)


def _prepared(params, x, config, inputs):
    """Prepares the inputs: (parameters, prepared inputs), both at least float32.

    Args:
        params, x, config: The network and its input.
        inputs: Further arguments of `prepare_inputs`.

    Raises:
        ValueError: Inputs that the law does not cover.
    """
    reasons = bounds.not_covered(config, mask=inputs.get("mask"), bias=inputs.get("bias"))
    params, prepared = at_least_float32(*prepare_inputs(params, x, config, covers=COVERS, **inputs))
    rows = [reason for reason in reasons if reason.startswith("rows")]
    if rows:
        raise ValueError(f"{COVERS.name} does not cover this input: {rows[0]}")
    return params, prepared


@jax.jit
def _cubic_pass(params, prepared, config, measured=None):
    """Iterates the law over all layers: log10 of the residual's norm, [L + 1].

    Args:
        params, prepared, config: See `prepare_inputs`.
        measured: (s, measured states of all layers); attention then reads the measured states up to
            layer s. None iterates the law from the input on.
    """
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

    def __init__(self, first: ArrayLike | None = None):
        self.first = first

    def apply_attention(self, layer, branch_input):
        """Compute the leading order of attention in a small residual: R ↦ R Σ_h W_QK,h C W_h/√k
        with C = RᵀR/n.

        The residual is e^s R̂; the result has the scale e^{3s}, hence three times the logarithmic
        scale. The mean token is that of attention on equal tokens.

        Args:
            layer: The layer. If it has measured states, attention reads these up to layer `first`.
            branch_input: `LogState` of mean token, R̂ [n, d] and s.

        Returns:
            (the state, no further results: None).
        """
        params = layer.params.attention
        if layer.extra is not None:
            is_measured = layer.index <= self.first
            branch_input = jax.tree.map(
                lambda a, b: jnp.where(is_measured, a, b), layer.extra, branch_input
            )
        query, key, value = (
            jnp.einsum("nd,hdk->hnk", branch_input.residual, w)
            for w in (params.w_q, params.w_k, params.w_v)
        )
        width = math.sqrt(bounds.score_width(layer.config))
        factor = layer.gains.temperature * width * jnp.sum(layer.inputs.existing_tokens)
        covariance = jnp.einsum("hnk,hnv->hkv", key, value) / factor
        residual = jnp.einsum("hnk,hkv,hvd->nd", query, covariance, params.w_o)
        return LogState(
            tangent.attend_equal_tokens(params, branch_input.mean),
            residual,
            3 * branch_input.log_scale,
        ), None


class LayerGrowth(struct.Struct):
    """The largest factors by which a layer may multiply distances between tokens, as natural
    logarithms."""

    before: Leaf  # From X^l to the input of its attention: its norm, where it comes before
    cubic: Leaf  # log c, with which diam(SA(X)) ≤ c diam³
    after: Leaf  # From SA(X) to X^{l+1}: gains and norms


def log10_growth(
    params: rc.network.TransformerParams,
    trace: rc.Trace,
    log10_diameters: Float[Array, "l"],
    config: rc.TransformerConfig,
    keep: Bool[Array, "n"],
) -> Float[Array, "l"]:
    """Computes log10 of the largest growth per layer that the diameter bound allows from layer l
    on.

    It is max_{m ≥ l} log10(g_m Δ_m²). Δ_m is the diameter of the input of layer m's attention, the
    measured one for m = l; that of the next layer is at most Δ_{m+1} = g_m Δ_m³. Where it is
    negative, distances fall in every layer from l on, and ever faster. So does the leading order of
    attention, which obeys the same bound. g_m is c of the attention times |γ| of gains and

        max|gain|/min_i σ_i of every norm, since |LN x − LN y| ≤ max|gain| |x − y|/√(σ_x σ_y).

    σ² is variance + eps of the tokens that a norm sees in the pass (RMSNorm: mean square + eps).

    Args:
        params, config: The network, of those that `COVERS` has.
        trace: Trace from `apply`.
        log10_diameters: log10 of the diameters of the input to each layer's attention [L].
        keep: Bool [n], True for tokens that are not padding.

    Source: derived here. (x, y) ↦ |x/|x| − y/|y|| ≤ |x − y|/√(|x||y|) is sharp, of the centred
    tokens with √(d eps) as one more feature.
    """
    growths = replay(partial(layer_growth, keep=keep), params, trace, config)
    step = growths.cubic + growths.after + jnp.append(growths.before[1:], 0)
    start = log10_diameters * math.log(10)

    def iterated(first):
        """Computes the largest growth if the bound starts at layer `first`."""

        def body(log_diameter, layer):
            """Advances the diameter by one layer: (ln of the diameter after it, ln of its growth).

            Up to layer `first` the diameter is the measured one; the layers before have growth 0.
            """
            index, log_factor, measured = layer
            log_diameter = jnp.where(index <= first, measured, log_diameter)
            log_growth = jnp.where(index < first, -jnp.inf, log_factor + 2 * log_diameter)
            return log_diameter + log_growth, log_growth

        _, measured_growths = jax.lax.scan(body, start[0], (jnp.arange(len(step)), step, start))
        return jnp.max(measured_growths)

    return jax.vmap(iterated)(jnp.arange(len(step))) / math.log(10)


def layer_growth(
    layer: Layer, passages: dict[str, SublayerValues], keep: Bool[Array, "n"]
) -> LayerGrowth:
    """Computes the factors of one layer; see `log10_growth`.

    Args:
        layer: The layer.
        passages: Values of the layer's sublayers in the forward pass.
        keep: Bool [n], True for tokens that are not padding.
    """
    params, config = layer.params, layer.config
    scores, values = mean_bounds.attention_norms(params.attention, layer.gains.temperature, config)
    before, inner, outer = _around(passages["attention"], keep)
    return LayerGrowth(before, jax.nn.logsumexp(scores + values), inner + outer)


def _around(passage, keep):
    """Compute the logarithms of the largest factors by which norms and gains around an attention
    multiply directions.

    Args:
        passage: `SublayerValues` of the attention in the forward pass.
        keep: Bool [n], True for tokens that are not padding.

    Returns:
        (factor of the norm before the branch, factor of the branch's gain and norm, factor of the
        norm after the sum); 0 where there is no such norm.
    """
    spec = passage.spec
    inside = jnp.log(jnp.max(jnp.abs(spec.branch_gain)))
    none = jnp.zeros_like(inside)
    outer = none if passage.norm_input is None else _norm_factor(spec, passage.norm_input, keep)
    if spec.norms_branch:
        inside = inside + _norm_factor(spec.at_branch, passage.branch_output, keep)
    return (outer, inside, none) if spec.norms_input else (none, inside, outer)


def _norm_factor(spec, tokens, keep):
    """Compute the logarithm of the largest factor by which a norm multiplies a direction, max
    |gain| / σ.

    Args:
        spec: The norm: its kind, epsilon and gain.
        tokens: Tokens [n, d] that it normalises; σ is the scale by which it divides each.
        keep: Bool [n], True for tokens that are not padding.
    """
    _, inverse = layers.norm_statistics(tokens, spec.norm_kind, spec.eps)
    gain = 1.0 if spec.norm is None else jnp.max(jnp.abs(spec.norm.gain))
    return jnp.log(gain * jnp.max(jnp.where(keep[:, None], inverse, 0)))
