"""Lists of tokens rather than numbers: massive activations, and tokens that are equal."""

from typing import Any, NamedTuple

import numpy as np

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import check_numbers, refuse_if
from rank_collapse.measures.arrays import as_bools, as_floats, on_host
from rank_collapse.printed import format_count


class Spike(NamedTuple):
    """One entry of the states that is far above the others of its layer.

    Attributes:
        layer: Index l of X^l, 0 for the input.
        token, feature: Indices of the entry.
        value: X^l at token and feature.
        ratio: |value| in medians of |X^l|.
    """

    layer: int
    token: int
    feature: int
    value: float
    ratio: float


def spikes(
    trace: Any, *, mask: AnyArray | None = None, threshold: float = 1000.0, layer_share: float = 0.5
) -> list[Spike]:
    """List massive activations: entries above `threshold` medians in enough layers.

    An entry is a token and a feature. It is listed in each layer where |x_ij| exceeds `threshold`
    times the median of |X^l|, if that holds in at least `layer_share` of the layers 0 .. L.

    Args:
        trace: One example's pass, from `apply`, or its states [L + 1, n, d] of any framework, or a
            list or tuple of states [n, d] or [1, n, d], such as `hidden_states` of transformers.
        mask: Bool [n] or [1, n], True for tokens that are not padding; None for all.
        threshold: Threshold in medians of the layer.
        layer_share: Share of the layers, in [0, 1]; 0 lists entries that stand out in a single
            layer.

    Returns:
        Spikes by falling ratio.

    Raises:
        ValueError: States with other axes, of several examples, or not finite; a mask that does not
            fit; or a threshold or share outside its range.

    Source: Sun et al. 2024, Massive activations in large language models, section 2.
    """
    check_numbers("[0, inf]", threshold=threshold)
    check_numbers("[0, 1]", layer_share=layer_share)
    states = np.asarray(on_host(as_floats(getattr(trace, "hidden", trace))))
    if isinstance(trace, list | tuple) and states.ndim == 4 and states.shape[1] == 1:
        states = states[:, 0]
    refuse_if(
        states.ndim == 4,
        f"states of shape {states.shape} hold several examples: pass one, such as "
        "[layer[0] for layer in states]",
    )
    if states.ndim != 3:
        raise ValueError(f"states of shape {states.shape} are not [layers, tokens, features]")
    is_token = _check_mask(mask, states.shape[1])
    _refuse_infinite(states[:, is_token])
    sizes = np.abs(states[:, is_token])
    medians = np.median(sizes, axis=(1, 2))
    ratios = np.divide(
        sizes, medians[:, None, None], out=np.zeros_like(sizes), where=medians[:, None, None] > 0
    )
    exceeds = ratios > threshold
    is_frequent = exceeds.mean(axis=0) >= layer_share
    tokens = np.flatnonzero(is_token)
    listed = [
        Spike(
            int(layer),
            int(tokens[row]),
            int(feature),
            float(states[layer, tokens[row], feature]),
            float(ratios[layer, row, feature]),
        )
        for layer, row, feature in np.argwhere(exceeds & is_frequent)
    ]
    return sorted(listed, key=lambda spike: -spike.ratio)


def duplicates(
    x: AnyArray, *, mask: AnyArray | None = None, tolerance: float | None = None
) -> list[list[int]]:
    """List groups of tokens that are equal to rounding.

    Equal tokens stay equal in every layer without positions or a mask that tells them apart. So a
    network whose input has them begins collapsed.

    Args:
        x: Tokens [n, d] or [1, n, d] of any framework.
        mask: Bool [n] or [1, n], True for tokens that are not padding; None for all.
        tolerance: Largest |x_i − x_j| / |x_i| of equal tokens; 8 roundings of the dtype by default.

    Returns:
        Groups of two or more indices, each group and the list in rising order; tokens that are not
        finite are in none.

    Raises:
        ValueError: An array of other axes, a mask that does not fit, or a tolerance below 0.
    """
    x = np.asarray(on_host(as_floats(x)))
    x = x[0] if x.ndim == 3 and len(x) == 1 else x
    if x.ndim != 2:
        raise ValueError(f"x of shape {x.shape} is not [tokens, features]")
    tolerance = 8 * float(np.finfo(x.dtype).eps) if tolerance is None else tolerance
    check_numbers("[0, inf]", tolerance=tolerance)
    remaining = np.flatnonzero(_check_mask(mask, len(x)))
    groups = []
    while len(remaining):
        token = x[remaining[0]]
        largest = np.abs(token).max(initial=0)
        scale = largest if 0 < largest < np.inf else 1
        with np.errstate(over="ignore", invalid="ignore"):  # such tokens are equal to none
            distances = _compute_lengths((x[remaining] - token) / scale)
            is_equal = distances <= tolerance * np.linalg.norm(token / scale)
            is_equal &= np.isfinite(distances)
        is_equal[0] = True
        if is_equal.sum() > 1:
            groups.append(remaining[is_equal].tolist())
        remaining = remaining[~is_equal]
    return groups


def _compute_lengths(x):
    """Compute |x_i| of tokens [..., d], whose squares may overflow or underflow."""
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = np.where(largest > 0, largest, 1)
    return scale[..., 0] * np.linalg.norm(x / scale, axis=-1)


def _refuse_infinite(x):
    num_bad = x.size - int(np.isfinite(x).sum())
    refuse_if(num_bad > 0, f"{num_bad} values of states are not finite: exclude these with mask=")


def _check_mask(mask, num_tokens):
    """Return a mask as Bool [n] of NumPy.

    Raises:
        ValueError: A mask of another shape, or no mask: see `as_bools`.
    """
    if mask is None:
        return np.ones(num_tokens, bool)
    mask = np.asarray(on_host(as_bools(mask)))
    mask = mask[0] if mask.ndim == 2 and len(mask) == 1 else mask
    if mask.shape != (num_tokens,):
        raise ValueError(
            f"mask of shape {mask.shape} does not fit {format_count(num_tokens, 'token')}"
        )
    return mask
