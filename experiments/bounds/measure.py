"""What check_bounds measures: random networks, their bounds, and by how much the lemma fails."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network import attention
from rank_collapse.theory import bounds


class Case(NamedTuple):
    """Networks that are drawn alike: two layers of attention, and what is added to them."""

    tokens: int
    width: int
    heads: int
    mask: str = "none"  # of the config, or "padding" for a mask of tokens
    mlp: str = "none"
    skip: bool = False

    @property
    def name(self) -> str:
        """As in "8x16x4-causal"."""
        added = [w for w in (self.mask, self.mlp) if w != "none"] + ["skip"] * self.skip
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


def single_draw(key: Any, case: Case) -> dict[str, Any]:
    """One network of two layers, its bounds, and by how much the lemma fails in its first layer.

    The paper's bounds count as "ok" where their theorems hold, the others wherever they are given.
    """
    num_tokens, width, num_heads = case[:3]
    config = rc.TransformerConfig(
        2, num_heads, width, mlp=case.mlp, attention_skip=case.skip,
        mask="none" if case.mask == "padding" else case.mask,
    )  # fmt: skip
    mask = jnp.arange(num_tokens) < num_tokens - 2 if case.mask == "padding" else None
    key_params, key_weights, key_size, key_tokens, key_mean = jax.random.split(key, 5)

    def size(key, low, high):
        return 10 ** jax.random.uniform(key, (), minval=low, maxval=high)

    params = rc.init(key_params, config, size(key_weights, -1, 0.4), 0.3)
    x = size(key_size, -1.2, 0.3) * jax.random.normal(key_tokens, (num_tokens, width))
    x = x + jax.random.normal(key_mean, (1, width))
    report = rc.bound_report(params, x, config, mask=mask)
    there = x if mask is None else x[: num_tokens - 2]
    excess = lemma_excess(rc.layer_params(params, config, 0).attention, there)
    nothing = jnp.full_like(excess, -1)
    rows_alike = not any(reason.startswith("rows") for reason in report.not_covered)
    free = {f"{name}_tightness": getattr(getattr(report, field), tightness)
            for name, (field, tightness, _) in FREE.items()}  # fmt: skip
    covered = {"layer": rows_alike, "stack": not report.not_covered}
    for name, holds in covered.items():  # whose formula is evaluated elsewhere too
        free[f"{name}_tightness"] = jnp.where(holds, free[f"{name}_tightness"], jnp.nan)
    free["stack_tightness"] = free["stack_tightness"][None]
    free["diameter_tightness"] = free["diameter_tightness"][1:]  # of X^0 it is what happens
    return free | {
        "head_ok": report.admissible & rows_alike,
        "published_layer_ok": report.admissible.all(1) & rows_alike,
        "published_stack_ok": (report.stack_admissible & (not report.not_covered))[None],
        "lemma_excess": jnp.stack([excess, nothing]),
        "head_tightness": report.head.tightness,
        "published_layer_tightness": report.published_layer.tightness,
        "published_stack_tightness": report.published_stack.tightness[None],
        "gamma": report.gamma,
    }


def lemma_excess(params, x):
    """The largest of (I − D)P̃ − P and P − (I + 2D)P̃, per head, less a margin for rounding."""
    rest = x - jnp.mean(x, axis=0, keepdims=True)
    w_qk, _ = bounds.head_weights(params)
    deviation = jnp.einsum("nd,hde,me->hnm", rest, w_qk, rest) / np.sqrt(params.w_q.shape[-1])
    spread = jnp.max(deviation, axis=-1) - jnp.min(deviation, axis=-1)
    scores = attention.attention_scores(params, x, x)
    weights = jax.nn.softmax(scores, axis=-1)
    common = jax.nn.softmax(scores - deviation, axis=-1)  # P̃: all its rows are equal
    low = (1 - spread[:, :, None]) * common - weights
    high = weights - (1 + 2 * spread[:, :, None]) * common
    return jnp.max(jnp.maximum(low, high), axis=(1, 2)) - 1e-13
