"""The common token x of a residual X − 1xᵀ: mean, median, midrange."""

from typing import Any, Literal, get_args

from rank_collapse import struct
from rank_collapse.measures.arrays import namespace
from rank_collapse.measures.norms import divide, num_tokens, total

Center = Literal["mean", "median", "midrange"]
CENTERS = get_args(Center)


def center_of(x: Any, mask: Any, center: Center) -> Any:
    """The common token [..., d] that `residuals.residual` takes away, of what `as_tokens` made.

    Raises:
        ValueError: Unknown center.
    """
    struct.refuse_if(center not in CENTERS, f"center={center!r} is not one of {CENTERS}")
    xp = namespace(x)
    if center == "mean":
        return divide(total(x, -2), num_tokens(x, mask)[..., None])
    there = xp.ones_like(x, dtype=xp.bool) if mask is None else mask[..., None]
    if center == "midrange":
        low = xp.min(xp.where(there, x, xp.inf), axis=-2)
        high = xp.max(xp.where(there, x, -xp.inf), axis=-2)
        return low / 2 + high / 2
    return median(xp.where(there, x, xp.inf), num_tokens(x, mask)[..., None])[..., 0, :]


def median(x: Any, count: Any) -> Any:
    """The median along the axis before the last, kept, of its `count` smallest values [..., 1]."""
    xp = namespace(x)
    rows, count = xp.sort(x, axis=-2), xp.astype(count, xp.arange(0).dtype)[..., None]
    shape = (*x.shape[:-2], 1, x.shape[-1])
    low, high = (
        xp.take_along_axis(rows, xp.broadcast_to(i, shape), axis=-2)
        for i in ((count - 1) // 2, count // 2)
    )
    return low / 2 + high / 2
