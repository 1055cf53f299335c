"""Norms of the gradients of the projections to queries, keys and values of an attention.

Where one matrix projects to all three, its outputs are read as the one layout whose values are
those that the attention weighted; where none is, its gradients are left out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rank_collapse.torch.products import Product
from rank_collapse.torch.structure import QUERY, fused_of, owned
from rank_collapse.watch.names import PARTS

_NAMES = {**PARTS, "query": QUERY, "key": PARTS["key"] | {"linear_k", "k_linear"}}
_NAMES["value"] = PARTS["value"] | {"linear_v", "v_linear"}


def layout_of(outputs: Any, product: Product, turned: bool) -> Tensor | None:
    """Which output [w] is of queries (0), keys (1) or values (2); None if no layout fits.

    Args:
        outputs: Of the one projection, [b, n, w], or [n, b, w] where turned.
        product: With the values that were weighted.
    """
    value, b, n = product.value, len(product.weights), product.count
    if value is None or not isinstance(outputs, Tensor) or outputs.numel() % max(b * n, 1):
        return None
    outputs = (outputs.transpose(0, 1) if turned else outputs).reshape(b, n, -1)
    w = outputs.shape[-1]
    h, width = product.weights.shape[1], value.shape[-1]
    groups = w // width - h  # of keys and values, as many of each
    if w % width or groups < 2 or groups % 2 or h % (groups // 2):
        return None
    g = groups // 2
    side = torch.tensor([0] * h + [1] * g + [2] * g)
    turns = torch.tensor(([0] * (h // g) + [1, 2]) * g)
    value = value[:, :: value.shape[1] // g, -n:] if value.shape[1] % g == 0 else value
    for kinds in (side, turns):
        kinds = kinds.repeat_interleave(width)
        own = outputs[..., kinds == 2].unflatten(-1, (g, width)).transpose(1, 2)
        if own.shape == value.shape and torch.equal(own, value.to(own.dtype)):
            return kinds
    return None


def norms_of(attentions: Sequence[nn.Module], layouts: Any) -> tuple[dict[str, Tensor], str]:
    """({part: the norm of its gradient}, why a part is left out, or "").

    Args:
        attentions: What owns the projections; several where each is a head.
        layouts: {attention: see `layout_of`}.
    """
    squares: dict[str, list[Tensor]] = {part: [] for part in PARTS}
    why = ""
    for attention in attentions:
        parts = owned(attention)
        for name, own in parts.items():
            for part in (part for part, names in _NAMES.items() if name in names):
                squares[part] += [_of_outputs(p.grad, 0).sum() for p in _trained(own)]
        fused, layout = fused_of(attention), layouts.get(attention)
        if isinstance(attention, nn.MultiheadAttention):
            fused = parts.get("in_proj", [])
            layout = torch.arange(3).repeat_interleave(attention.embed_dim)
        for p in _trained(fused):
            axis = None if layout is None else _axis(p, len(layout), attention)
            if axis is None:
                why = "which part of the one projection is of queries, keys, values is not known"
                continue
            each = _of_outputs(p.grad, axis)
            for number, part in enumerate(PARTS):
                squares[part].append(each[(layout == number).to(each.device)].sum())
    found = {part: torch.stack(own).sum().sqrt() for part, own in squares.items() if own}
    missing = [part for part in PARTS if part not in found]
    return found, why or (f"no parameter of {', '.join(missing)} has one" if missing else "")


def _trained(parts):
    """The parameters with a gradient of modules and parameters."""
    every = [[p] if isinstance(p, Tensor) else p.parameters() for p in parts]
    return [p for own in every for p in own if p.grad is not None]


def _of_outputs(gradient, axis):
    """Sums of squares by index of an axis, [w]."""
    return gradient.float().square().movedim(axis, 0).reshape(gradient.shape[axis], -1).sum(dim=1)


def _axis(parameter, width, attention):
    """Which axis of a parameter has the outputs; None where that is not clear."""
    linear = any(isinstance(m, nn.Linear) and m.weight is parameter for m in attention.modules())
    fits = [i for i, size in enumerate(parameter.shape) if size == width]
    return 0 if linear and 0 in fits else fits[0] if len(fits) == 1 else None


def has_gradients(modules: Any) -> bool:
    """Whether a parameter of some modules has a gradient other than 0."""
    return any(bool(p.grad.any()) for module in modules for p in _trained([module]))
