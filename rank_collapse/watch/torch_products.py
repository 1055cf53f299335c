"""The weights of an attention that runs, which keys they may have, and the scalars of documents.

Axis letters: g examples and heads as one, b or e examples, h heads, n queries, r measured ones,
m keys, d width.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rank_collapse.measures.documents import split_documents
from rank_collapse.measures.monitor import ATTENTION_MEASURES, monitor
from rank_collapse.measures.table import MEASURES
from rank_collapse.printed import format_count
from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_masks import is_allowed

ROWS = 64  # queries of each head whose weights are measured, evenly spaced
SUM = 0.02  # how far from 1 the sum of weights may be, rounded to bfloat16


class Weights(NamedTuple):
    """Weights of attention in one product of weights and values.

    Attributes:
        p: Weights of some queries, [g, r, m].
        rows: Int [r], the measured queries.
        allowed: Bool [g, n, m], [b, n, m] or [1, n, m], the keys of each query.
    """

    p: Tensor
    rows: Tensor
    allowed: Tensor


@contextlib.contextmanager
def leave_autocast() -> Iterator[None]:
    """Computes without `torch.autocast`."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if device is None else device.type
    with torch.autocast("cpu", enabled=False), torch.autocast(kind, enabled=False):
        yield


def choose_rows(n: int, device: object) -> Tensor:
    """Chooses which of n queries to measure: `ROWS`, evenly spaced, or all if there are fewer.

    Returns:
        Int [r], in order.
    """
    return torch.linspace(0, n - 1, min(n, ROWS), device=device).long()


@leave_autocast()
def compute_dot_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    static: Callable[[], Tensor] | None = None,
    is_chosen: bool = False,
) -> Weights:
    """Computes the weights of `scaled_dot_product_attention`, of some queries.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: Arguments of the
            call.
        static: Makes a Bool like `attn_mask`: the keys that remain after masks that do not depend
            on content.
        is_chosen: Whether content decides some of `attn_mask`; then `static` alone hides keys.
    """
    n, m = query.shape[-2], key.shape[-2]
    rows = choose_rows(n, query.device)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * query[..., rows, :].float() @ key.float().mT
    allowed = torch.ones(1, 1, 1, dtype=torch.bool, device=query.device).expand(1, n, m)
    if is_causal:
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        mask = attn_mask.expand(*attn_mask.shape[:-2], n, m)
        allowed, added = is_allowed(mask), mask[..., rows, :]
        if is_chosen:
            allowed = torch.ones_like(allowed) if static is None else static().expand_as(mask)
        if mask.dtype == torch.bool:
            added = torch.where(added, 0.0, -math.inf)
        scores = scores + added
        if allowed.ndim == 4 == query.ndim:  # a key of one head is a key
            allowed = allowed.any(dim=1)
        elif allowed.ndim > 2:
            allowed = allowed.expand(*query.shape[:-2], n, m)
        allowed = allowed.reshape(-1, n, m)
    hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
    p = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    return Weights(p.reshape(-1, len(rows), m), rows, allowed)


def read_weights(
    used: Tensor,
    allowed: Tensor | None,
    softmax: Tensor | None,
    letters: tuple[str, str, str],
    queries: Sequence[str],
) -> Weights:
    """Reads the weights that met the values, before dropout.

    Args:
        used: The tensor that met the values, of any layout.
        allowed: Bool like it, which keys a query may attend to; None for all.
        softmax: Same shape, the output of the last softmax, if known.
        letters: Letters of the axes of weights, values and their product.
        queries: Letters of the axes of queries in the weights.
    """
    axes, _, result = letters
    summed = [c for c in axes if c not in result]
    batch = [c for c in axes if c not in (*summed, *queries)]
    order = [axes.index(c) for c in batch + queries + summed]
    allowed = torch.ones_like(used) > 0 if allowed is None else allowed
    used, allowed, softmax = (
        a if a is None else a.detach().permute(order)[None].flatten(0, -3)
        for a in (used, allowed, softmax)
    )
    rows = choose_rows(used.shape[1], used.device)
    p = used[:, rows].float()
    before = p if softmax is None else softmax[:, rows].float() * allowed[:, rows]
    return Weights(before if _is_dropped(before, p) else p, rows, allowed)


def allow_all(n: int, m: int, device: object) -> Weights:
    """Returns `Weights` without weights, in which each of n queries may attend to all m keys."""
    allowed = torch.ones(1, 1, 1, dtype=torch.bool, device=device).expand(1, n, m)
    return Weights(torch.empty(0, 0, m, device=device), choose_rows(n, device), allowed)


