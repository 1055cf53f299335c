"""The convergence bounds of Dong, Cordonnier and Loukas (2021), evaluated on a given network.

Everything that can leave float range is a decimal logarithm, and residuals come from the
logarithmic pass of `logdomain`, so that layers far below float precision are compared too.

Axis letters: n tokens (queries), m keys, d width, h heads, k per-head query/key width, l layers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.measures.residuals import composite_norm, norm_1, norm_inf
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams, repeat_groups
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.precision import full_precision
from rank_collapse.theory.logdomain import LogTrace, log_trace


def _lemma_threshold() -> float:
    """The positive root of eˣ = 1 + 2x by Newton's method."""
    x = 1.5
    for _ in range(20):
        x -= (math.exp(x) - 1 - 2 * x) / (math.exp(x) - 2)
    return x


LEMMA_THRESHOLD = _lemma_threshold()  # 1.2564312...


@struct.dataclass
class Sides:
    """The two sides of a bound, as decimal logarithms of ‖.‖_{1,∞}.

    Attributes:
        log10_lhs: What happens: the residual.
        log10_rhs: The bound with γ*.
        log10_rhs_first: The bound with γ = 1, as in the first version of the paper.
        tightness: log10_rhs − log10_lhs: how many powers of ten the bound is above what happens;
            negative where it is violated, NaN where both sides are 0.
    """

    log10_lhs: Any
    log10_rhs: Any
    log10_rhs_first: Any
    tightness: Any


@struct.dataclass
class BoundReport:
    """The bounds on one input; logarithms are decimal, residuals ‖.‖_{1,∞} around the mean token.

    A bound is a theorem only where `admissible` holds for its layers.

    Attributes:
        beta: ‖W_QK,h‖_1 ‖W_h‖_{1,∞}, [L, h].
        lipschitz: λ of the MLP sublayer in ‖.‖_{1,∞}, [L]; 1 without MLP, inf for gated MLPs.
        gamma: γ*, the least γ with which the technical lemma gives the layer bound, [L, h].
        log10_spread: log10 of D_ii = max_{j,j'} |E_ij − E_ij'|, [L, h, n].
        admissible: max_i D_ii ≤ 1.2564312, the condition of the technical lemma, Bool [L, h].
        log10_residual: Of X^0 .. X^L, [L + 1].
        log10_input: Of what each layer's attention looks at, [L].
        head: `Sides` of P_h X W_h, each [L, h].
        layer: `Sides` of SA(X), each [L].
        stack: `Sides` of X^L, scalars.
        stack_beta: max β λ |branch gain| over layers and heads.
        stack_gamma: max γ*.
        shrinks: Whether √c ‖res(X)‖ < 1, c = 4γ*βH/√k: below it the stack's bound falls with L.
        stack_admissible: All of `admissible`.
        not_covered: Why the theorems do not speak of this network; () where they do.
    """

    beta: Any
    lipschitz: Any
    gamma: Any
    log10_spread: Any
    admissible: Any
    log10_residual: Any
    log10_input: Any
    head: Sides
    layer: Sides
    stack: Sides
    stack_beta: Any
    stack_gamma: Any
    shrinks: Any
    stack_admissible: Any
    not_covered: tuple[str, ...] = struct.field(pytree_node=False, default=())


@full_precision
def head_weights(
    params: AttentionParams, temperature: Any = 1.0
) -> tuple[Float[Array, "h d d"], Float[Array, "h d d"]]:
    """(W_QK,h = W_Q W_Kᵀ/temperature, W_h = W_V W_O) of one layer."""
    params = repeat_groups(params)
    w_qk = jnp.einsum("hdk,hek->hde", params.w_q, params.w_k) / temperature
    return w_qk, jnp.einsum("hdv,hve->hde", params.w_v, params.w_o)


def beta(params: AttentionParams, temperature: Any = 1.0) -> Float[Array, "h"]:
    """‖W_QK,h‖_1 ‖W_h‖_{1,∞} of every head (theorem 2.2).

    Args:
        params: Attention parameters of one layer.
        temperature: Divisor of the scores, taken into W_QK.
    """
    w_qk, w = head_weights(params, temperature)
    return jax.vmap(norm_1)(w_qk) * jax.vmap(composite_norm)(w)


