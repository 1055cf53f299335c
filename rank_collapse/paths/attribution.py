"""Logits split as the states that they are read from: by head, by path length, by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse.network.precision import full_precision
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.direct import DirectContributions


@full_precision
def logit_attribution(
    contributions: Any, unembedding: Any, *, classes: int | tuple[int, int] | None = None
) -> Any:
    """Each part's share of the logits x W + b: its product with W; b belongs to the offset.

    The final norm is frozen in the contributions already, so that the shares of a sum that equals
    the output sum to the logits: `direct_contributions` by head and MLP, `path_contributions` by
    length. `head_contributions` count a path for every head on it and do not sum.

    Args:
        contributions: `DirectContributions`, `PathContributions`, or an array [..., n, d].
        unembedding: (w [d, c], b [c]) as of `Classifier`, or w alone (GPT-2: the embedding's
            transpose).
        classes: A class a for its logit alone, (a, b) for the difference of two logits; None for
            all. The axis of classes stays, then of size 1.

    Returns:
        The same structure with [..., n, c] in the place of [..., n, d].

    Raises:
        ValueError: An unembedding of another width, or a class that it has not.

    Example:
        parts = rc.direct_contributions(params, ids, config)
        shares = rc.logit_attribution(parts, unembedding, classes=(right, wrong))
        shares.heads[:, :, -1, 0]  # [L, h], of the difference of the last token's two logits
    """
    w, b = unembedding if isinstance(unembedding, tuple | list) else (unembedding, None)
    w = jnp.asarray(w)
    b = jnp.zeros(w.shape[-1:], w.dtype) if b is None else jnp.asarray(b)
    leaves = jax.tree.leaves(contributions)
    if w.ndim != 2 or any(a.shape[-1] != w.shape[0] for a in leaves):
        widths = sorted({a.shape[-1] for a in leaves})
        raise ValueError(
            f"unembedding of shape {w.shape} is not [d, c] for contributions of d={widths}"
        )
    if classes is not None:
        w, b = (_of_classes(a, classes) for a in (w, b))

    def share(a: Array) -> Array:
        return jnp.einsum("...d,dc->...c", a, w)

    shares = jax.tree.map(share, contributions)
    if not isinstance(contributions, PathContributions | DirectContributions):
        return shares
    bias = b[None, :]
    if isinstance(shares, PathContributions):
        shares = shares.replace(output=shares.output + bias)
    return shares.replace(offset=shares.offset + bias)


def _of_classes(a, classes):
    pair = classes if isinstance(classes, tuple | list) else (classes,)
    for index in pair:
        if not 0 <= index < a.shape[-1]:
            raise ValueError(f"class {index} is not in 0..{a.shape[-1] - 1}")
    if len(pair) > 2:
        raise ValueError(f"classes={classes!r} is not one class or two")
    chosen = a[..., pair[0], None]
    return chosen if len(pair) == 1 else chosen - a[..., pair[1], None]
