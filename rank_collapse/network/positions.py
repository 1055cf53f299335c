"""Positions inside attention, and masks: which keys a query may attend to.

Rotary positions, the buckets of T5's bias, the relative terms of XLNet's scores.

Axis letters: h heads, n queries, m keys, d model width, k per-head query/key width.
"""

from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rank_collapse import checks, struct
from rank_collapse.annotations import Leaf, Number

Position = Literal["none", "rotary", "relative_bias", "relative_key"]
POSITIONS = get_args(Position)


class PositionConfig(struct.Struct, kw_only=True):
    """Positions inside attention.

    Attributes:
        position: "none", "rotary", "relative_bias" (T5), "relative_key" (XLNet).
        rotary_theta, rotary_scaling, rotary_tables: See `rotary_angles`.
        rotary_width: Number of features of queries and keys that are rotated, from the first; None
            for all.
        rotary_factor: Multiplies the rotated features of queries and keys (YaRN, LongRoPE).
        rotary_layers: Whether each layer has rotary positions; () for all layers (SmolLM3).
        local_theta: Base of the unscaled rotary frequencies in layers with a window; 0 for the same
            positions in all layers.
        num_buckets, max_distance: Size of the position bias "relative_bias": its buckets, and the
            distance at which the last one begins.
        clamp_distance: Distances of "relative_key" are cut to ± this number; 0 for no cut.
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
        checks.check_choices(self, position=POSITIONS)

    def check_rotary(self, qk_width: int) -> None:
        """Check that rotary positions fit the width of queries and keys.

        Raises:
            ValueError: Rotary positions do not fit the width.
        """
        width = qk_width if self.rotary_width is None else self.rotary_width
        if qk_width % 2:
            raise ValueError(f"rotary positions need an even d_qk, not {qk_width}")
        if width % 2 or not 0 < width <= qk_width:
            raise ValueError(f"rotary_width={width} is not even and between 2 and {qk_width}")
        if len(self.rotary_scaling) not in (0, 1, 2, 4):
            raise ValueError(f"rotary_scaling={self.rotary_scaling} must have 0, 1, 2 or 4 entries")
        for table in self.rotary_tables:
            if not (isinstance(table, tuple) and len(table) == 2):
                raise ValueError(
                    f"rotary_tables={self.rotary_tables!r} are not pairs (tokens, frequencies)"
                )
            _, frequencies = table
            if len(frequencies) != width // 2:
                raise ValueError(
                    f"rotary_tables has {len(frequencies)} frequencies for {width // 2} pairs"
                )


def rotary_angles(
    positions: Int[Array, "n"],
    width: int,
    theta: Number = 10000.0,
    scaling: tuple[float, ...] = (),
    tables: tuple[tuple[int, tuple[float, ...]], ...] = (),
) -> tuple[Float[Array, "n k"], Float[Array, "n k"]]:
    """Compute (cos, sin) of rotary angles position · theta^(-2i/k), repeated for both halves.

    Args:
        positions: Positions of the tokens [n].
        width: Per-head width k.
        theta: Base of the frequencies.
        scaling: () for none. (factor,) divides every frequency. (factor, length) lets the base grow
            with the n tokens beyond length, theta (factor n/length − factor + 1)^p with p = k/(k −
            2) ("dynamic NTK"). (factor, low, high, length) as in Llama 3.1: the frequencies of
            waves longer than length/low are divided, those of waves shorter than length/high are
            not, and between the two the share changes linearly.
        tables: Frequencies that replace theta and scaling (LongRoPE, YaRN), each with the largest
            number of tokens for which it is used, the smallest first; the last is used beyond.
    """
    if len(scaling) == 2:
        factor, length = scaling
        growth = factor * max(len(positions), length) / length - (factor - 1)
        theta = theta * growth ** (width / (width - 2))
    frequencies = theta ** (-jnp.arange(0, width, 2) / width)
    if tables:
        fitting = [table for max_tokens, table in tables if len(positions) <= max_tokens]
        table = fitting[0] if fitting else tables[-1][1]
        frequencies = jnp.asarray(table, frequencies.dtype)
    elif len(scaling) == 1:
        frequencies = frequencies / scaling[0]
    elif len(scaling) == 4:
        factor, low, high, length = scaling
        turns = length * frequencies / (2 * jnp.pi)
        fraction = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (fraction + (1 - fraction) / factor)
    angles = positions[:, None] * frequencies[None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def relative_buckets(
    num_queries: int, num_keys: int, num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "n m"]:
    """Compute the bucket of each (query, key) distance for T5's position bias.

    Half of the buckets hold one distance each; the others grow with its logarithm.

    Args:
        num_queries, num_keys: n and m.
        num_buckets: Number of buckets in both directions together.
        max_distance: Distance from which all distances share the last bucket.
        bidirectional: Whether keys after the query have different buckets from keys before it.

    Returns:
        [n, m].

    Source: Raffel et al. 2020, section 2.1.
    """
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
    """Allow each token to attend to itself and to earlier tokens."""
    i = jnp.arange(num_tokens)
    return i[:, None] >= i[None, :]


def local_mask(num_tokens: int, window: int) -> Bool[Array, "n n"]:
    """Allow each token to attend to tokens at most `window` positions away, on both sides.

    Args:
        num_tokens: n.
        window: The largest distance.
    """
    i = jnp.arange(num_tokens)
    return jnp.abs(i[:, None] - i[None, :]) <= window


def combine_masks(*masks: object) -> Leaf | None:
    """Combine the masks that are not None by logical and; None where there is none.

    The result has the largest rank of the masks, at least 2.

    Args:
        *masks: Bool [m] (padding: the keys that exist), [n, m] or [h, n, m]; or None.
    """
    masks = [m[None, :] if m.ndim == 1 else m for m in masks if m is not None]
    if not masks:
        return None
    rank = max(m.ndim for m in masks)
    combined, *others = (m.reshape((1,) * (rank - m.ndim) + m.shape) for m in masks)
    for m in others:
        combined = combined & m
    return combined


class RelativeParams(struct.Struct):
    """Relative-position and segment terms of a score (Transformer-XL, XLNet).

    The position term is (x_i W_q + b_r)·(r_{i-j} W_r), the segment term
    (x_i W_q + b_s)·segment[different segments].

    Attributes:
        w_r, b_r: [h, d, k] and [h, k], of the position term.
        b_s: [h, k], of the segment term.
        segment: [2, h, k]: same segment, different segment.
    """

    w_r: Leaf
    b_r: Leaf
    b_s: Leaf
    segment: Leaf


def rotate(x: Float[Array, "h n k"], rotary: tuple[Array, Array]) -> Float[Array, "h n k"]:
    """Apply rotary positions in the half-split layout (Su et al. 2021; as in Llama).

    If the angles cover fewer than k features, later features do not change (GPT-NeoX).

    Args:
        x: Queries or keys.
        rotary: (cos, sin), each [n, k] or of fewer features.
    """
    cos, sin = (t[None].astype(x.dtype) for t in rotary)
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], rotary), x[..., width:]], axis=-1)
    a, b = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-b, a], axis=-1) * sin


def relative_scores(
    params: RelativeParams, query_part: Float[Array, "h n k"], num_keys: int, context: Any
) -> Float[Array, "h n m"]:
    """Compute the position and segment terms of XLNet's scores (Yang et al. 2019, section 2.3).

    Args:
        params: Parameters of these terms.
        query_part: x W_q without bias [h, n, k].
        num_keys: m.
        context: `AttentionContext` with `relative` and `segments`.
    """
    n = query_part.shape[1]
    keys = jnp.einsum("pd,hdk->hpk", context.relative.astype(query_part.dtype), params.w_r)
    distance_scores = jnp.einsum("hnk,hpk->hnp", query_part + params.b_r[:, None, :], keys)
    i, j = jnp.arange(n)[:, None], jnp.arange(num_keys)[None, :]
    index = jnp.broadcast_to((n - 1 - (i - j))[None], (distance_scores.shape[0], n, num_keys))
    scores = jnp.take_along_axis(distance_scores, index, axis=2)
    if context.segments is not None:
        same, different = jnp.einsum(
            "hnk,shk->shn", query_part + params.b_s[:, None, :], params.segment
        )
        differ = context.segments[:, None] != context.segments[None, :]
        scores = scores + jnp.where(differ[None], different[:, :, None], same[:, :, None])
    return scores
