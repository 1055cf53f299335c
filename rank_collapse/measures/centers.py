"""The common token x of a residual X − 1xᵀ: mean, median, midrange."""

from typing import Any, Literal, get_args

from rank_collapse import struct
from rank_collapse.measures.arrays import namespace
from rank_collapse.measures.norms import exact_sum, num_tokens, safe_divide

Center = Literal["mean", "median", "midrange"]
CENTERS = get_args(Center)


def compute_center(x: Any, mask: Any, center: Center) -> Any:
    """Compute the common token [..., d] that `residuals.residual` takes away.

    Args:
        x, mask: As `as_tokens` makes them.
        center: "mean", "median" or "midrange", of each feature.

    Raises:
        ValueError: Unknown center.
    """
    struct.refuse_if(center not in CENTERS, f"center={center!r} is not one of {CENTERS}")
    xp = namespace(x)
    if center == "mean":
        return safe_divide(exact_sum(x, -2), num_tokens(x, mask)[..., None])
    exists = xp.ones_like(x, dtype=xp.bool) if mask is None else mask[..., None]
    if center == "midrange":
        low = xp.min(xp.where(exists, x, xp.inf), axis=-2)
        high = xp.max(xp.where(exists, x, -xp.inf), axis=-2)
        return low / 2 + high / 2
    return masked_median(xp.where(exists, x, xp.inf), num_tokens(x, mask)[..., None])[..., 0, :]


def masked_median(x: Any, count: Any) -> Any:
    """Compute the median along the axis before the last, which is kept.

    Args:
        x: Values [..., n, d]; those that do not exist are infinite.
        count: How many exist, [..., 1].
    """
    xp = namespace(x)
    rows, count = xp.sort(x, axis=-2), xp.astype(count, xp.arange(0).dtype)[..., None]
    shape = (*x.shape[:-2], 1, x.shape[-1])
    low, high = (
        xp.take_along_axis(rows, xp.broadcast_to(i, shape), axis=-2)
        for i in ((count - 1) // 2, count // 2)
    )
    return low / 2 + high / 2
