"""Masks of attention: which keys a query may attend to.

Axis letters: n tokens (queries), m keys, h heads.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool


def causal_mask(num_tokens: int) -> Bool[Array, "n n"]:
    """Each token attends to itself and to earlier tokens."""
    i = jnp.arange(num_tokens)
    return i[:, None] >= i[None, :]


def local_mask(num_tokens: int, window: int) -> Bool[Array, "n n"]:
    """Each token attends to tokens at most `window` places away, on both sides."""
    i = jnp.arange(num_tokens)
    return jnp.abs(i[:, None] - i[None, :]) <= window


def combine_masks(*masks: Any) -> Any:
    """Logical and of the masks that are not None, or None.

    Masks are Bool [m] (padding: which keys exist), [n, m], or [h, n, m]; the result has the
    rank of the largest, at least 2.
    """
    masks = [m[None, :] if m.ndim == 1 else m for m in masks if m is not None]
    if not masks:
        return None
    rank = max(m.ndim for m in masks)
    combined = None
    for m in masks:
        m = m.reshape((1,) * (rank - m.ndim) + m.shape)
        combined = m if combined is None else combined & m
    return combined
