"""Positions inside attention, and masks: which keys a query may attend to.

Rotary positions, the buckets of T5's bias, the relative terms of XLNet's scores.

Axis letters: h heads, n queries, m keys, d model width, k per-head query/key width.
"""

from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rank_collapse import struct

Position = Literal["none", "rotary", "relative_bias", "relative_key"]
POSITIONS = get_args(Position)


class PositionConfig(struct.Struct, kw_only=True):
    """Positions inside attention.

    Attributes:
        position: "none", "rotary", "relative_bias" (T5), "relative_key" (XLNet).
        rotary_theta, rotary_scaling, rotary_tables: See `rotary_angles`.
        rotary_width: Features of queries and keys that are rotated, the first; None for all.
        rotary_factor: Multiplies the rotated features of queries and keys (YaRN, LongRoPE).
        rotary_layers: Which layers have rotary positions, the others none; () for all (SmolLM3).
        local_theta: Base of the unscaled rotary frequencies in layers with a window; 0 for the same
            positions in all layers.
        num_buckets, max_distance: Of the position bias of "relative_bias".
        clamp_distance: Distances of "relative_key" are cut to ± this; 0 for not.
    """

    position: Position = struct.static("none")
    rotary_theta: float = struct.static(10000.0)
    rotary_scaling: tuple[float, ...] = struct.static(())
    rotary_tables: tuple[tuple[int, tuple[float, ...]], ...] = struct.static(())
    rotary_width: int | None = struct.static(None)
    rotary_factor: float = struct.static(1.0)
    rotary_layers: tuple[bool, ...] = struct.static(())
    local_theta: float = struct.static(0.0)
    num_buckets: int = struct.static(32)
    max_distance: int = struct.static(128)
    clamp_distance: int = struct.static(0)

    def __post_init__(self):
        struct.check_choices(self, position=POSITIONS)

    def check_rotary(self, qk_width: int) -> None:
        """Refuses rotary positions that do not fit the width of queries and keys.

        Raises:
            ValueError: They do not.
        """
        width = qk_width if self.rotary_width is None else self.rotary_width
        struct.refuse(
            (qk_width % 2, f"rotary positions need an even d_qk, not {qk_width}"),
            (
                width % 2 or not 0 < width <= qk_width,
                f"rotary_width={width} is not even and between 2 and {qk_width}",
            ),
            (
                len(self.rotary_scaling) not in (0, 1, 2, 4),
                f"rotary_scaling={self.rotary_scaling} has not 0, 1, 2 or 4 entries",
            ),
        )
        for _, frequencies in self.rotary_tables:
            struct.refuse_if(
                len(frequencies) != width // 2,
                f"rotary_tables has {len(frequencies)} frequencies for {width // 2} pairs",
            )


def rotary_angles(
    positions: Int[Array, "n"],
    width: int,
    theta: Any = 10000.0,
    scaling: tuple[float, ...] = (),
    tables: tuple[tuple[int, tuple[float, ...]], ...] = (),
) -> tuple[Float[Array, "n k"], Float[Array, "n k"]]:
    """(cos, sin) of the rotary angles position · theta^(-2i/k), repeated for both halves.

    Args:
        positions: Positions of the tokens [n].
        width: Per-head width k.
        theta: Base of the frequencies.
        scaling: () for none, (factor,) to divide every frequency, (factor, length) for a base
            that grows with the n tokens beyond length, theta (factor n/length − factor + 1)^p with
            p = k/(k − 2) ("dynamic NTK"), or (factor, low, high, length) as in Llama 3.1: waves
            longer than length/low are divided, those shorter than length/high kept, and between the
            two the share changes linearly.
        tables: Frequencies in place of all that, each with the most tokens it is for, the smallest
            first (LongRoPE, YaRN); the last serves for more.
    """
    if len(scaling) == 2:
        factor, length = scaling
        grown = factor * max(len(positions), length) / length - (factor - 1)
        theta = theta * grown ** (width / (width - 2))
    frequencies = theta ** (-jnp.arange(0, width, 2) / width)
    if tables:
        fitting = [table for most, table in tables if len(positions) <= most] or [tables[-1][1]]
        frequencies = jnp.asarray(fitting[0], frequencies.dtype)
    elif len(scaling) == 1:
        frequencies = frequencies / scaling[0]
    elif len(scaling) == 4:
        factor, low, high, length = scaling
        turns = length * frequencies / (2 * jnp.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = positions[:, None] * frequencies[None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def relative_buckets(
    num_queries: int, num_keys: int, num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "n m"]:
    """Bucket of each (query, key) distance for T5's position bias (Raffel et al. 2020, 2.1)."""
    distance = jnp.arange(num_keys)[None, :] - jnp.arange(num_queries)[:, None]
    offset = jnp.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(distance > 0, num_buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(max_distance / exact)
    coarse = exact + (ratio * (num_buckets - exact)).astype(distance.dtype)
    return offset + jnp.where(distance < exact, distance, jnp.minimum(coarse, num_buckets - 1))


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


class RelativeParams(struct.Struct):
    """Relative-position and segment terms of a score (Transformer-XL, XLNet).

    The position term is (x_i W_q + b_r)·(r_{i-j} W_r), the segment term
    (x_i W_q + b_s)·segment[different segments].
    """

    w_r: Any  # [h, d, k]
    b_r: Any  # [h, k]
    b_s: Any  # [h, k]
    segment: Any  # [2, h, k]: same segment, different segment


def rotate(x: Float[Array, "h n k"], rotary: tuple[Array, Array]) -> Float[Array, "h n k"]:
    """Rotary positions in the half-split layout (Su et al. 2021; as in Llama).

    Angles for fewer than k features leave those after them as they are (GPT-NeoX).
    """
    cos, sin = (t[None].astype(x.dtype) for t in rotary)
    if (width := cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :width], rotary)
        return jnp.concatenate([turned, x[..., width:]], axis=-1)
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


def relative_scores(
    params: RelativeParams, query_part: Float[Array, "h n k"], num_keys: int, context: Any
) -> Float[Array, "h n m"]:
    """Position and segment terms of the score of XLNet (Yang et al. 2019, section 2.3)."""
    n = query_part.shape[1]
    keys = jnp.einsum("pd,hdk->hpk", context.relative.astype(query_part.dtype), params.w_r)
    by_distance = jnp.einsum("hnk,hpk->hnp", query_part + params.b_r[:, None, :], keys)
    i, j = jnp.arange(n)[:, None], jnp.arange(num_keys)[None, :]
    index = jnp.broadcast_to((n - 1 - (i - j))[None], (by_distance.shape[0], n, num_keys))
    scores = jnp.take_along_axis(by_distance, index, axis=2)
    if context.segments is not None:
        per_kind = jnp.einsum("hnk,shk->shn", query_part + params.b_s[:, None, :], params.segment)
        differ = context.segments[:, None] != context.segments[None, :]
        scores = scores + jnp.where(differ[None], per_kind[1][:, :, None], per_kind[0][:, :, None])
    return scores
