"""What check_bounds measures: random networks and their bounds, a construction, gradient ascent.

The construction is a layer of two heads for which the published bound is below the residual, in
width d with two tokens ±e_0. Both heads have the scores ±½ max D, W_QK = ½ max D e_0 e_0ᵀ; one
writes √d in one feature, W_1 = √d e_0 e_0ᵀ, the other 1 in all, W_2 = e_0 1ᵀ. Each has
‖W_h‖_{1,∞} = √d, but for want of a triangle inequality their sum has ½(d^¼ + d^−¼) times 2√d.
A head alone stays below its bound by a factor of 4√2, with γ = 1 by 8. For small D the residual
over the published bound is therefore d^¼ (1 + d^−½)/(8√2), above 1 from a width of 15,874 on; with
γ = 1 it is d^¼ (1 + d^−½)/16, above 1 from 64,514 on.

The ascent on weights and tokens goes towards a violation of the bounds of a layer and a stack,
with attention and its bounds written out in plain arithmetic, apart from the library's.

Axis letters: n tokens, m keys, d width, h heads, k per-head width, r restarts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.measures.norms import composite_norm
from rank_collapse.runs.seeds import QUICK
from rank_collapse.theory import bounds

ROUNDING = 1e-13  # of attention weights in float64
SPREAD = 0.1  # D_ii of both heads of the construction; the lemma's condition is 1.2564
CLIMBED = ("layer", "mean_layer", "stack")
ASCENT_SHAPES = ((2, 3, 2), (5, 7, 3))  # n, d, H
RESTARTS, RATE, KEY_WIDTH = 4, 0.03, 3


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
        2,
        num_heads,
        width,
        mlp=case.mlp,
        attention_skip=case.skip,
        mask="none" if case.mask == "padding" else case.mask,
    )
    mask = jnp.arange(num_tokens) < num_tokens - 2 if case.mask == "padding" else None
    key_params, key_weights, key_size, key_tokens, key_mean = jax.random.split(key, 5)

    def size(key, low, high):
        return 10 ** jax.random.uniform(key, (), minval=low, maxval=high)

    params = rc.init(key_params, config, size(key_weights, -1, 0.4), 0.3)
    x = size(key_size, -1.2, 0.3) * jax.random.normal(key_tokens, (num_tokens, width))
    x = x + jax.random.normal(key_mean, (1, width))
    report = rc.bound_report(params, x, config, mask=mask)
    there = x if mask is None else x[: num_tokens - 2]
    excess = (
        bounds.lemma_excess(rc.network.layer_params(params, config, 0).attention, there) - ROUNDING
    )
    rows_alike = not any(reason.startswith("rows") for reason in report.not_covered)
    free = {
        f"{name}_tightness": getattr(getattr(report, field), tightness)
        for name, (field, tightness, _) in FREE.items()
    }
    # Elsewhere their formulas are evaluated too.
    covered = {"layer_tightness": rows_alike, "stack_tightness": not report.not_covered}
    free |= {name: jnp.where(holds, free[name], jnp.nan) for name, holds in covered.items()}
    free["diameter_tightness"] = free["diameter_tightness"][1:]  # of X^0 it is what happens
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
    """The construction's residual over its bounds, from its active feature alone: O(d) in all.

    The residual around the mean token is the minimal one, since the two tokens of the output are
    opposite.

    Returns:
        "width"; the residual "over_published": over the bound of theorem 2.3 with max γ* max β,
        "over_first": over the same with γ = 1, "over_sums": over the bound with sums over heads.
    """
    tokens, written = np.zeros((2, width)), np.zeros((2, width))
    tokens[:, 0] = 1, -1
    written[0, 0], written[1] = np.sqrt(width), 1  # w_h of W_h = e_0 w_hᵀ
    asked = SPREAD / 2  # ‖W_QK‖_1
    scores = asked * np.outer(tokens[:, 0], tokens[:, 0])
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    residual = np.outer(weights @ tokens[:, 0], written.sum(axis=0))
    size, after = (float(composite_norm(a)) for a in (tokens, residual))
    columns, rows = written.max(axis=1), written.sum(axis=1)  # ‖W_h‖_1, ‖W_h‖_∞
    spread = np.ptp(scores, axis=1)
    moved = np.sqrt(spread.sum() * spread.max())
    gamma = moved / (2 * asked * size**2)
    first = 4 * asked * np.sqrt(columns * rows).max() * 2 * size**3
    sums = 2 * moved * np.sqrt(columns.sum() * rows.sum()) * size
    bounds = {"published": gamma * first, "first": first, "sums": sums}
    return {"width": width} | {f"over_{n}": float(after / bound) for n, bound in bounds.items()}


def climb(seed: int, num_steps: int) -> dict[str, np.ndarray]:
    """{bound: its least tightness over all steps of each shape and restart [s, r]}, in float64.

    Adam on log10 residual − log10 bound of one of `CLIMBED` at a time, from `RESTARTS` draws of
    Gaussian weights of two layers and tokens of each of `ASCENT_SHAPES`.

    Args:
        seed: Of the restarts.
        num_steps: Steps of each; 0 for where it starts.
    """
    import optax  # here: it takes half a second, which `--help` need not

    optimiser = optax.adam(optax.linear_schedule(RATE, RATE / 30, max(num_steps, 1)))

    def restart(start, which):
        def step(carry, _):
            variables, state = carry
            value, slope = jax.value_and_grad(lambda v: ascent_tightness(v)[which])(variables)
            change, state = optimiser.update(slope, state)
            return (optax.apply_updates(variables, change), state), value

        _, values = jax.lax.scan(step, (start, optimiser.init(start)), length=num_steps + 1)
        return jnp.min(values)

    @jax.jit(compiler_options=QUICK)
    def all_bounds(drawn):
        of_each = jax.vmap(jax.vmap(restart, (0, None)), (None, 0))
        return of_each(drawn, jnp.arange(len(CLIMBED)))

    with jax.enable_x64(True):
        random = np.random.default_rng(seed)
        found = [all_bounds(_start(random, *shape)) for shape in ASCENT_SHAPES]
        return dict(zip(CLIMBED, np.stack(jax.device_get(found), axis=1), strict=True))


def _start(random, num_tokens, width, num_heads):
    weights = {
        n: random.standard_normal((RESTARTS, 2, num_heads, width, k)) / np.sqrt(width)
        for n, k in (("q", KEY_WIDTH), ("k", KEY_WIDTH), ("v", width))
    }
    return weights | {"x": random.standard_normal((RESTARTS, num_tokens, width))}


def ascent_tightness(variables: dict[str, jax.Array]) -> jax.Array:
    """log10 bound − log10 residual around the mean token of each of `CLIMBED`, W_V W_O one matrix.

    Args:
        variables: "q" and "k" [2, h, d, k], "v" [2, h, d, d], "x" [n, d].
    """
    x = variables["x"]
    passed = []
    for layer in range(2):
        w_q, w_k, w = (variables[name][layer] for name in "qkv")
        rest = x - jnp.mean(x, axis=0, keepdims=True)
        query, common = (jnp.einsum("nd,hdk->hnk", a, w_q) for a in (rest, x - rest))
        keys = jnp.einsum("md,hdk->hmk", rest, w_k) / np.sqrt(KEY_WIDTH)
        scores = jnp.einsum("hnk,hmk->hnm", query, keys)
        spread = jnp.max(scores, axis=2) - jnp.min(scores, axis=2)
        weights = jax.nn.softmax(scores + jnp.einsum("hnk,hmk->hnm", common, keys), axis=2)
        x = jnp.einsum("hnm,md,hde->ne", weights, x, w)
        one, inf = (jnp.max(jnp.sum(jnp.abs(w), axis=a), axis=1) for a in (1, 2))
        columns = jnp.sum(jnp.sum(spread, axis=1) * one)
        rows = jnp.sum(jnp.max(spread, axis=1) * inf)
        around = jnp.sum((jnp.max(spread, axis=1) + jnp.mean(spread, axis=1)) * inf)
        before, after = _log10_norm(rest), _log10_norm(x - jnp.mean(x, axis=0, keepdims=True))
        by_lemma = np.log10(2) + jnp.log10(columns * rows) / 2
        around = jnp.log10(columns * around / 4) / 2 + before - after
        passed.append((by_lemma + before - after, around, by_lemma - 2 * before, before))
    (layer, mean_layer, first, start), (_, _, second, _) = passed
    stack = 4 * jnp.maximum(first, second) + 9 * start - after
    return jnp.stack([layer, mean_layer, stack])


def _log10_norm(x):
    size = jnp.abs(x)
    return jnp.log10(jnp.max(jnp.sum(size, axis=0)) * jnp.max(jnp.sum(size, axis=1))) / 2
