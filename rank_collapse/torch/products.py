"""The products of an attention while it runs: its weights, and the mask that reached it.

A `TorchFunctionMode` sees `scaled_dot_product_attention`, the softmax whose result is multiplied
with values, and `multi_head_attention_forward`, and changes nothing.

Axis letters: b batch, h heads, g heads of keys, n queries, r measured ones, m keys, k width.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rank_collapse.torch.notes import LeftOut

ROWS = 64  # queries of each head whose weights are measured, evenly spaced
HIDDEN = -5000.0  # scores below it are of keys that a mask leaves out
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


class Product(NamedTuple):
    """Of one attention, once it has run.

    Attributes:
        weights: Of some queries, [b, h, r, m].
        rows: Which, [r].
        count: How many queries there are, n.
        keys: Bool [b, m], to which some query may attend; None for all.
        queries: Bool [b, n], that may attend to some key; None for all.
        value: What is weighted, [b, g, m, k]; None where it was not seen.
    """

    weights: Tensor
    rows: Tensor
    count: int
    keys: Tensor | None
    queries: Tensor | None
    value: Tensor | None


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results, in order, also of tuples, lists and mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


class Products(TorchFunctionMode):
    """Passes what it sees to `see(what, arguments, keywords, result)`."""

    KNOWN = {
        functional.scaled_dot_product_attention: "dot",
        functional.multi_head_attention_forward: "heads",
        **dict.fromkeys((functional.softmax, torch.softmax, Tensor.softmax), "softmax"),
        **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum), "times"),
        **dict.fromkeys((torch.bmm, Tensor.bmm), "times"),
    }

    def __init__(self, see: Any):
        super().__init__()
        self._see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in self.KNOWN:
            self._see(self.KNOWN[func], args, kwargs or {}, result)
        return result


class Seen:
    """What one attention has multiplied so far, in one run of it."""

    def __init__(self):
        self._made: list[Any] = []  # functions of the tokens' shape that give a Product
        self._softmax: Any = None  # one whose result has met no values yet, and what was there
        self._why = "no softmax and no scaled_dot_product_attention was seen inside"

    def see(self, what: str, args: Any, kwargs: Any, result: Any) -> None:
        """Takes what `Products` passes."""
        if what == "dot":
            self._made.append(lambda shape: of_dot(shape, *args, **kwargs))
        elif what == "heads":
            self._made.append(lambda shape: of_heads(*args, **kwargs))
        elif what == "softmax":
            self._weighted(result, *args, **kwargs)
        elif self._softmax is not None:
            self._multiplied(*tensors_in(args))

    def product(self, shape: Sequence[int]) -> Product:
        """The one product of an attention on tokens of that shape.

        Raises:
            LeftOut: None was seen, or several.
        """
        if len(self._made) != 1:
            several = f"{len(self._made)} products in one run of it"
            raise LeftOut(several if self._made else self._why)
        return self._made[0](shape)

    def _weighted(self, weights, scores, dim=-1, *_, **__):
        if weights.ndim in (3, 4, 5) and dim in (-1, weights.ndim - 1):
            self._softmax = weights, scores > HIDDEN
            self._why = "its softmax was not multiplied with values"

    def _multiplied(self, first, second=None, *_):
        weights, there = self._softmax
        if first.shape[-2:] != weights.shape[-2:] or first.numel() != weights.numel():
            return
        self._softmax, rows = None, rows_of(weights)
        some = weights[..., rows, :].float()
        if not _is_dropped(some, first.reshape(weights.shape)[..., rows, :].float()):
            self._why = "its weights are changed between the softmax and the values"
            return

        def made(shape):
            b = examples_of(shape, weights.shape[-2])
            shown = existing(by_heads(there, b, 4))
            value = by_heads(second, b, 4) if second is not None and second.ndim > 2 else None
            return Product(by_heads(some, b, 4), rows, weights.shape[-2], *shown, value)

        weights = torch.empty(0, *weights.shape[-2:], device="meta")  # their shape is kept alone
        self._made.append(made)


def rows_of(scores: Tensor) -> Tensor:
    """Which queries are measured of [..., n, m]."""
    n = scores.shape[-2]
    return torch.linspace(0, n - 1, min(n, ROWS), device=scores.device).long()


def examples_of(shape: Sequence[int], n: int) -> int:
    """How many examples tokens [b, n, d] or [n, b, d] are."""
    return shape[1] if len(shape) == 3 and shape[1] != n and shape[0] == n else shape[0]


def by_heads(a: Tensor, b: int, ndim: int) -> Tensor:
    """[b, h, ...] with so many axes, of [b · h, ...], [b, ...] or [b, w, h, ...]."""
    if a.ndim > ndim:
        return a.flatten(0, a.ndim - ndim)
    if a.ndim == ndim - 1:
        return a.unflatten(0, (b, -1)) if b and a.shape[0] % b == 0 else a[:, None]
    return a


def _is_dropped(weights, used):
    """Whether what met the values is the softmax's result, or that after dropout."""
    there = (used != 0) & (weights > 0.1 / weights.shape[-1])
    if not there.any():
        return True
    ratio = used[there] / weights[there]
    return bool(ratio.max() <= 1.03 * ratio.min())


