"""What a network's weights do on an example: profiles of the variants, what each length adds.

Functions of one example, for `profiles.measure_batch`. Axis letters: n tokens, d width, l layers;
k is a path length, 0 .. L.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import surgery
from rank_collapse.config import TransformerConfig
from rank_collapse.contributions import path_contributions
from rank_collapse.logdomain import log_residual_profile
from rank_collapse.network import TransformerParams
from rank_collapse.profiles import batch_profiles, measure_batch
from rank_collapse.residuals import residual_ratio


def variants_of(config: TransformerConfig, family: str) -> list[tuple[str, str]]:
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

    def measure(params, config, x, mask=None, **rest):
        return log_residual_profile(params, x, config, mask, **rest)

    return measure_batch(measure, weights, cut, inputs, chunk)


def length_effects(
    params: TransformerParams, config: TransformerConfig, x: Any, mask: Any = None, **inputs: Any
) -> dict[str, Float[Array, "..."]]:
    """What the paths of each length add to the output, exactly, all of them at once.

    With C_k the sum of all paths of length k and Y the output (frozen attention, norms, gates):

    size            ‖C_k‖_F / ‖Y‖_F, which is also how far the output moves without length k
    residual_size   ‖res C_k‖_F / ‖res Y‖_F, the same of what tells tokens apart
    residual_ratio  ‖res C_k‖_{1,∞} / ‖C_k‖_{1,∞}: how near to rank one length k is by itself
    cosine_without  mean over tokens of cos(Y_i, Y_i − C_{k,i})
    cosine_up_to    mean over tokens of cos(Y_i, Σ_{j≤k} C_{j,i} + offset_i)
    error_up_to     ‖Y − Σ_{j≤k} C_j − offset‖_F / ‖Y‖_F
    offset_size     ‖offset‖_F / ‖Y‖_F, what biases add whatever the tokens
    error           ‖Y − Σ_k C_k − offset‖_F / ‖Y‖_F, rounding

    Args:
        params, config, x: As in `rank_collapse.apply`.
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

    return {
        "size": frobenius(parts) / size,
        "residual_size": frobenius(rest(parts)) / frobenius(rest(output)),
        "residual_ratio": jax.vmap(lambda a: residual_ratio(a, mask=keep))(parts),
        "cosine_without": cosine(without),
        "cosine_up_to": cosine(up_to),
        "error_up_to": frobenius(up_to - output[None]) / size,
        "offset_size": jnp.linalg.norm(shown(found.offset)) / size,
        "error": frobenius(shown(found.total) - output) / size,
    }
