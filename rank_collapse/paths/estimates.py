"""Sums over all paths of a length, estimated from a few sampled paths: what 5 or 20 miss."""

import math
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.paths.sets import path_set_states


@struct.dataclass
class SampledSum:
    """An estimate of Σ over all paths of one length.

    Attributes:
        mean: [n, d], |P_k| times the mean of the sampled terms.
        standard_error: [n, d], |P_k| s/√p, s the sample standard deviation of the terms.
    """

    mean: Any
    standard_error: Any


def sampled_sum(terms: Float[Array, "p *s"], num_paths: int) -> SampledSum:
    """Estimate of the sum over a population from a sample drawn with replacement.

    Args:
        terms: Terms of the sampled paths.
        num_paths: Size of the population, |P_k| = C(L, k) H^k.

    Raises:
        ValueError: Fewer than 2 terms, from which no error can be told.
    """
    p = terms.shape[0]
    if p < 2:
        raise ValueError(f"{p} sampled path gives no standard error: sample at least 2")
    scale = jnp.asarray(float(num_paths), terms.dtype)
    deviation = jnp.std(terms, axis=0, ddof=1)
    return SampledSum(scale * terms.mean(axis=0), scale * deviation / math.sqrt(p))


def estimate_length_sum(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    paths: Int[Array, "p l"],
    length: int,
    **inputs: Any,
) -> SampledSum:
    """C_k estimated from sampled frozen paths; its twin is `path_contributions(...).by_length[k]`.

    Args:
        params, x, config: As in `apply`.
        paths: Paths of one length, from `path_sets.sample_path_sets`.
        length: That length k.
        **inputs: mask, bias, segments, positions of `apply`.

    Raises:
        ValueError: Fewer than 2 paths, or paths that do not fit.
    """
    terms: Float[Array, "p n d"] = path_set_states(
        params, x, config, paths[:, None], semantics="frozen", **inputs
    )
    return sampled_sum(terms, math.comb(config.depth, length) * config.num_heads**length)
