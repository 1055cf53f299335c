"""Checks of the inputs of a network: what an argument must be, and whether the network uses it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from rank_collapse.annotations import ArrayLike, DType, Leaf
from rank_collapse.measures.arrays import as_bools
from rank_collapse.measures.on_jax import as_jax
from rank_collapse.network.config import TransformerConfig
from rank_collapse.printed import format_count, format_one_line


def is_embedded(x: ArrayLike, config: TransformerConfig) -> bool:
    """Return whether x goes through the embedding: ids, or vectors that are not hidden states."""
    embedding, x = config.embedding, jnp.asarray(x)
    if embedding is None:
        return False
    is_ids = jnp.issubdtype(x.dtype, jnp.integer)
    return is_ids or x.shape[-1:] != (config.d_model,) or embedding.d_input == config.d_model


def check_inputs_used(
    x: ArrayLike, config: TransformerConfig, segments: ArrayLike, positions: ArrayLike
) -> None:
    """Check that the network uses segments and positions if they are passed.

    Args:
        x, config: See `prepare_inputs`.
        segments, positions: None where they are absent.

    Raises:
        ValueError: The network does not use them.
    """
    embedding = config.embedding if is_embedded(x, config) else None
    embeds_positions = embedding is not None and embedding.positions != "none"
    if positions is not None and config.position != "rotary" and not embeds_positions:
        raise ValueError(
            "positions are given, but this network does not use them: only position='rotary' and "
            "embeddings of token ids with positions do"
        )
    embeds_segments = embedding is not None and embedding.num_segments
    if segments is not None and config.position != "relative_key" and not embeds_segments:
        raise ValueError(
            "segments are given, but this network does not use them: only "
            "position='relative_key' and embeddings of token ids with num_segments do"
        )


def check_indices(inputs: Mapping[str, object], config: TransformerConfig) -> None:
    """Check that ids are rows of the embedding's tables; traced ids are not checked.

    Without this JAX would read the last row for an id beyond the table.

    Args:
        inputs: Inputs of one example or a batch, by argument name of `apply`.
        config: The network.

    Raises:
        ValueError: Token ids, positions or segments outside of the tables.
    """
    embedding = config.embedding
    if embedding is None:
        return
    tables = [
        ("x", "token id", "vocab_size"),
        ("segments", "segment", "num_segments"),
        ("positions", "position", "num_positions"),
    ]
    if embedding.positions != "learned":
        del tables[-1]
    for name, noun, size_name in tables:
        ids, size = inputs.get(name), getattr(embedding, size_name)
        if ids is None or not size or isinstance(ids, jax.core.Tracer):
            continue
        ids = np.asarray(ids)
        if not np.issubdtype(ids.dtype, np.integer):
            continue
        outside = ids[(ids < 0) | (ids >= size)]
        if outside.size:
            raise ValueError(f"{noun} {outside.flat[0]} is not below {size_name}={size}")


def check_mask(mask: ArrayLike, shape: tuple[int, int, int], name: str) -> Leaf | None:
    """Convert a mask to Bool [m], [n, m] or [h, n, m]; None stays None.

    Args:
        mask: Booleans, or the numbers 0 and 1.
        shape: (h, n, m).
        name: Name of the argument, for the message.

    Raises:
        ValueError: A mask of another shape, or with invalid values: see `as_mask`.
    """
    if mask is None:
        return None
    mask, (h, n, m) = as_mask(mask, name), shape
    if mask.shape[-1:] != (m,) or not _broadcasts_to(mask, shape):
        raise ValueError(
            f"{name} of shape {mask.shape} does not fit {format_count(n, 'token')} and "
            f"{format_count(m, 'key')}: "
            f"[{m}], [{n}, {m}] or [heads={h}, {n}, {m}]"
        )
    return mask


def check_bias(bias: ArrayLike, shape: tuple[int, int, int]) -> Leaf | None:
    """Give a bias of scores its three axes; None stays None.

    Args:
        bias: An array.
        shape: (h, n, m).

    Raises:
        ValueError: A bias of another shape, or of booleans.
    """
    if bias is None:
        return None
    if bias.dtype == bool or not _broadcasts_to(bias, shape):
        raise ValueError(
            f"bias of shape {bias.shape} and dtype {bias.dtype} does not have numbers of "
            f"shape {shape}, which are added to the scores; use mask= to restrict keys"
        )
    return bias.reshape((1,) * (3 - bias.ndim) + bias.shape)


def _broadcasts_to(array, shape):
    """Return whether an array can be broadcast to a shape without more axes or longer ones."""
    sizes = zip(reversed(array.shape), reversed(shape), strict=False)
    return array.ndim <= len(shape) and all(size in (1, full) for size, full in sizes)


def as_numbers(values: ArrayLike, name: str, dtype: DType | None = None) -> Leaf:
    """Convert an argument to an array of JAX.

    Args:
        values: Array of any shape.
        name: Name of the argument, for the message.
        dtype: Number format of the result; None keeps the format of the values.

    Raises:
        ValueError: None, text, or rows of different lengths.
    """
    try:
        return jnp.asarray(values, dtype)
    except (TypeError, ValueError) as error:
        fault = f"{name} of type {type(values).__name__} is not an array of numbers"
        raise ValueError(f"{fault}: {format_one_line(error, 200)}") from None


def as_mask(mask: ArrayLike, name: str = "mask") -> Bool[Array, "*s"]:
    """Convert a mask to Bool, from booleans or the numbers 0 and 1, lists of them too.

    Args:
        mask: Booleans of any shape.
        name: Name of the argument, for the message.

    Raises:
        ValueError: Invalid values, see `measures.arrays.as_bools`.
    """
    return as_jax(as_bools(mask, name))
