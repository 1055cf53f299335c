"""The weights of an attention that runs, by example and head, and which keys they may have.

Axis letters: g examples and heads as one, b examples, h heads, n queries, r measured ones, m keys.
"""

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 64  # queries of each head whose weights are measured, evenly spaced
HIDDEN = -700.0  # scores below it are of keys that a mask leaves out
SUM = 0.02  # how far from 1 the sum of weights may be, rounded to bfloat16
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


class Weights(NamedTuple):
    """Of one product of weights and values.

    Attributes:
        p: Weights of some queries, [g, r, m].
        rows: Which, [r].
        allowed: Bool [g, n, m], [b, n, m] or [1, n, m], the keys of each query; None for all.
    """

    p: Tensor
    rows: Tensor
    allowed: Tensor | None


def choose_rows(n: int, device: Any) -> Tensor:
    """Which queries are measured of n."""
    return torch.linspace(0, n - 1, min(n, ROWS), device=device).long()


def is_allowed(mask: Tensor) -> Tensor:
    """Bool, of a mask that is Bool, of whole numbers 0 and 1, or of floats added to scores."""
    if mask.dtype == torch.bool:
        return mask
    return mask > HIDDEN if mask.is_floating_point() else mask != 0


def weights_of_dot(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Weights:
    """Computes those of `scaled_dot_product_attention`, of some queries."""
    n, m = query.shape[-2], key.shape[-2]
    rows = choose_rows(n, query.device)
    if query.ndim > 3:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query[..., rows, :].float() @ key.float().mT
    allowed = None
    if is_causal:
        allowed = torch.ones(1, n, m, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed[0, rows], -math.inf)
    if attn_mask is not None:
        mask = attn_mask.expand(*attn_mask.shape[:-2], n, m)
        some = mask[..., rows, :]
        added = torch.where(some, 0.0, -math.inf) if some.dtype == torch.bool else some
        scores, allowed = scores + added, is_allowed(mask)
        if allowed.ndim == 4 == query.ndim:  # a key of one head is a key
            allowed = allowed.any(dim=1)
        elif allowed.ndim > 2:
            allowed = allowed.expand(*query.shape[:-2], n, m)
        allowed = allowed.reshape(-1, n, m)
    hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
    p = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    return Weights(p.reshape(-1, len(rows), m), rows, allowed)


def bind_heads(args: Any, kwargs: Any) -> dict[str, Any]:
    """Gives the arguments of `multi_head_attention_forward` by name."""
    return _SIGNATURE.bind(*args, **kwargs).arguments


def weights_of_heads(**named: Any) -> Weights:
    """Computes those of `multi_head_attention_forward`, of some queries and without dropout."""
    query, key, mask = named["query"], named["key"], named.get("attn_mask")
    padding, single = named.get("key_padding_mask"), query.ndim == 2
    n, m = query.shape[0], key.shape[0]
    rows = choose_rows(n, query.device)
    some = {"query": query[rows], "attn_mask": None if mask is None else mask[..., rows, :]}
    plainly = {"training": False, "need_weights": True, "average_attn_weights": False}
    _, p = functional.multi_head_attention_forward(
        **(named | some | plainly | {"is_causal": False})
    )
    p = p[None] if single else p
    b, allowed = len(p), None
    if mask is not None or padding is not None:
        allowed = torch.ones(b, 1, n, m, dtype=torch.bool, device=p.device)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask.unflatten(0, (b, -1))
        allowed = allowed & (~mask if mask.dtype == torch.bool else is_allowed(mask))
    if padding is not None:
        padding = padding if padding.ndim == 2 else padding[None]
        keys = ~padding if padding.dtype == torch.bool else is_allowed(padding)
        allowed = allowed & keys[:, None, None]
    if allowed is not None:
        p = p.masked_fill(~allowed[..., rows, :].any(dim=-1, keepdim=True), 0.0)
        added = p.shape[-1] - m  # keys of `add_bias_kv` and `add_zero_attn`
        allowed = functional.pad(allowed, (0, added), value=True)
        allowed = allowed.any(dim=1)
    return Weights(p.flatten(0, 1), rows, allowed)


def keys_last(used: Tensor, letters: str, of_values: str, result: str) -> Tensor:
    """Moves the axes of weights so that the last two are queries and keys.

    Args:
        used: The weights.
        letters, of_values, result: Of the axes of weights, values and their product.
    """
    summed = [c for c in letters if c not in result]
    free = [c for c in letters if c in result and c not in of_values]
    batch = [c for c in letters if c not in summed + free]
    return used.permute([letters.index(c) for c in batch + free + summed])


def weights_of_scores(used: Tensor, scores: Any) -> Weights:
    """Reads those that met the values, before dropout.

    Args:
        used: What met the values, [..., n, m].
        scores: The `Scores` that it comes from.

    """
    made, allowed = scores.weights, scores.allowed
    n, m = used.shape[-2:]
    rows, used = choose_rows(n, used.device), used.detach().reshape(-1, n, m)
    p = used[:, rows].float()
    if allowed is None or allowed.shape[-2] != n or allowed[..., 0].numel() != used[..., 0].numel():
        return Weights(p, rows, used > 0)
    extra = allowed.shape[-1] - m  # sinks beside the keys, before or after them
    allowed = allowed.reshape(len(p), n, m + extra)
    starts = dict.fromkeys((0, extra)) if extra >= 0 and made is not None else ()
    for start in starts:
        plain = made.reshape(allowed.shape)[:, rows, start : start + m].float()
        if _is_dropped(plain, p):
            return Weights(plain, rows, allowed[..., start : start + m])
    return Weights(p, rows, allowed[..., :m] if extra >= 0 else used > 0)


def is_distribution(p: Tensor) -> bool:
    """Whether no weight is below 0, and no sum over keys above 1."""
    return not bool((p < -1e-6).any() or (p.sum(dim=-1) > 1 + SUM).any())


def _is_dropped(weights, used):
    """Whether what met the values is the softmax's result, or that after dropout."""
    large = (used != 0) & (weights > 0.1 / weights.shape[-1])
    if not large.any():
        return not used.any()
    ratio = used[large] / weights[large]
    return bool(ratio.max() <= 1.03 * ratio.min())


def real_tokens(allowed: Tensor) -> Tensor:
    """Bool [b, n]: tokens that some query may attend to, and that may attend to some token.

    A token that may attend to others, while only itself may attend to it, is padding where the last
    of the others is attended to by one before it: attention there is not causal.

    Args:
        allowed: Bool [b, n, n], which token a token may attend to.
    """
    keys, queries = allowed.any(dim=-2), allowed.any(dim=-1)
    others = allowed & ~torch.eye(allowed.shape[-1], dtype=torch.bool, device=allowed.device)
    alone = others.any(dim=-1) & ~others.any(dim=-2)
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    last = torch.where(keys & ~alone, place, 0).amax(dim=-1, keepdim=True)
    return keys & queries & ~(alone & others.triu().any(dim=-2).gather(-1, last))


def fits_mask(mask: Tensor, allowed: Tensor | None) -> bool:
    """Whether no token of a mask [b, n] attends to one outside, and each attends to some token."""
    if allowed is None:
        return bool(mask.all())
    wrong = allowed & mask[:, :, None] & ~mask[:, None]
    return not wrong.any() and bool((allowed.any(dim=-1) | ~mask).all()) and bool(mask.any())


def document_starts(allowed: Tensor, exists: Tensor) -> Tensor | None:
    """Bool [b, n], where a new document begins in a packed row; None if rows are not packed.

    It begins where neither token i attends to i − 1 nor i − 1 to i, and none attends across.

    Args:
        allowed: Bool [b, n, n], which token a token may attend to.
        exists: Bool [b, n].
    """
    both = torch.zeros_like(exists)
    back, ahead = allowed.diagonal(-1, 1, 2), allowed.diagonal(1, 1, 2)
    both[:, 1:] = ~(back | ahead) & exists[:, 1:] & exists[:, :-1]
    if not both.any():
        return None
    document = both.cumsum(dim=1)
    apart = document[:, :, None] != document[:, None]
    across = allowed & apart & exists[:, :, None] & exists[:, None]
    return None if across.any() else both