def sort_examples(weights: Weights, order: Tensor, num_examples: int) -> Weights:
    """Returns weights sorted by examples.

    Args:
        weights: Weights of g examples and heads.
        order: Order in which these become [e, h].
        num_examples: e.

    Returns:
        Weights with `allowed` [e or 1, n, m], the keys of any head.
    """
    allowed, g = weights.allowed, len(weights.p)
    if len(allowed) > 1:
        allowed = allowed.repeat_interleave(g // len(allowed), dim=0)[order]
        allowed = allowed.unflatten(0, (num_examples, -1)).any(dim=1)
    return weights._replace(p=weights.p[order], allowed=allowed)


def keep_allowed(weights: Weights, order: Tensor, num_examples: int) -> Weights:
    """Drops all weights, and keeps which keys each example allows.

    It serves weights that cannot be matched with the queries, because their numbers of matrices
    differ.

    Args:
        weights: Weights of g matrices, `allowed` [g or 1, n, m].
        order: Order in which examples and heads of the queries become [e, h].
        num_examples: e.

    Returns:
        `Weights` without weights, with `allowed` [e or 1, n, m]: the keys that any head of an
        example allows. If the matrices cannot be assigned to examples, all keys are allowed.
    """
    allowed = weights.allowed
    are_examples_first = torch.equal(order, torch.arange(len(order), device=order.device))
    if len(allowed) > 1 and (not are_examples_first or len(allowed) % num_examples):
        allowed = torch.ones_like(allowed[:1])
    elif len(allowed) > 1:
        allowed = allowed.unflatten(0, (num_examples, -1)).any(dim=1)
    return weights._replace(p=weights.p[:0], allowed=allowed)


def compute_crossing(tokens: Any, weights: Weights, exists: Tensor) -> float:
    """Computes the mean weight that tokens which exist give to keys that do not; 0 if unknown.

    Args:
        tokens: Tokens of the queries, with `has_own_keys`.
        weights: Weights in the order of examples.
        exists: Bool [e, n].
    """
    if not tokens.has_own_keys() or not len(weights.p):
        return 0.0
    p = weights.p.unflatten(0, (len(exists), -1)).mean(dim=1)
    mass = (p * ~exists[:, None]).sum(dim=-1)[exists[:, weights.rows]]
    return float(mass.mean()) if mass.numel() else 0.0


def sums_to_one(p: Tensor) -> bool:
    """Returns whether the weights of each query that has any sum to 1."""
    sums = p.sum(dim=-1)
    return bool(((sums - 1).abs() < SUM).logical_or(sums == 0).all() and (sums != 0).any())


def is_distribution(p: Tensor) -> bool:
    """Returns whether no weight is below 0, and no sum over keys above 1."""
    return not bool((p < -1e-6).any() or (p.sum(dim=-1) > 1 + SUM).any())


def _is_dropped(weights, used):
    """Returns whether the weights that met the values are the softmax's results, some of them
    dropped.

    Dropout sets weights to 0 and multiplies all others by one factor. Where the ratio of used
    weights to the softmax's differs, something else changed them.

    Args:
        weights: Results of the softmax, [g, r, m].
        used: The weights that met the values, of this shape.
    """
    large = (used != 0) & (weights > 0.1 / weights.shape[-1])
    if not large.any():
        return not used.any()
    ratio = used[large] / weights[large]
    return bool(ratio.max() <= 1.03 * ratio.min())


def find_tokens(allowed: Tensor) -> Tensor:
    """Finds Bool [b, n], tokens that some query may attend to, and that may attend to some token.

    A key that only its own query may attend to, while that query may attend to others, is padding;
    unless attention is causal, where this is the last token. Tokens at either end that attend only
    to themselves, and to which no other token attends, are padding, too.

    Args:
        allowed: Bool [b, n, n], which token a token may attend to.
    """
    is_key, is_query = allowed.any(dim=-2), allowed.any(dim=-1)
    to_others = allowed & ~torch.eye(allowed.shape[-1], dtype=torch.bool, device=allowed.device)
    attends, is_attended = to_others.any(dim=-1), to_others.any(dim=-2)
    is_lonely = attends & ~is_attended
    is_apart = (~attends & ~is_attended).long()
    from_start, from_end = (a.cumprod(dim=-1) > 0 for a in (is_apart, is_apart.flip(-1)))
    is_end = (from_start | from_end.flip(-1)) & ~from_start[..., -1:]  # unless all are apart
    place = torch.arange(allowed.shape[-1], device=allowed.device)
    last = torch.where(is_key & ~is_lonely, place, 0).amax(dim=-1, keepdim=True)
    sees_ahead = to_others.triu().any(dim=-2).gather(-1, last)
    return is_key & is_query & ~is_end & ~(is_lonely & sees_ahead)


def find_repeated(index: Tensor) -> Tensor:
    """Finds Bool [e, n], where a token stands again, as where heads are further queries.

    Args:
        index: Int [e, n], numbers of the tokens.
    """
    numbers, order = index.sort(dim=1, stable=True)
    is_again = torch.zeros_like(index, dtype=torch.bool)
    is_again[:, 1:] = numbers[:, 1:] == numbers[:, :-1]
    return torch.zeros_like(is_again).scatter(1, order, is_again)


def fits_mask(mask: Tensor, allowed: Tensor) -> bool:
    """Returns whether a mask can be the mask of the tokens that exist.

    No token of it attends to one outside, and each attends to some token.

    Args:
        mask: Bool [b, n].
        allowed: Bool [b or 1, n, n], which token a token may attend to.
    """
    wrong = allowed & mask[:, :, None] & ~mask[:, None]
    return not wrong.any() and bool((allowed.any(dim=-1) | ~mask).all()) and bool(mask.any())


def hides_others(mask: Tensor, allowed: Tensor | None) -> bool:
    """Returns whether attention hides the tokens that a mask leaves out from all other tokens.

    Args:
        mask: Bool [b, n].
        allowed: Bool [b or 1, n, n], which token a token may attend to; None if unknown.
    """
    if allowed is None or mask.all():
        return False
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    return not (allowed & ~itself & ~mask[:, None]).any()


def number_documents(exists: Tensor, allowed: Tensor | None, index: Tensor) -> Tensor:
    """Numbers the documents of packed rows by their first tokens.

    A document begins where neither token i attends to i − 1 nor i − 1 to i, and none attends
    across.

    Args:
        exists: Bool [b, n].
        allowed: Bool [b or 1, n, n], which token a token may attend to; None if unknown.
        index: Int [b, n], numbers of the tokens.

    Returns:
        Int [b, n], the number of the document of each token; −1 for tokens that do not exist.
    """
    place = torch.arange(exists.shape[1], device=exists.device)  # [n]
    is_start = torch.zeros_like(exists)  # [b, n]
    if allowed is not None:
        looks_back = allowed.diagonal(-1, 1, 2)  # [b, n − 1]: token i attends to i − 1
        looks_ahead = allowed.diagonal(1, 1, 2)  # [b, n − 1]: token i − 1 attends to i
        both_exist = exists[:, 1:] & exists[:, :-1]
        is_start[:, 1:] = ~(looks_back | looks_ahead) & both_exist
    if is_start.any():
        document = is_start.cumsum(dim=1)
        is_across = document[:, :, None] != document[:, None]  # [b, n, n]
        both_exist = exists[:, :, None] & exists[:, None]
        attends_across = (allowed & is_across & both_exist).any()
        is_start = is_start & ~attends_across
    first = torch.where(is_start, place, 0).cummax(dim=1).values  # of each token's document
    return index.gather(1, first).masked_fill(~exists, -1)


@leave_autocast()
def measure_tokens(x: Tensor, documents: Tensor, kind: str) -> dict[str, Tensor]:
    """Measures tokens by `monitor`, means over documents.

    Args:
        x: Tokens [e, n, d].
        documents: Int [e, n], the document of each token, −1 for those that do not exist.
        kind: "unit" for tokens divided by their norms.

    Raises:
        LeftOut: No example, or fewer than two tokens.
    """
    if x.shape[0] == 0 or x.shape[1] < 2:
        raise LeftOut(
            f"{format_count(x.shape[0], 'example')} of {format_count(x.shape[1], 'token')}"
        )
    options: dict[str, Any] = {"tokens": "unit" if kind == "unit" else "raw"}
    if not torch.equal(documents, documents[:, :1].clamp(min=0).expand_as(documents)):
        options |= {"mask": documents >= 0, "segments": documents}
    return monitor(x, **options)


@leave_autocast()
def measure_weights(weights: Weights, documents: Tensor) -> dict[str, Tensor]:
    """Measures weights by document and head [k, h], of documents that have a measured query.

    Args:
        weights: Weights in the order of examples, `p` [e · h, r, m].
        documents: Int [e, n], as `measure_tokens` takes them.

    Raises:
        LeftOut: The weights are not a distribution.
    """
    e, rows = len(documents), weights.rows
    p = weights.p.unflatten(0, (e, -1))
    r, m = p.shape[-2:]
    if not is_distribution(p):
        raise LeftOut("its weights are not a distribution over keys")
    numbers = documents[:, rows]
    packed = split_documents(numbers, (numbers >= 0) & (p.sum(dim=(1, 3)) != 0), (e, r))
    p, is_query = packed.split_heads(p), torch.as_tensor(packed.exists, device=p.device)
    allowed = packed.split_tokens(weights.allowed[:, rows].expand(e, r, m))
    keys = (allowed & is_query[..., None]).any(dim=1)
    missing = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=0) * is_query[:, None, :, None]
    has_sink = bool((missing > SUM).any())
    if has_sink:  # what goes to no key is one key more
        p = torch.cat([p, missing], dim=-1)
        keys = torch.nn.functional.pad(keys, (0, 1), value=False)
    options = {"sink_rate": {"key_mask": keys}}
    scalars = {
        name: MEASURES[name](p, mask=is_query, **options.get(name, {}))
        for name in ATTENTION_MEASURES
    }
    if has_sink:
        counts = is_query.sum(dim=-1).clamp(min=1)[:, None]
        scalars["missing_mass"] = missing[..., 0].sum(dim=-1) / counts
    return scalars
