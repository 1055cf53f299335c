"""The constants and bounds of Dong, Cordonnier and Loukas (2021), layer by layer.

Everything that can leave float range is a decimal logarithm. Residuals come from the logarithmic
pass of `logdomain`, so that layers far below float precision are compared too.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf, Number, Tree
from rank_collapse.network import covers, layers
from rank_collapse.network.attention import AttentionParams, attention_scores
from rank_collapse.network.config import TransformerConfig
from rank_collapse.theory.bound_constants import (
    LayerConstants,
    gain_size,
    head_weights,
    score_width,
)
from rank_collapse.theory.logdomain import LogTrace

LEMMA_THRESHOLD = 1.2564312086261697  # the positive root of eˣ = 1 + 2x


class Sides(struct.Struct):
    """The two sides of a bound, as decimal logarithms of ‖.‖_{1,∞}.

    Attributes:
        log10_lhs: The residual around the mean token.
        log10_rhs: The bound; NaN where it does not cover the network.
        tightness: log10_rhs − log10_lhs, the powers of ten by which the bound lies above the
            residual: negative where it is violated, NaN where both sides are 0.
    """

    log10_lhs: Leaf
    log10_rhs: Leaf
    tightness: Leaf


class PublishedSides(Sides):
    """The two sides of a bound in the form of theorems 2.2 and 2.3.

    `log10_rhs` is the bound with γ*, the least γ that its lemma admits in all heads.

    Attributes:
        log10_rhs_first: The bound with γ = 1, as in the first version of the paper.
    """

    log10_rhs_first: Leaf


# Scores x_i W_QK x_jᵀ plus what is constant along a row or given.
COVERS = covers.Covers(
    "a bound with W_QK",
    covers.SIZES
    | covers.STREAM
    | covers.MLPS
    | covers.at_any_value("mask", "scale_scores", "temperature")
    | {"position": ("none", "relative_bias")},
)


def log10_theorem(
    log10_input: Number,
    beta: Number,
    gamma: Number,
    num_heads: Number,
    width: Number,
    depth: Number,
) -> Number:
    """Compute log10 of the right side of theorems 2.2 and 2.3, (4γβH/√k)^{(3^L−1)/2}
    ‖res(X)‖^{3^L}.

    Equals c^{−1/2} (c^{1/2} r)^{3^L} with c = 4γβH/√k, r = ‖res(X)‖.

    Args:
        log10_input: log10 ‖res(X)‖_{1,∞}.
        beta: β; for corollary 3.2 (MLPs of Lipschitz constant λ) βλ.
        gamma: γ.
        num_heads: H; 1 gives theorem 2.2.
        width: k = d_qk; 1 where scores are not divided by √d_qk.
        depth: L; 1 gives the bound of one layer.
    """
    return log10_power_law(
        log10_input, jnp.log10(4 * gamma * beta * num_heads / math.sqrt(width)), depth
    )


def log10_power_law(log10_input: Number, log10_c: Number, depth: Number) -> Number:
    """Compute log10 of c^{(3^L − 1)/2} r^{3^L}: r ↦ c r³ iterated L times.

    Args:
        log10_input: log10 r.
        log10_c: log10 c.
        depth: L.
    """
    power = jnp.asarray(3.0, log10_c.dtype) ** depth  # ±inf beyond depth 80 in float32, never NaN
    excess = log10_c / 2 + log10_input
    is_fixed = jnp.isinf(power) & (excess == 0)  # c r² = 1: every iterate is r
    grown = jnp.where(is_fixed, 0, jnp.where(is_fixed, 0, power) * excess)
    return grown - jnp.where(jnp.isinf(log10_c), 0, log10_c / 2)


def not_covered(
    config: TransformerConfig, *, mask: ArrayLike | None = None, bias: ArrayLike | None = None
) -> tuple[str, ...]:
    """List the parts of a network that the theorems do not cover; () for attention alone, also with
    MLPs.

    Reasons that begin with "rows" concern the bound of a layer, the others only that of the stack.

    Args:
        config: The network.
        mask, bias: See `bound_report`.
    """
    masks_by_row = mask is not None and jnp.ndim(mask) > 1
    reasons = {
        "rows see different keys: the rows of P̃ are not equal": (
            config.mask != "none" or config.windows or masks_by_row
        ),
        "rows are mixed with the identity: they differ": config.mixing is not None,
        "rows have different biases: the rows of P̃ are not equal": (
            config.position != "none" or bias is not None
        ),
        "skips: no upper bound of this form holds": (
            config.attention_skip or (config.mlp != "none" and config.mlp_skip)
        ),
        "norms: their Lipschitz constant is not bounded": config.norm_placement != "none",
        "gated MLPs have no Lipschitz constant": config.mlp in layers.GATED,
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def layer_sides(
    constants: LayerConstants, trace: LogTrace, config: TransformerConfig
) -> tuple[PublishedSides, Sides, PublishedSides]:
    """Compute the sides of every head's bound [L, h], every layer's [L], and its published form.

        ‖res(P_h X W_h)‖ ≤ 2 √(ΣD_h · max D_h) ‖W_h‖ ‖R‖ = (4γ*_hβ_h/√k) ‖R‖³,
        ‖res(SA(X))‖ ≤ 2 √(Σ_h ΣD_h‖W_h‖_1 · Σ_h max D_h ‖W_h‖_∞) ‖R‖,
        published: ‖res(SA(X))‖ ≤ (4 max_h γ*_h max_h β_h H/√k) ‖R‖³,

    in ‖.‖_{1,∞}. The lemma gives |P_h − 1q_hᵀ| ≤ 2D_h 1q_hᵀ entry by entry, hence the norms
    2ΣD_h and 2 max D_h of each head's part; norms of sums are at most sums of norms in ‖.‖_1 and in
    ‖.‖_∞ each, but not in their geometric mean. The published form, which has one γ and one β for
    all heads, adds the heads in ‖.‖_{1,∞}, where the triangle inequality fails: it does not
    follow, and wide layers of two heads are above it (`experiments.bounds`). Both sides
    hold the cube of the input's scale: tightness does without it.

    Returns:
        (sides of every head's bound, of every layer's bound, of the published bound).

    Source: Dong et al. 2021, theorems 2.2 and 2.3; the layer's form is derived here from the
    technical lemma of their appendix.
    """
    width, heads = score_width(config), config.num_heads
    cube, mantissa = 3 * constants.log10_scale, constants.log10_mantissa
    lhs, rhs = trace.branches, constants.log10_c + 3 * mantissa
    head = published_sides(
        trace.heads,
        mantissa[:, None],
        constants.beta,
        constants.gamma,
        num_heads=1,
        width=width,
        depth=1,
        log10_scale=cube[:, None],
    )
    published = published_sides(
        lhs,
        mantissa,
        jnp.max(constants.beta, axis=1),
        jnp.max(constants.gamma, axis=1),
        num_heads=heads,
        width=width,
        depth=1,
        log10_scale=cube,
    )
    return head, Sides(cube + lhs, cube + rhs, rhs - lhs), published


def published_sides(
    log10_lhs: Number,
    log10_input: Number,
    beta: Number,
    gamma: Number,
    num_heads: int,
    width: int,
    depth: int,
    log10_scale: Number = 0.0,
) -> PublishedSides:
    """Compare a residual with `log10_theorem` of the input, for the least γ and for γ = 1.

    Args:
        log10_lhs: log10 of the residual.
        log10_input, beta, gamma, num_heads, width, depth: See `log10_theorem`.
        log10_scale: The scale to add to the logarithms of both sides.
    """
    rhs = log10_theorem(log10_input, beta, gamma, num_heads, width, depth)
    rhs_first = log10_theorem(log10_input, beta, 1.0, num_heads, width, depth)
    return PublishedSides(
        log10_scale + log10_lhs, log10_scale + rhs, rhs - log10_lhs, log10_scale + rhs_first
    )


def stack_sides(
    constants: LayerConstants, profile: ArrayLike, gains: ArrayLike, config: TransformerConfig
) -> dict[str, Tree]:
    """Compute the bound of a layer iterated, and the published form, as fields of `BoundReport`.

    ‖res(X^L)‖ ≤ c^{(3^L − 1)/2} ‖res(X)‖^{3^L},
    c = max_l λ_l |γ_l| · 2 √(Σ_h ΣD_h‖W_h‖_1 · Σ_h max D_h ‖W_h‖_∞)/‖R_l‖²;
    published: c = (4 max γ* · max β λ |branch gain| · H/√k).

    Args:
        constants: Constants of all layers.
        profile: log10 of the residual of X^0 .. X^L.
        gains: Gains of all layers.
        config: Configuration of the network.
    """
    outer = constants.lipschitz * gain_size(gains.branch.attention)
    log10_c = constants.log10_c + jnp.log10(outer)
    beta, gamma = jnp.max(constants.beta * outer[:, None]), jnp.max(constants.gamma)
    start, end, largest = profile[0], profile[-1], jnp.max(log10_c)
    rhs = log10_power_law(start, largest, config.depth)
    sizes = config.num_heads, score_width(config), config.depth
    return {
        "log10_c": log10_c,
        "stack": Sides(end, rhs, rhs - end),
        "published_stack": published_sides(end, start, beta, gamma, *sizes),
        "stack_beta": beta,
        "stack_gamma": gamma,
        "shrinks": largest / 2 + start < 0,
    }


def lemma_excess(params: AttentionParams, x: Float[Array, "n d"]) -> Float[Array, "h"]:
    """Compute by how much (I − D)P̃ − P and P − (I + 2D)P̃ exceed 0; the lemma says at most 0.

    The largest entry of each head counts. P̃ = softmax(S − E) has equal rows, S the scores and
    E = R W_QK Rᵀ/√k; all rows see all keys. Claimed where max_i D_ii ≤ `LEMMA_THRESHOLD`.

    Args:
        params: `AttentionParams` of the layer.
        x: Input of the layer's attention, [n, d].

    Source: the technical lemma in the appendix of Dong et al. 2021.
    """
    residual = x - jnp.mean(x, axis=0, keepdims=True)
    w_qk, _ = head_weights(params)
    width = jnp.sqrt(params.w_q.shape[-1]).astype(x.dtype)
    deviation = jnp.einsum("nd,hde,me->hnm", residual, w_qk, residual) / width
    spread = (jnp.max(deviation, axis=-1) - jnp.min(deviation, axis=-1))[:, :, None]
    scores = attention_scores(params, x, x)
    weights = jax.nn.softmax(scores, axis=-1)
    common = jax.nn.softmax(scores - deviation, axis=-1)
    excess = jnp.maximum((1 - spread) * common - weights, weights - (1 + 2 * spread) * common)
    return jnp.max(excess, axis=(1, 2))
