"""What a network's weights do on an example: profiles of the variants, what each length adds.

Functions of one example, for `profiles.measure_batch`. Axis letters: n tokens, d width, l layers;
k is a path length, 0 .. L.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rank_collapse.measures.profiles import batch_profiles, measure_batch
from rank_collapse.measures.residuals import rank_one_ratio, residual_ratio
from rank_collapse.network import surgery
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import apply
from rank_collapse.paths.chains import branch_sizes, measured_sizes
from rank_collapse.paths.contributions import path_contributions
from rank_collapse.paths.enumeration import path_attention
from rank_collapse.paths.sets import sample_path_sets
from rank_collapse.theory.bounds import bound_report
from rank_collapse.theory.logdomain import log_residual_profile


def variants_of(family: str) -> list[tuple[str, str]]:
    """(variant, reading) pairs that differ: "text" only where it is not what was published."""
    pairs = [(name, "published") for name in surgery.VARIANTS]
    if family == "albert":
        return [*pairs, *((name, "text") for name in surgery.VARIANTS[:3])]
    return [*pairs, ("SAN+MLP", "text")]


def variant_profiles(
    config: TransformerConfig,
    params: TransformerParams,
    variant: str,
    reading: str,
    family: str,
    inputs: Mapping[str, Any],
    *,
    measures: tuple[str, ...] = ("residual_ratio",),
    chunk: int = 8,
) -> dict[str, Float[np.ndarray, "b l"]]:
    """Layer-by-layer measures of one variant on every example of a batch.

    Args:
        config, params: The whole network.
        variant, reading, family: See `surgery.variant`.
        inputs: See `profiles.batch_profiles`.
        measures: Names out of `profiles.MEASURES`.
        chunk: Examples at once.
    """
    cut, weights = surgery.variant(config, params, variant, reading, family)
    return batch_profiles(weights, cut, inputs, measures=measures, chunk=chunk)


def log_ratio_profiles(
    config: TransformerConfig,
    params: TransformerParams,
    variant: str,
    reading: str,
    family: str,
    inputs: Mapping[str, Any],
    *,
    chunk: int = 8,
) -> Float[np.ndarray, "b l"]:
    """log10 of ‖res(X^l)‖_{1,∞} of one variant, however far below the floating-point range.

    Args: see `variant_profiles`.
    """
    cut, weights = surgery.variant(config, params, variant, reading, family)
    return measure_batch(log_residual_profile, weights, cut, inputs, chunk=chunk)


def length_effects(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    **inputs: Any,
) -> dict[str, Float[Array, "..."]]:
    """What the paths of each length add to the output, exactly, all of them at once.

    With C_k the sum of all paths of length k and Y the output (frozen attention, norms, gates):

    size            ‖C_k‖_F / ‖Y‖_F, which is also how far the output moves without length k
    residual_size   ‖res C_k‖_F / ‖res Y‖_F, the same of what tells tokens apart
    residual_ratio  ‖res C_k‖_{1,∞} / ‖C_k‖_{1,∞}: how near to rank one length k is by itself
    cosine_without  mean over tokens of cos(Y_i, Y_i − C_{k,i})
    cosine_up_to    mean over tokens of cos(Y_i, Σ_{j≤k} C_{j,i} + offset_i)
    error_up_to     ‖Y − Σ_{j≤k} C_j − offset‖_F / ‖Y‖_F
    log10_size, log10_residual   log10 of ‖C_k‖_{1,∞} and ‖res C_k‖_{1,∞}, to set beside α's law
    offset_size     ‖offset‖_F / ‖Y‖_F, what biases add whatever the tokens
    error           ‖Y − Σ_k C_k − offset‖_F / ‖Y‖_F, rounding

    Args:
        params, x, config: As in `rank_collapse.apply`.
        mask: Bool [n], the tokens that exist; others count nowhere.
        **inputs: Other arguments of `path_contributions`.

    Returns:
        Arrays [L + 1] by name; offset_size and error are scalars.

    Source: the path decomposition of Dong et al. 2021 (Theorem 2.1), with every path summed.
    """
    found = path_contributions(params, x, config, mask=mask, **inputs)
    n = found.output.shape[0]
    keep = jnp.ones(n, bool) if mask is None else mask

    def shown(a):
        return jnp.where(keep.reshape((1,) * (a.ndim - 2) + (n, 1)), a, 0)

    parts, output = shown(found.by_attention_length), shown(found.output)
    up_to, without = shown(found.up_to()), shown(found.all_but())
    size = jnp.linalg.norm(output)
    count = jnp.sum(keep)

    def rest(a):
        return shown(a - (jnp.sum(a, axis=-2, keepdims=True) / count))

    def frobenius(a):
        return jnp.sqrt(jnp.sum(jnp.square(a), axis=(-2, -1)))

    def cosine(a):
        dots = jnp.sum(a * output[None], axis=-1)
        lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(output, axis=-1)[None]
        return jnp.sum(dots / jnp.where(lengths == 0, 1, lengths), axis=-1) / count

    log_size, log_residual = measured_sizes(parts, mask=keep)
    return {
        "log10_size": log_size,
        "log10_residual": log_residual,
        "size": frobenius(parts) / size,
        "residual_size": frobenius(rest(parts)) / frobenius(rest(output)),
        "residual_ratio": jax.vmap(lambda a: residual_ratio(a, mask=keep))(parts),
        "cosine_without": cosine(without),
        "cosine_up_to": cosine(up_to),
        "error_up_to": frobenius(up_to - output[None]) / size,
        "offset_size": jnp.linalg.norm(shown(found.offset)) / size,
        "error": frobenius(shown(found.total) - output) / size,
    }


def chain_effects(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    num_paths: int = 5,
    seed: int = 0,
    **inputs: Any,
) -> dict[str, Float[Array, "..."]]:
    """Chained attention of random paths by length, and the sizes of skips and branches.

    chain_residual  ‖P_path − 1pᵀ‖/‖P_path‖, P_path the product of the path's attention matrices
    chain_rank_one  the same against the best rank one
    skip, branch    N(x) and N(SA(x)) of every layer, from which α comes (`skip_share`)

    Args:
        params, x, config: As in `rank_collapse.apply`.
        mask: Bool [n], the tokens that exist; rows of others are left out.
        num_paths: Paths of each length 1 .. L, their layers and heads drawn uniformly.
        seed: Of the paths.
        **inputs: Other arguments of `apply`.

    Returns:
        chain_residual and chain_rank_one [L, p]; skip and branch [L].

    Source: chained attention and α in the published code of Dong et al. 2021.
    """
    trace = apply(params, x, config, mask=mask, **inputs)
    lengths = jnp.arange(1, config.depth + 1)
    key = jax.random.key(seed)
    paths = sample_path_sets(key, lengths, 1, num_paths, config.depth, config.num_heads)[:, 0]

    def ratios(path):
        product = path_attention(trace.attention, path)
        return residual_ratio(product, mask=mask), rank_one_ratio(product, mask=mask)

    # One product after another: all together would hold L·p matrices [n, n] for every text.
    flat = paths.reshape(-1, config.depth)
    found, rank_one = (r.reshape(paths.shape[:2]) for r in jax.lax.map(ratios, flat))
    skip, branch = branch_sizes(trace, mask=mask)
    return {"chain_residual": found, "chain_rank_one": rank_one, "skip": skip, "branch": branch}


def has_bounds(config: TransformerConfig) -> bool:
    """Whether there is a matrix W_QK that the bounds can use; see `bounds.bound_report`."""
    positional = config.position in ("rotary", "relative_key")
    return config.score == "dot" and not positional and not config.cross_attention


def bound_effects(
    params: TransformerParams, x: Any, config: TransformerConfig, *, mask: Any = None
) -> dict[str, Float[Array, "..."] | Bool[Array, "..."]]:
    """β, γ*, the condition of the technical lemma and the bounds, per layer and head.

    Args:
        params, x, config: As in `rank_collapse.apply`.
        mask: Bool [n], the tokens that exist.

    Returns:
        Fields of `bounds.BoundReport`, log10_spread as its maximum over tokens.

    Raises:
        ValueError: Rotary or relative positions, or cross-attention: see `bounds.bound_report`.
    """
    found = bound_report(params, x, config, mask=mask)
    names = ("beta", "gamma", "admissible", "log10_input")
    return {name: getattr(found, name) for name in names} | {
        "log10_spread": jnp.max(found.log10_spread, axis=-1),
        "head_tightness": found.head.tightness,
        "layer_tightness": found.layer.tightness,
        "layer_log10_lhs": found.layer.log10_lhs,
        "layer_log10_rhs": found.layer.log10_rhs,
        "stack_log10_lhs": found.stack.log10_lhs,
        "stack_log10_rhs": found.stack.log10_rhs,
    }