def of_dot(
    shape: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Product:
    """Of `scaled_dot_product_attention` with queries [b, h, n, k] and keys [b, g, m, k]."""
    size = examples_of(shape, query.shape[-2])
    q, k, v = (by_heads(a, size, 4) for a in (query, key, value))
    (n, width), m = q.shape[-2:], k.shape[-2]
    rows = rows_of(q)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = 1 / math.sqrt(width) if scale is None else scale
    scores = scale * q[..., rows, :].float() @ k.float().mT
    keys = queries = None
    if is_causal:
        after = torch.arange(m, device=q.device) > rows[:, None]
        scores = scores.masked_fill(after, -math.inf)
    if attn_mask is not None:
        own = attn_mask[(None,) * (4 - attn_mask.ndim)]
        if query.ndim != 4:
            own = by_heads(attn_mask.expand(*query.shape[:-1], m), size, 4)
        keys, queries = existing(allowed(own))
        keys, queries = keys.expand(len(q), m), queries.expand(len(q), n)
        own = own.expand(-1, -1, n, -1)[..., rows, :]
        scores = scores + (torch.where(own, 0.0, -math.inf) if own.dtype == torch.bool else own)
    hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)
    return Product(weights, rows, n, keys, queries, v)


def of_heads(*args: Any, **kwargs: Any) -> Product:
    """Of `multi_head_attention_forward`, by itself with some of the queries and without dropout."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    padding, single = given.get("key_padding_mask"), query.ndim == 2
    n, m = query.shape[0], key.shape[0]
    rows = rows_of(query if single else query[:, 0])
    some = {"query": query[rows], "attn_mask": None if mask is None else mask[..., rows, :]}
    plainly = {"training": False, "need_weights": True, "average_attn_weights": False}
    _, p = functional.multi_head_attention_forward(
        **(given | some | plainly | {"is_causal": False})
    )
    p = p[None] if single else p
    b = len(p)
    there = torch.ones(b, 1, n, m, dtype=torch.bool, device=p.device)
    if mask is not None:
        own = mask if mask.ndim == 2 else mask.unflatten(0, (b, -1))
        there = there & (~own if own.dtype == torch.bool else allowed(own))
    if padding is not None:
        own = padding if padding.ndim == 2 else padding[None]
        there = there & (~own if own.dtype == torch.bool else allowed(own))[:, None, None]
    p = p.masked_fill(~there[..., rows, :].any(dim=-1, keepdim=True), 0.0)
    keys, queries = existing(there)
    return Product(
        p, rows, n, functional.pad(keys, (0, p.shape[-1] - m), value=True), queries, None
    )


def allowed(mask: Tensor) -> Tensor:
    """Bool, of a mask that is Bool, of whole numbers 0 and 1, or of floats added to scores."""
    if mask.dtype == torch.bool:
        return mask
    return mask > HIDDEN if mask.is_floating_point() else mask != 0


def existing(there: Tensor) -> tuple[Tensor, Tensor]:
    """(keys [b, m] that some query may attend to, queries [b, n] that may attend to some key).

    A token that may attend to others, while only itself may attend to it, is padding where the last
    of the others is attended to by one before it: attention there is not causal.

    Args:
        there: Bool [b, h, n, m], which key a query may attend to.
    """
    there = there.any(dim=1)
    keys, queries = there.any(dim=-2), there.any(dim=-1)
    if there.shape[-2] == there.shape[-1]:
        others = there & ~torch.eye(there.shape[-1], dtype=torch.bool, device=there.device)
        alone = others.any(dim=-1) & ~others.any(dim=-2)
        place = torch.arange(there.shape[-1], device=there.device)
        last = torch.where(keys & ~alone, place, 0).amax(dim=-1, keepdim=True)
        keys = keys & ~(alone & others.triu().any(dim=-2).gather(-1, last))
    return keys, queries
