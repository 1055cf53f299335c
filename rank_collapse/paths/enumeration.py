"""Paths through a network: their counts, their enumeration and the terms of Theorem 2.1.

A path is one integer per layer: 0 .. H−1 a head, H the skip, −1 all heads at once. Its length is
the number of layers it does not skip. The two meanings of a path, always named:

* *frozen*: attention weights, norm statistics and MLP gates are those of the full forward pass;
  the terms of all paths sum to the output (Dong et al. 2021, Theorem 2.1);
* *recomputed*: a path is a network of its own that computes attention from its own hidden state
  (what the paper's experiments evaluate).
"""

import math
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import layer_gains, scaled
from rank_collapse.network.parameters import TransformerParams, completed, layer_params
from rank_collapse.network.precision import full_precision

ALL_HEADS = -1
MAX_PATHS = 1_000_000


def count_paths(depth: int, num_heads: int, skips: bool = True) -> tuple[int, ...]:
    """|P_k| = C(L, k) H^k for k = 0 .. L, exactly; without skips only k = L is not 0.

    Args:
        depth: L.
        num_heads: H.
        skips: Whether a layer may be skipped.

    Returns:
        L + 1 Python integers, whose sum is (1 + H)^L, or H^L without skips.

    Raises:
        ValueError: depth or num_heads below 1.
    """
    for name, value in (("depth", depth), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"{name}={value} is below 1")
    counts = [math.comb(depth, k) * num_heads**k for k in range(depth + 1)]
    return tuple(counts if skips else [0] * depth + counts[-1:])


def enumerate_paths(
    depth: int,
    num_heads: int,
    *,
    skips: bool = True,
    length: int | None = None,
    limit: int = MAX_PATHS,
) -> np.ndarray:
    """All paths, or all paths of one length, in lexicographic order.

    Args:
        depth: L.
        num_heads: H.
        skips: Whether a layer may be skipped: (H+1)^L paths with, H^L without.
        length: Only paths of this length.
        limit: Most layer choices that may be walked through.

    Returns:
        Int [p, L], H standing for a skip.

    Raises:
        ValueError: More paths than the limit, or a length outside 0 .. L.
    """
    counts = count_paths(depth, num_heads, skips)
    if sum(counts) > limit:
        base = num_heads + skips
        raise ValueError(
            f"{base}^{depth} = {sum(counts)} paths are more than the limit of {limit}; "
            "path_contributions sums them all by length without enumerating them"
        )
    choices = range(num_heads + skips)
    paths = np.array(list(product(choices, repeat=depth)), dtype=np.int32)
    if length is None:
        return paths
    check_length(length, depth)
    return paths[path_length(paths, num_heads) == length]


def path_length(paths: Any, num_heads: int) -> Any:
    """Number of layers each path [..., L] does not skip."""
    return (paths != num_heads).sum(axis=-1)


def check_length(length: int, depth: int) -> None:
    """Refuses a length outside 0 .. L, that is, more skips than layers or fewer than none."""
    if not 0 <= length <= depth:
        raise ValueError(
            f"length={length} needs {depth - length} skips in depth={depth} layers; "
            f"give a length from 0 to {depth}"
        )


def check_paths(
    paths: Any, depth: int, num_heads: int, *, all_heads: bool = True
) -> Int[Array, "*s l"] | np.ndarray:
    """Paths [..., L] that fit the network, as an array; values are read unless traced.

    Args:
        paths: Choices by layer, or lists of them.
        depth, num_heads: L and H.
        all_heads: Whether −1, all heads, is a choice.

    Raises:
        ValueError: A path of the wrong length, of non-integers, or with a head that does not exist.
    """
    paths = paths if isinstance(paths, jax.Array) else np.asarray(paths)
    if not paths.shape or paths.shape[-1] != depth:
        raise ValueError(f"paths of shape {paths.shape} do not have depth={depth} choices each")
    if not jnp.issubdtype(paths.dtype, jnp.integer):
        raise ValueError(f"paths of dtype {paths.dtype} are not integers")
    if isinstance(paths, jax.core.Tracer):
        return paths
    values = np.asarray(paths)
    wrong = values[(values < (ALL_HEADS if all_heads else 0)) | (values > num_heads)]
    if wrong.size:
        raise ValueError(
            f"path choice {wrong.flat[0]} is not a head 0..{num_heads - 1}, {num_heads} (skip)"
            + all_heads * f" or {ALL_HEADS} (all heads)"
        )
    return paths


@full_precision
def path_attention(attention: Float[Array, "l h n n"], path: Any) -> Float[Array, "n n"]:
    """P_path = P^L_{h_L} ⋯ P^1_{h_1}; a skip is the identity (Theorem 2.1).

    Rows of every factor sum to 1, and so do those of the product.

    Args:
        attention: Attention weights of every layer and head, `Trace.attention`.
        path: Int [L], heads 0..H−1, or H for a skip.

    Raises:
        ValueError: Another length, or a head that does not exist.
    """
    path = check_paths(path, *attention.shape[:2], all_heads=False)
    product = jnp.eye(attention.shape[2], dtype=attention.dtype)
    for l in range(attention.shape[0]):
        product = extended(attention[l], path[l], product)
    return product


