"""The measurements of check_bounds: random networks and their bounds, and a construction.

The construction is a layer of two heads whose residual exceeds the published bound, with width d
and two tokens ±e_0. Both heads have the scores ±½ max D, W_QK = ½ max D e_0 e_0ᵀ. One head writes
√d into one feature, W_1 = √d e_0 e_0ᵀ; the other writes 1 into all features, W_2 = e_0 1ᵀ. Each has
‖W_h‖_{1,∞} = √d, but because the triangle inequality fails, their sum has ½(d^¼ + d^−¼) times 2√d.
A single head stays below its bound by a factor of 4√2, and by 8 with γ = 1. For small D the
residual divided by the published bound is therefore d^¼ (1 + d^−½)/(8√2), which exceeds 1 from a
width of 15,874 on; with γ = 1 it is d^¼ (1 + d^−½)/16, which exceeds 1 from 64,514 on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import rank_collapse as rc
from rank_collapse.measures.norms import composite_norm
from rank_collapse.theory import bounds

ROUNDING = 1e-13  # of attention weights in float64
SPREAD = 0.1  # D_ii of both heads of the construction; the lemma's condition is 1.2564


class Case(NamedTuple):
    """Networks that are drawn alike: two layers of attention, with further parts."""

    tokens: int
    width: int
    heads: int
    mask: str = "none"  # of the config, or "padding" for a mask of tokens
    mlp: str = "none"
    skip: bool = False

    @property
    def name(self) -> str:
        """Names the case, as in "8x16x4-causal"."""
        added = [kind for kind in (self.mask, self.mlp) if kind != "none"] + ["skip"] * self.skip
        return "-".join(["{}x{}x{}".format(*self), *added])


CASES = (
    Case(8, 16, 1),
    Case(8, 16, 4),
    Case(16, 8, 2),
    Case(3, 4, 2),
    Case(8, 16, 2, mask="padding"),
    Case(8, 16, 2, mask="causal"),
    Case(8, 16, 2, mlp="gelu"),
    Case(8, 16, 2, skip=True),
)
# Not of the lemma's condition: {name: (field of the report, its tightness, what is bounded)}
FREE = {
    "layer": ("layer", "tightness", "a layer, with sums over heads"),
    "stack": ("stack", "tightness", "the network, with sums over heads"),
    "mean_head": ("mean_head", "tightness", "a head around the mean token"),
    "mean_layer": ("mean_layer", "tightness", "a layer around the mean token"),
    "diameter_layer": ("diameter_layer", "tightness", "a layer's diameter, with tanh"),
    "cubic_diameter_layer": ("diameter_layer", "tightness_cubic", "a layer's diameter, c diam³"),
    "diameter": ("diameter", "tightness", "the network's diameter, layer by layer"),
}


def single_draw(key: jax.Array, case: Case) -> dict[str, PyTree[jax.Array]]:
    """Draws one network of two layers, and computes its bounds and the error of the lemma.

    The paper's bounds count as "ok" where their theorems hold, the other bounds wherever they are
    claimed.

    Args:
        key: Random key of the draw.
        case: The kind of network.

    Returns:
        "lemma_excess" and "gamma" of the heads [2, h]; for each bound its tightness, log10 of the
        bound divided by the residual; and for the paper's bounds "..._ok", whether they are
        claimed: [2, h] for heads, [2] for layers, [1] for the network.
    """
    num_tokens, width, num_heads = case[:3]
    config = rc.TransformerConfig(
        2,
        num_heads,
        width,
        mlp=case.mlp,
        attention_skip=case.skip,
        mask="none" if case.mask == "padding" else case.mask,
    )
    mask = jnp.arange(num_tokens) < num_tokens - 2 if case.mask == "padding" else None
    key_params, key_weights, key_size, key_tokens, key_mean = jax.random.split(key, 5)

    def draw_size(key, low, high):
        """Draws a size, log-uniformly between 10^low and 10^high."""
        return 10 ** jax.random.uniform(key, (), minval=low, maxval=high)

    params = rc.init(key_params, config, draw_size(key_weights, -1, 0.4), 0.3)
    x = draw_size(key_size, -1.2, 0.3) * jax.random.normal(key_tokens, (num_tokens, width))
    x = x + jax.random.normal(key_mean, (1, width))
    report = rc.bound_report(params, x, config, mask=mask)
    real_tokens = x if mask is None else x[: num_tokens - 2]
    attention = rc.network.layer_params(params, config, 0).attention
    excess = bounds.lemma_excess(attention, real_tokens) - ROUNDING
    rows_alike = not any(reason.startswith("rows") for reason in report.not_covered)
    free = {
        f"{name}_tightness": getattr(getattr(report, field), tightness)
        for name, (field, tightness, _) in FREE.items()
    }
    # Elsewhere their formulas are evaluated too.
    is_claimed = {"layer_tightness": rows_alike, "stack_tightness": not report.not_covered}
    free |= {name: jnp.where(holds, free[name], jnp.nan) for name, holds in is_claimed.items()}
    free["diameter_tightness"] = free["diameter_tightness"][1:]  # that of X^0 is the diameter
    return free | {
        "stack_tightness": free["stack_tightness"][None],
        "head_ok": report.admissible & rows_alike,
        "published_layer_ok": report.admissible.all(1) & rows_alike,
        "published_stack_ok": (report.stack_admissible & (not report.not_covered))[None],
        "lemma_excess": jnp.stack([excess, jnp.full_like(excess, -1)]),
        "head_tightness": report.head.tightness,
        "published_layer_tightness": report.published_layer.tightness,
        "published_stack_tightness": report.published_stack.tightness[None],
        "gamma": report.gamma,
    }


def two_heads(width: int) -> dict[str, float]:
    """Computes the construction's residual over its bounds, from its active feature alone.

    O(d) in all. The residual around the mean token is the minimal one, since the two tokens of the
    output are opposite.

    Args:
        width: d.

    Returns:
        "width"; the residual "over_published": over the bound of theorem 2.3 with max γ* max β,
        "over_first": over the same with γ = 1, "over_sums": over the bound with sums over heads.
    """
    tokens, written = np.zeros((2, width)), np.zeros((2, width))
    tokens[:, 0] = 1, -1
    written[0, 0], written[1] = np.sqrt(width), 1  # w_h of W_h = e_0 w_hᵀ
    score_norm = SPREAD / 2  # ‖W_QK‖_1
    scores = score_norm * np.outer(tokens[:, 0], tokens[:, 0])
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    output = np.outer(weights @ tokens[:, 0], written.sum(axis=0))
    input_norm, output_norm = (float(composite_norm(a)) for a in (tokens, output))
    columns, rows = written.max(axis=1), written.sum(axis=1)  # ‖W_h‖_1, ‖W_h‖_∞
    spread = np.ptp(scores, axis=1)
    deviation = np.sqrt(spread.sum() * spread.max())
    gamma = deviation / (2 * score_norm * input_norm**2)
    first = 4 * score_norm * np.sqrt(columns * rows).max() * 2 * input_norm**3
    sums = 2 * deviation * np.sqrt(columns.sum() * rows.sum()) * input_norm
    limits = {"published": gamma * first, "first": first, "sums": sums}
    ratios = {f"over_{name}": float(output_norm / limit) for name, limit in limits.items()}
    return {"width": width} | ratios
