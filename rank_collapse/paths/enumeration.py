"""Paths through a network: their counts, their lengths, and their definition.

A path is one integer per layer: 0 .. H−1 a head, H the skip, −1 all heads at once. Its length is
the number of layers it does not skip. The two meanings of a path, always named:

* *frozen*: attention weights, norm statistics and MLP gates come from the full forward pass; the
  terms of all paths sum to the output (Dong et al. 2021, Theorem 2.1);
* *recomputed*: a path is a separate network, whose attention is computed from the path's own hidden
  state (as in the paper's experiments).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rank_collapse.annotations import AnyArray, ArrayLike
from rank_collapse.checks import check_choice, check_whole

ALL_HEADS = -1


def count_paths(depth: int, num_heads: int, skips: bool = True) -> tuple[int, ...]:
    """Count the paths of each length, |P_k| = C(L, k) H^k for k = 0 .. L, exactly.

    Args:
        depth, num_heads: L and H.
        skips: False for a network without skips, in which all paths have length L.

    Returns:
        L + 1 Python integers, whose sum is (1 + H)^L, or H^L without skips.

    Raises:
        ValueError: depth or num_heads below 1, or skips that are neither True nor False.
    """
    check_choice(f"skips={skips!r}", skips, (True, False))
    depth, num_heads = check_whole("depth", depth, 1), check_whole("num_heads", num_heads, 1)
    counts = [math.comb(depth, k) * num_heads**k for k in range(depth + 1)]
    return tuple(counts if skips else [0] * depth + counts[-1:])


def path_length(paths: ArrayLike, num_heads: int) -> AnyArray:
    """Count the layers that each path [..., L] does not skip."""
    return (paths != num_heads).sum(axis=-1)


def check_lengths(lengths: ArrayLike, depth: int) -> None:
    """Check that a length, or each of several, is in 0 .. L; traced ones are not checked.

    Raises:
        ValueError: The length is above L or below 0.
    """
    if not isinstance(lengths, jax.core.Tracer):
        for length in np.atleast_1d(lengths).tolist():
            check_whole("length", length, 0, depth)


def check_paths(
    paths: ArrayLike, depth: int, num_heads: int, *, all_heads: bool = True
) -> Int[Array, "*s l"] | np.ndarray:
    """Convert paths [..., L] to an array, and check that they fit the network.

    Args:
        paths: Choices by layer, or lists of them.
        depth, num_heads: L and H.
        all_heads: Whether −1, all heads, is a choice.

    Raises:
        ValueError: A path of the wrong length, with entries that are not integers, or with a head
            that does not exist; the values of traced paths are not checked.
    """
    paths = paths if isinstance(paths, jax.Array) else np.asarray(paths)
    if not paths.shape or paths.shape[-1] != depth:
        raise ValueError(
            f"paths have the shape {paths.shape}, but must have one choice for each of the "
            f"depth={depth} layers, [..., {depth}]"
        )
    if not jnp.issubdtype(paths.dtype, jnp.integer):
        raise ValueError(f"paths are {paths.dtype}, but must be integers")
    if isinstance(paths, jax.core.Tracer):
        return paths
    values = np.asarray(paths)
    smallest = ALL_HEADS if all_heads else 0
    invalid = values[(values < smallest) | (values > num_heads)]
    if invalid.size:
        all_choice = f" or {ALL_HEADS} for all heads" if all_heads else ""
        raise ValueError(
            f"paths contain the choice {invalid.flat[0]}, but a choice must be a head from 0 to "
            f"{num_heads - 1}, or {num_heads} for the skip{all_choice}"
        )
    return paths