def extended(
    attention: Float[Array, "h n n"], choice: Any, product: Float[Array, "n n"]
) -> Float[Array, "n n"]:
    """P_h of one layer times the product so far; a skip leaves it as it is.

    Args:
        attention: Attention weights of one layer.
        choice: Head 0..H−1, or H for a skip; may be traced.
        product: P_path of the layers before.
    """
    head = attention[jnp.minimum(choice, attention.shape[0] - 1)]
    return jnp.where(choice == attention.shape[0], product, head @ product)


@full_precision
def path_weight(
    params: TransformerParams, config: TransformerConfig, path: Any
) -> Float[Array, "d d"]:
    """W_path = W^1_{h_1} ⋯ W^L_{h_L}, W_h = γ W_{V,h} W_{O,h}; a skip is λ I (Theorem 2.1).

    Raises:
        ValueError: A network with norms, MLPs or cross-attention, which W_path does not cover; or
            as `path_attention`.
    """
    _require_san(config)
    path = check_paths(path, config.depth, config.num_heads, all_heads=False)
    weights = _layer_maps(params, config)
    product = jnp.eye(config.d_model, dtype=weights.dtype)
    for l in range(config.depth):
        product = product @ weights[l, path[l]]
    return product


@full_precision
def theorem_offset(params: TransformerParams, config: TransformerConfig) -> Float[Array, "d"]:
    """b of SAN(X) = Σ_path P_path X W_path + 1bᵀ: the biases of each layer, carried to the end.

    Rows of attention weights sum to 1, so a bias passes attention unchanged:
    b ← b (λ I + Σ_h γ W_h) + γ (b_O + Σ_h b_{V,h} W_{O,h}).

    Raises:
        ValueError: A network with norms, MLPs or cross-attention.
    """
    _require_san(config)
    params = completed(params, config)
    weights = _layer_maps(params, config)
    gains = layer_gains(config, weights.dtype, params).branch.attention
    offset = jnp.zeros(config.d_model, weights.dtype)
    for l in range(config.depth):
        p = layer_params(params, config, l).attention
        own = p.b_o + jnp.einsum("hv,hvd->d", p.b_v, p.w_o)
        offset = offset @ weights[l].sum(axis=0) + scaled(gains[l], own)
    return offset


@full_precision
def sum_over_paths(
    params: TransformerParams,
    x: Float[Array, "n d"],
    attention: Float[Array, "l h n n"],
    config: TransformerConfig,
    *,
    length: int | None = None,
    limit: int = MAX_PATHS,
) -> Float[Array, "n d"]:
    """Σ P_path X W_path over all paths, or over those of one length: Theorem 2.1, term by term.

    The slow and obvious form, for checks; `path_contributions` gives the same sums quickly.

    Args:
        params: Parameters.
        x: X, [n, d].
        attention: `Trace.attention` of the full forward pass.
        config: A SAN, with or without skips.
        length: Only paths of this length.
        limit: See `enumerate_paths`.

    Raises:
        ValueError: As `enumerate_paths` and `path_weight`.
    """
    _require_san(config)
    paths = enumerate_paths(
        config.depth, config.num_heads, skips=config.attention_skip, length=length, limit=limit
    )

    def term(path):
        return path_attention(attention, path) @ x @ path_weight(params, config, path)

    if not len(paths):
        return jnp.zeros_like(x)
    return jax.lax.map(term, jnp.asarray(paths), batch_size=256).sum(axis=0)


def _layer_maps(params, config):
    """γ W_h for every head, then λ I for the skip, or 0 without one: [L, H + 1, d, d]."""
    params = completed(params, config)
    dtype = params.layers.attention.w_v.dtype
    gains = layer_gains(config, dtype, params)
    maps = []
    for l in range(config.depth):
        p = layer_params(params, config, l).attention
        heads = scaled(gains.branch.attention[l], jnp.einsum("hdv,hve->hde", p.w_v, p.w_o))
        skip = scaled(gains.skip.attention[l], jnp.eye(config.d_model, dtype=dtype))
        skip = skip * config.attention_skip
        maps.append(jnp.concatenate([heads, skip[None]]))
    return jnp.stack(maps)


def _require_san(config):
    if config.mlp != "none" or config.norm_placement != "none" or config.cross_attention:
        raise ValueError(
            "Theorem 2.1 covers self-attention with or without skips, not "
            f"mlp={config.mlp!r}, norm_placement={config.norm_placement!r}, "
            f"cross_attention={config.cross_attention}; see path_contributions"
        )