def log10_theorem(
    log10_input: Any, beta: Any, gamma: Any, num_heads: Any, width: Any, depth: Any
) -> Any:
    """log10 of (4γβH/√k)^{(3^L − 1)/2} ‖res(X)‖^{3^L}, the right side of theorems 2.2 and 2.3.

    Equal to c^{−1/2} (c^{1/2} r)^{3^L} with c = 4γβH/√k, r = ‖res(X)‖.

    Args:
        log10_input: log10 ‖res(X)‖_{1,∞}.
        beta: β; for corollary 3.2 (MLPs of Lipschitz constant λ) βλ.
        gamma: γ.
        num_heads: H; 1 gives theorem 2.2.
        width: k = d_qk; 1 where scores are not divided by √d_qk.
        depth: L; 1 gives the bound of one layer.
    """
    log10_c = jnp.log10(4 * gamma * beta * num_heads / jnp.sqrt(width))
    power = jnp.asarray(3.0, log10_c.dtype) ** depth  # ±inf beyond depth 80 in float32, never NaN
    return power * (log10_c / 2 + log10_input) - jnp.where(jnp.isinf(log10_c), 0, log10_c / 2)


@full_precision
def lipschitz_constants(params: MLPParams, kind: str) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(λ_1, λ_∞): ‖MLP(X) − 1 MLP(x)ᵀ‖_p ≤ λ_p ‖X − 1xᵀ‖_p, so that λ = √(λ_1 λ_∞) in ‖.‖_{1,∞}.

    λ_p = sup|φ'| ‖W_in‖_p ‖W_out‖_p: an activation acts entry by entry, hence on both norms alike.
    Gated MLPs multiply two functions of the input and have no such constant: inf.

    Args:
        params: MLP parameters of one layer.
        kind: One of `layers.MLP_KINDS` but "none".
    """
    dtype = params.w_in.dtype
    if kind in layers.GATED:
        return jnp.asarray(jnp.inf, dtype), jnp.asarray(jnp.inf, dtype)
    phi = layers.activation_of(kind).fn
    grid = jnp.linspace(
        -8, 8, 16001, dtype=dtype
    )  # the slopes lie within 1e-6 of their limits there
    slope = jnp.max(jnp.abs(jax.jvp(phi, (grid,), (jnp.ones_like(grid),))[1]))
    slope = slope * (1 + 1e-6)  # what may hide between two points of the grid
    return tuple(slope * norm(params.w_in) * norm(params.w_out) for norm in (norm_1, norm_inf))


def not_covered(
    config: TransformerConfig, *, mask: Any = None, bias: Any = None
) -> tuple[str, ...]:
    """What in a network the theorems do not speak of; () for a SAN, with MLPs or without.

    Reasons that begin with "rows" concern the bound of a layer, the others only that of the stack.
    """
    reasons = []
    if config.mask != "none" or (mask is not None and jnp.ndim(mask) > 1):
        reasons.append("rows see different keys: P̃ has not equal rows")
    if config.position != "none" or bias is not None:
        reasons.append("rows have different biases: P̃ has not equal rows")
    if config.attention_skip or (config.mlp != "none" and config.mlp_skip):
        reasons.append("skips: no upper bound of this form holds")
    if config.norm_placement != "none":
        reasons.append("norms: their Lipschitz constant is not bounded")
    if config.mlp in layers.GATED:
        reasons.append("gated MLPs have no Lipschitz constant")
    return tuple(reasons)


@full_precision
def bound_report(
    params: Any, x: Any, config: TransformerConfig, *, mask: Any = None, bias: Any = None
) -> BoundReport:
    """Every head's, layer's and the whole stack's bound on one input.

    With R = res(X) of a layer's attention input and E = R W_QK Rᵀ/√k, the attention weights are
    those of E plus one vector g common to all rows plus a constant along each row, which cancels;
    biases only enter g, hence P̃ = 1 softmax(g)ᵀ and not E. Then
        γ* = √k √(Σ_i D_ii · max_i D_ii) / (2 ‖W_QK‖_1 ‖R‖²_{1,∞}),
        ‖res(P_h X W_h)‖ ≤ (4γ*β_h/√k) ‖R‖³  and  ‖res(SA(X))‖ ≤ (4 max_h(γ*β_h) H/√k) ‖R‖³,
    and over the stack `log10_theorem` with max β λ, max γ*. The temperature is taken into W_QK,
    the branch gain into the stack's β. Where scores are not divided by √k, √k is 1.

    The theory covers attention whose rows all see the same keys: no mask, or padding (mask Bool
    [n]: the padded rows are left out everywhere). With causal, local or other masks, and position
    biases, P̃ has not equal rows and a residual need not fall doubly exponentially; the same
    formulas are evaluated (D over allowed keys) and `not_covered` says so. Skips and norms leave
    the layers' bounds valid, for SA(X) as a function of what it looks at, but not the stack's.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network, with dot-product scores; gains and temperature may be traced.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n].
        bias: Float [h, n, n] added to the scores.

    Returns:
        A `BoundReport`; works under jit, and vmap over seeds and inputs.

    Raises:
        ValueError: Additive scores, rotary or relative-key positions, cross-attention: there is no
            W_QK; or inputs of the wrong shape.

    Source: Dong et al. 2021, theorems 2.2 and 2.3, corollary 3.2, and the technical lemma of the
    appendix; γ* is the least value for which the lemma's last step holds.
    """
    for name, bad in (("score", "additive"), ("position", "rotary"), ("position", "relative_key")):
        if getattr(config, name) == bad:
            raise ValueError(f"{name}={bad!r} has no matrix W_QK that the bounds could use")
    trace = log_trace(params, x, config, mask=mask, bias=bias)
    keep = jnp.ones(trace.inputs.rest.shape[1], bool)
    if mask is not None and jnp.ndim(mask) == 1:
        keep = jnp.asarray(mask).astype(bool)
    report = _report(params, trace, config, keep)
    return report.replace(not_covered=not_covered(config, mask=mask, bias=bias))


@jax.jit
def _report(params, trace, config, keep) -> BoundReport:
    dtype = trace.profile.dtype
    stack = jax.tree.map(lambda a: a.astype(dtype), params.layers)
    if config.layer_map:
        stack = jax.tree.map(lambda a: a[jnp.asarray(config.layer_map)], stack)
    gains = layer_gains(config, dtype)

    def constants(step):
        layer, state, own = step
        allowed = keep[None, None, :] if trace.mask is None else trace.mask
        return layer_constants(layer, state, own, config, allowed, keep)

    # Layer after layer: all layers' W_QK and W_h at once are larger than the network.
    found = jax.lax.map(constants, (stack, trace.inputs, gains))
    admissible = jnp.max(found.log10_spread, axis=-1) <= math.log10(LEMMA_THRESHOLD)
    head, layer = layer_sides(found, trace, config)
    sides, stack_beta, shrinks = stack_sides(found, trace.profile, gains, config)
    return BoundReport(
        beta=found.beta,
        lipschitz=found.lipschitz,
        gamma=found.gamma,
        log10_spread=found.log10_spread,
        admissible=admissible,
        log10_residual=trace.profile,
        log10_input=found.log10_mantissa + found.log10_scale,
        head=head,
        layer=layer,
        stack=sides,
        stack_beta=stack_beta,
        stack_gamma=jnp.max(found.gamma),
        shrinks=shrinks,
        stack_admissible=jnp.all(admissible),
    )


@struct.dataclass
class LayerConstants:
    """What the bounds take from a layer; see `BoundReport`. The input's residual is
    10^(log10_mantissa + log10_scale)."""

    beta: Any
    gamma: Any
    lipschitz: Any
    log10_spread: Any
    log10_mantissa: Any
    log10_scale: Any


def layer_constants(
    params: Any, state: Any, gains: Any, config: TransformerConfig, allowed: Any, keep: Any
) -> LayerConstants:
    """β, γ*, D and λ of one layer.

    Args:
        params: Parameters of the layer.
        state: LogState of what its attention looks at.
        gains: Of the layer.
        config: The network.
        allowed: Bool [h or 1, n or 1, m], which keys a row sees.
        keep: Bool [n], which tokens exist.
    """
    width = _score_width(config)
    w_qk, w = head_weights(params.attention, gains.temperature)
    size_qk = jax.vmap(norm_1)(w_qk)
    deviation = jnp.einsum("nd,hde,me->hnm", state.rest, w_qk, state.rest) / np.sqrt(width)
    high = jnp.max(jnp.where(allowed, deviation, -jnp.inf), axis=-1)
    low = jnp.min(jnp.where(allowed, deviation, jnp.inf), axis=-1)
    spread = jnp.where(keep[None, :] & (high >= low), high - low, 0)  # D_ii e^{−2s}
    size_r = composite_norm(state.rest)
    top = jnp.sqrt(jnp.sum(spread, axis=-1)) * jnp.sqrt(jnp.max(spread, axis=-1))
    bottom = 2 * size_qk * size_r**2
    log10_e = state.log_scale / np.log(10.0)
    return LayerConstants(
        beta=size_qk * jax.vmap(composite_norm)(w),
        gamma=np.sqrt(width) * top / jnp.where(bottom == 0, 1, bottom),
        lipschitz=_sublayer_lipschitz(params, gains, config, state.rest.dtype),
        log10_spread=jnp.log10(spread) + 2 * log10_e,
        log10_mantissa=jnp.log10(size_r),
        log10_scale=log10_e,
    )


def layer_sides(
    found: LayerConstants, trace: LogTrace, config: TransformerConfig
) -> tuple[Sides, Sides]:
    """The sides of every head's bound [L, h] and every layer's [L].

    Both sides hold the cube of the input's scale: tightness does without it.
    """
    width, heads = _score_width(config), config.num_heads
    cube, mantissa = 3 * found.log10_scale, found.log10_mantissa

    def sides(lhs, rhs, rhs_first, cube):
        return Sides(cube + lhs, cube + rhs, cube + rhs_first, rhs - lhs)

    def theorem(mantissa, beta, gamma, heads):
        return log10_theorem(mantissa, beta, gamma, heads, width, 1)

    by_head = mantissa[:, None]
    head = sides(
        trace.heads,
        theorem(by_head, found.beta, found.gamma, 1),
        theorem(by_head, found.beta, 1.0, 1),
        cube[:, None],
    )
    layer = sides(
        trace.branches,
        theorem(mantissa, jnp.max(found.beta * found.gamma, axis=1), 1.0, heads),
        theorem(mantissa, jnp.max(found.beta, axis=1), 1.0, heads),
        cube,
    )
    return head, layer


def stack_sides(
    found: LayerConstants, profile: Any, gains: Any, config: TransformerConfig
) -> tuple[Sides, Array, Array]:
    """(sides of the stack's bound, its β, whether it falls with depth)."""
    width, heads = _score_width(config), config.num_heads
    worst = jnp.max(found.beta, axis=1)
    beta = jnp.max(worst * found.lipschitz * _size(gains.branch.attention))
    gamma = jnp.max(found.gamma)
    start, end = profile[0], profile[-1]

    def theorem(gamma):
        return log10_theorem(start, beta, gamma, heads, width, config.depth)

    root = jnp.log10(4 * gamma * beta * heads / np.sqrt(width)) / 2
    rhs = theorem(gamma)
    return Sides(end, rhs, theorem(1.0), rhs - end), beta, root + start < 0


def _score_width(config):
    """k where scores are divided by √k, else 1."""
    return config.qk_width if config.scale_scores else 1


def _size(gain):
    """|γ| of each layer; its largest entry where it is given per feature."""
    gain = jnp.abs(gain)
    return gain if gain.ndim == 1 else jnp.max(gain, axis=-1)


def _sublayer_lipschitz(params, gains, config, dtype):
    """λ of λ_skip x·[mlp_skip] + γ MLP(x) in ‖.‖_{1,∞}."""
    if config.mlp == "none":
        return jnp.ones((), dtype)
    factor = jnp.max(jnp.abs(gains.branch.mlp))
    each = [factor * c for c in lipschitz_constants(params.mlp, config.mlp)]
    if config.mlp_skip:
        each = [jnp.max(jnp.abs(gains.skip.mlp)) + c for c in each]
    return jnp.sqrt(each[0]) * jnp.sqrt(each[1])
