"""Scalars of the tokens and of the attention weights of one layer, of a batch with padding.

Axis letters: b batch, h heads, r measured queries, n tokens, m keys, d width.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rank_collapse.measures.monitor import ATTENTION, monitor
from rank_collapse.measures.table import MEASURES
from rank_collapse.torch.notes import LeftOut
from rank_collapse.torch.products import Product, tensors_in


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Neither gradients nor the precision of a surrounding `torch.autocast`."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None else device.type
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
        yield


def tokens_in(values: Any, width: int | None) -> Tensor | None:
    """The first tokens among arguments or results: floats, whose last axis or another has d."""
    for a in tensors_in(values):
        if a.is_floating_point() and a.ndim > 1 and (width is None or width in a.shape[1:]):
            return a.detach()
    return None


def batch_of(x: Tensor, width: int | None, tokens_first: bool) -> Tensor:
    """[b, n, d] of tokens [b, n, d], [n, b, d], [n, d], or maps [b, h, w, d] or [b, d, h, w].

    Raises:
        LeftOut: Maps that can be read in two ways.
    """
    if x.ndim == 2:
        return x[None]
    if (width is not None and x.shape[-1] != width) or (x.ndim == 4 and x.shape[1] == width):
        if x.shape[-1] == width:
            raise LeftOut(f"tokens of shape {tuple(x.shape)} have d={width} on two axes")
        x = x.movedim(1, -1)
    x = x.flatten(1, -2) if x.ndim > 3 else x
    return x.transpose(0, 1) if tokens_first else x


def of_tokens(x: Tensor, mask: Tensor | None, tokens: str) -> dict[str, Tensor]:
    """`monitor` of tokens [b, n, d], of which those of a mask [b, n] exist.

    Raises:
        LeftOut: Fewer than two tokens.
    """
    if x.shape[0] == 0 or x.shape[1] < 2:
        raise LeftOut(f"{x.shape[0]} examples of {x.shape[1]} tokens")
    return monitor(x, mask=mask, tokens="unit" if tokens == "unit" else "raw")


def of_weights(product: Product, queries: Tensor | None) -> dict[str, Tensor]:
    """The measures of weights, means over heads and examples that have a query.

    Args:
        product: The weights, and which keys exist.
        queries: Bool [b, n], which queries exist; None for all.
    """
    p = product.weights
    if p.shape[0] == 0 or p.shape[-1] < 2:
        raise LeftOut(f"{p.shape[0]} examples of {p.shape[-1]} keys")
    shown = None if queries is None else queries[:, product.rows]
    found = {}
    for name in ATTENTION:
        options = {"key_mask": product.keys} if name == "sink_rate" else {}
        each = MEASURES[name](p, mask=shown, **options)
        each = each.mean(dim=-1) if each.ndim > 1 else each
        found[name] = each.mean() if shown is None else each[shown.any(dim=-1)].mean()
    return found
