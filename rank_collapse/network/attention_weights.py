"""From scores to the weights that mix values: the context of all layers, softmax under a mask,
mixing.

Axis letters: n queries, m keys, h heads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, DType, Leaf, Number
from rank_collapse.network.attention_config import Mixing
from rank_collapse.network.positions import combine_masks

ANY_DISTANCE = 2**30  # the window of a layer that has none


class AttentionContext(struct.Struct):
    """Inputs that every layer of a stack shares: mask, additive bias, positions and the cap of
    scores.

    Attributes:
        mask: Bool [n, m] or [h, n, m], True where a query may attend to a key; None for all.
        bias: Float [h, n, m] added to the scores after scaling; None for none.
        rotary: Pair (cos, sin), each [n, k], of rotary positions; None for none.
        relative: Float [n + m - 1, d] encodings of the distances n-1 .. -(m-1); None for none.
        segments: Int [n] segment of each token, for the segment term; None for none.
        cap: c of c·tanh(scores/c); None for none.
        distance: Int [n, m] |i − j|, where layers attend to different distances; None elsewhere.
        local_rotary: The rotary positions of layers with a window; None if all layers have the
            same.
        layer: Index of the layer, where `normalise` or `mix` is the caller's function.
        head: Index of the head, where a single head is computed; None for all.
        sizes: (L, H) of the network, where `layer` is an index; None elsewhere.
    """

    mask: Leaf | None = None
    bias: Leaf | None = None
    rotary: tuple[Leaf, Leaf] | None = None
    relative: Leaf | None = None
    segments: Leaf | None = None
    cap: Number | None = None
    distance: Leaf | None = None
    local_rotary: tuple[Leaf, Leaf] | None = None
    layer: Leaf | None = None
    head: Leaf | None = None
    sizes: tuple[int, int] | None = struct.static(None)

    def broadcast_to_heads(self, value: object, num_heads: int) -> Leaf:
        """Broadcast this layer's part of a number, [L] or [L, H] to [h, 1, 1].

        Args:
            value: A number, [L] or [L, H].
            num_heads: h.

        Raises:
            ValueError: An array of another shape, whose missing layers JAX would read as the last
                one.
        """
        value = jnp.asarray(value)
        if self.sizes is not None and value.shape not in ((), self.sizes[:1], self.sizes):
            raise ValueError(
                f"value of shape {value.shape} is not a number, {self.sizes[:1]} or {self.sizes}"
            )
        if value.ndim:
            value = value[0 if self.layer is None else self.layer]
        if value.ndim and self.head is not None:
            value = value[self.head]
        return jnp.broadcast_to(value, (num_heads,))[:, None, None]

    def for_layer(self, window: ArrayLike, rotated: ArrayLike | None = None) -> "AttentionContext":
        """Return the context of one layer, whose attention may have a window or no rotary
        positions.

        Args:
            window: Int, the largest distance between a query and its keys in this layer,
                `ANY_DISTANCE` for any; traced. None where no layer has a window.
            rotated: Bool, whether the layer has rotary positions; None where all layers have them.
        """
        mask, rotary = self.mask, self.rotary
        if window is not None:
            near = self.distance <= window
            if mask is not None and mask.ndim > near.ndim:  # a mask of each head
                near = near[..., None, :, :]
            mask = combine_masks(mask, near)
            if self.local_rotary is not None:
                is_local = window < ANY_DISTANCE
                pairs = zip(self.local_rotary, rotary, strict=True)
                rotary = tuple(jnp.where(is_local, local, distant) for local, distant in pairs)
        if rotated is not None and rotary is not None:
            cos, sin = rotary
            rotary = jnp.where(rotated, cos, 1), jnp.where(rotated, sin, 0)
        return self.replace(mask=mask, rotary=rotary)


def softmax(scores: Float[Array, "*s m"], mask: ArrayLike | None = None) -> Float[Array, "*s m"]:
    """Compute the softmax of each row over the allowed keys, in at least float32.

    A row with no allowed key gets uniform weights, so that padding rows stay finite.

    Args:
        scores: Array with any leading axes; the keys are on the last axis.
        mask: Bool, True for keys that are allowed; of fewer leading axes, or None for all.

    Returns:
        Weights of the scores' dtype.
    """
    dtype = scores.dtype
    scores = scores.astype(jnp.promote_types(dtype, jnp.float32))
    if mask is not None:
        mask = mask.reshape((1,) * (scores.ndim - mask.ndim) + mask.shape)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jax.nn.softmax(scores, axis=-1).astype(dtype)


def equal_weights(context: AttentionContext, n: int, m: int, dtype: DType) -> Float[Array, "h n m"]:
    """Compute the softmax weights [h or 1, n, m] of equal tokens without position terms.

    All products are then one number, so the bias and the mask alone decide.

    Args:
        context: Context with the bias and the mask.
        n, m: Queries and keys.
        dtype: Number format of the weights where there is no bias.
    """
    scores = jnp.zeros((1, n, m), dtype) if context.bias is None else context.bias
    return softmax(scores, context.mask)


def attention_weights(
    scores: Float[Array, "h n m"], context: AttentionContext, normalise: Callable | None = None
) -> Float[Array, "h n m"]:
    """Compute P of scores: their softmax, or the result of `AttentionConfig.normalise`.

    Args:
        scores: Scores before the mask.
        context: Context with the mask.
        normalise: The caller's function, None for softmax.

    Raises:
        ValueError: `normalise` gave weights of another shape.
    """
    if normalise is None:
        return softmax(scores, context.mask)
    weights = normalise(scores, context)
    shape = getattr(weights, "shape", type(weights).__name__)
    if shape != scores.shape:
        raise ValueError(f"normalise returned shape {shape} for scores of shape {scores.shape}")
    return weights.astype(scores.dtype)


def mixing_matrix(
    weights: Float[Array, "h n m"], mixing: Mixing | None, mask: ArrayLike | None = None
) -> Float[Array, "h n m"]:
    """Compute M = α I + β P + γ C, `Mixing` with leaves [h]; P itself where it is None.

    Args:
        weights: P.
        mixing: α, β and γ of each head.
        mask: Mask of the weights, for C.

    Raises:
        ValueError: Queries and keys that are different tokens.
    """
    if mixing is None:
        return weights
    h, n, m = weights.shape
    if n != m:
        raise ValueError(
            f"mixing needs equal numbers of keys and queries, not weights of shape {weights.shape}"
        )
    uniform = softmax(jnp.zeros((1, n, m), weights.dtype), mask)

    def per_head(gain):
        return jnp.broadcast_to(jnp.asarray(gain, weights.dtype), (h,))[:, None, None]

    return (
        per_head(mixing.identity) * jnp.eye(n, dtype=weights.dtype)[None]
        + per_head(mixing.weights) * weights
        + per_head(mixing.uniform) * uniform
    )
