"""Attention for one example: scores, masks, softmax weights, multi-head self- and cross-attention.

Axis letters: n queries, m keys, d model width, h heads, g groups of heads that share keys and
values, k per-head query/key width, v per-head value width.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import checks, struct
from rank_collapse.annotations import ArrayLike, Key, Leaf, Number
from rank_collapse.network.attention_config import SCORES, Mixing, Score
from rank_collapse.network.attention_weights import (
    AttentionContext,
    attention_weights,
    mixing_matrix,
)
from rank_collapse.network.dropout import dropout
from rank_collapse.network.edits import EditPoints
from rank_collapse.network.positions import RelativeParams, combine_masks, relative_scores, rotate

EDIT_POINTS = ("q", "k", "v", "scores", "weights", "head_output")


class AttentionParams(struct.Struct):
    """Parameters of multi-head attention, one head per leading index.

    P_h = softmax((x W_q + b_q)(y W_k + b_k)ᵀ / √k),  SA(x) = Σ_h P_h (y W_v + b_v) W_o + b_o.
    A stack of layers carries one more leading axis. Biases may be None. Keys and values may be
    grouped: g of them, where g divides h; head i reads group i // (h / g).

    Attributes:
        w_q, b_q: [h, d, k] and [h, k], of the queries.
        w_k, b_k: [h or g, d, k] and [h or g, k], of the keys.
        w_v, b_v: [h or g, d, v] and [h or g, v], of the values.
        w_o, b_o: [h, v, d] and [d], of the output.
        v_score: [h, k], of additive attention; None for dot products.
        relative: Terms of relative positions; None without these.
        q_norm: Gain of the RMSNorm of the queries: [k], of each head, or [h, k], of all at once;
            None for no norm.
        k_norm: The same of the keys: [k] or [h or g, k].
    """

    w_q: Leaf
    b_q: Leaf | None = struct.field(default=None, kw_only=True)
    w_k: Leaf
    b_k: Leaf | None = struct.field(default=None, kw_only=True)
    w_v: Leaf
    b_v: Leaf | None = struct.field(default=None, kw_only=True)
    w_o: Leaf
    b_o: Leaf | None = struct.field(default=None, kw_only=True)
    v_score: Leaf | None = None
    relative: RelativeParams | None = None
    q_norm: Leaf | None = None
    k_norm: Leaf | None = None


def repeat_groups(params: AttentionParams) -> AttentionParams:
    """Copy grouped keys and values (Ainslie et al. 2023) for every head; others stay."""
    num_heads = params.w_q.shape[-3]

    def repeat_axis(a, axis):
        if a is None or a.shape[axis] == num_heads:
            return a
        return jnp.repeat(a, num_heads // a.shape[axis], axis=axis, total_repeat_length=num_heads)

    k_norm = params.k_norm
    if k_norm is not None and k_norm.ndim == params.w_k.ndim - 1:  # over all heads at once
        k_norm = repeat_axis(k_norm, -2)
    return params.replace(
        w_k=repeat_axis(params.w_k, -3),
        b_k=repeat_axis(params.b_k, -2),
        w_v=repeat_axis(params.w_v, -3),
        b_v=repeat_axis(params.b_v, -2),
        k_norm=k_norm,
    )


def project_heads(
    x: Float[Array, "n d"], w: Float[Array, "h d k"], b: Float[Array, "h k"] | None
) -> Float[Array, "h n k"]:
    """Compute x W_h + 1 b_hᵀ for every head; without bias where it is None.

    Args:
        x: Tokens.
        w, b: Weights and biases of every head.
    """
    y = jnp.einsum("nd,hdk->hnk", x, w)
    return y if b is None else y + b[:, None, :]


def head_norm(
    gain: Float[Array, "k"] | Float[Array, "h k"] | None, x: Float[Array, "h n k"], eps: Number
) -> Float[Array, "h n k"]:
    """Apply RMSNorm to queries or keys, in each head (gain [k]) or over all heads ([h, k]).

    Args:
        gain: [k] or [h, k]; None for no norm, which returns x.
        x: Queries or keys.
        eps: Added to the mean square.

    Source: Henry et al. 2020 (QK-norm), with RMSNorm as in Qwen3, Gemma 3 and OLMo 2.
    """
    if gain is None:
        return x
    axes = (-1,) if gain.ndim == 1 else (0, -1)
    square = jnp.mean(jnp.square(x), axis=axes, keepdims=True)  # [h, n, 1] or [1, n, 1]
    gain = gain.reshape(-1, 1, gain.shape[-1])  # [1 or h, 1, k]
    return x * jax.lax.rsqrt(square + jnp.asarray(eps, x.dtype)) * gain


@jax.custom_jvp
def matrix_product(a: Float[Array, "h n k"], b: Float[Array, "h k m"]) -> Float[Array, "h n m"]:
    """Compute a b, with a gradient that XLA's CPU backend computes fast.

    The gradient of b is aᵀ g. On a CPU many small products with a transposed left factor take four
    times as long as with a copy of the transposed factor. The barrier forces that copy.
    """
    return a @ b


@matrix_product.defjvp
def _differentiate_product(primals, tangents):
    """Compute the derivative of a b; the barrier keeps the transposed factor as a copy."""
    (a, b), (da, db) = primals, tangents
    transposed = jax.lax.optimization_barrier(_transpose(db) @ _transpose(a))
    return a @ b, da @ b + _transpose(transposed)


def _transpose(x):
    return jnp.swapaxes(x, -1, -2)


def attention_scores(
    params: AttentionParams,
    x: Float[Array, "n d"],
    y: Float[Array, "m e"],
    *,
    score: Score = "dot",
    scale: bool = True,
    norm_eps: float = 1e-12,
    temperature: Number = 1.0,
    context: AttentionContext | None = None,
    edit: Callable[[str, Array], Array] | None = None,
) -> Float[Array, "h n m"]:
    """Compute attention scores before the mask and the softmax, biases included.

    Dot product: (x W_q + b_q)(y W_k + b_k)ᵀ / (√k · temperature), without √k when `scale` is
    False. Additive (Bahdanau et al. 2015): v·tanh(x W_q + b_q + y W_k + b_k) / temperature.
    Where the context has a cap c, c·tanh(scores/c) takes their place, before biases.

    Args:
        params: Parameters of the attention.
        x: Queries' tokens [n, d].
        y: Keys' tokens [m, d], the same array for self-attention.
        score: "dot" or "additive".
        scale: Whether dot products are divided by √k.
        norm_eps: ε in the norm of queries and keys, where the parameters have one.
        temperature: Further divisor of the scores.
        context: Bias, cap and position terms.
        edit: (name, value) -> value, for the queries "q" and keys "k" [h, n, k] in the product.

    Raises:
        ValueError: An unknown score.
    """
    context = AttentionContext() if context is None else context
    checks.check_choice(f"score={score!r}", score, SCORES)
    q, k, raw_q = _queries_keys(params, x, y, context, norm_eps, edit)
    if score == "additive":
        pairs = jnp.tanh(q[:, :, None, :] + k[:, None, :, :])  # [h, n, m, k]
        scores = jnp.einsum("hnmk,hk->hnm", pairs, params.v_score)  # [h, n, m]
    else:
        scores = matrix_product(q, k.swapaxes(1, 2))  # [h, n, m]
        if params.relative is not None and context.relative is not None:
            scores = scores + relative_scores(params.relative, raw_q, k.shape[1], context)
        if scale:
            scores = scores / jnp.sqrt(q.shape[-1]).astype(scores.dtype)
    scores = scores / jnp.asarray(temperature, scores.dtype)
    if context.cap is not None:
        cap = jnp.asarray(context.cap, scores.dtype)
        scores = cap * jnp.tanh(scores / cap)
    return scores if context.bias is None else scores + context.bias.astype(scores.dtype)


def _queries_keys(params, x, y, context, norm_eps, edit):
    """Compute queries and keys as their product takes them, and the queries x W_q alone.

    Bias, norm, rotary positions and the edit are applied in this order.

    Args:
        params, x, y, context, norm_eps, edit: See `attention_scores`.

    Returns:
        (queries, keys, x W_q), each [h, tokens, k]; the last has neither bias nor norm.
    """
    raw_q = project_heads(x, params.w_q, None)  # [h, n, k]
    q = raw_q if params.b_q is None else raw_q + params.b_q[:, None, :]
    q = head_norm(params.q_norm, q, norm_eps)
    k = head_norm(params.k_norm, project_heads(y, params.w_k, params.b_k), norm_eps)
    if context.rotary is not None:
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
    if edit is not None:
        q, k = edit("q", q), edit("k", k)
    return q, k, raw_q


def multi_head_attention(
    params: AttentionParams,
    x: Float[Array, "n d"],
    y: Float[Array, "m e"],
    *,
    score: Score = "dot",
    scale: bool = True,
    norm_eps: float = 1e-12,
    temperature: Number = 1.0,
    context: AttentionContext | None = None,
    normalise: Callable | None = None,
    mixing: Mixing | None = None,
    mix: Callable | None = None,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
    edit: EditPoints | Mapping[str, Callable] | None = None,
) -> tuple[Float[Array, "n d"], Float[Array, "h n m"]]:
    """Compute SA(x) = Σ_h P_h y W_h + 1bᵀ with W_h = W_v W_o (Dong et al. 2021, section 2).

    Self-attention takes the same tokens twice; cross-attention takes queries x and memory y.

    Args:
        params: Parameters of the attention.
        x: Query tokens [n, d].
        y: Key and value tokens [m, d].
        score, scale, norm_eps, temperature, context: See `attention_scores`; the context holds
            the mask.
        normalise: Replaces softmax: see `AttentionConfig`.
        mixing: Replaces the weights by a mixture: `mixing_matrix`.
        mix: Replaces scores and weights: see `AttentionConfig`.
        dropout_key: Key for dropout on the weights; None for none.
        dropout_rate: Probability that a weight is dropped.
        edit: {name: function(value, layer) -> value} of "q", "k", "v", "scores" (before mask and
            softmax), "weights" and "head_output", see `edits.edit_point_shapes`; the layer is 0.
            Weights that the mask excludes stay 0.

    Returns:
        The output [n, d], and the matrix that mixes the values [h, n, m], before dropout: the
        weights P, or M.

    Raises:
        ValueError: More than one example; or weights that are edited or dropped where `mix` gives
            the full output.
    """
    for name, tokens in (("x", x), ("y", y)):
        if jnp.ndim(tokens) != 2:
            raise ValueError(
                f"{name} of shape {jnp.shape(tokens)} is not [tokens, d]; use jax.vmap for a batch"
            )
    if not isinstance(edit, EditPoints):
        for name in edit or ():
            checks.check_choice(f"edit point {name!r}", name, EDIT_POINTS, " of attention")
        edit = EditPoints(edit)
    params = repeat_groups(params)
    context = AttentionContext() if context is None else context
    mixed = None
    if mix is None:
        scores = attention_scores(
            params,
            x,
            y,
            score=score,
            scale=scale,
            norm_eps=norm_eps,
            temperature=temperature,
            context=context,
            edit=edit,
        )
        weights = attention_weights(edit("scores", scores), context, normalise)
        weights = mixing_matrix(weights, mixing, context.mask)
        v = edit("v", project_heads(y, params.w_v, params.b_v))  # [h, m, v]
    else:
        q, k, _ = _queries_keys(params, x, y, context, norm_eps, edit)
        v = edit("v", project_heads(y, params.w_v, params.b_v))
        weights, mixed = apply_mix(mix, q, k, v, context)
    if mixed is not None and (dropout_key is not None or edit.has_edit("weights")):
        raise ValueError("mix computes the full output: its weights cannot be edited or dropped")
    dtype = weights.dtype
    weights = edit("weights", weights)
    if edit.has_edit("weights") and context.mask is not None:
        weights = jnp.where(combine_masks(context.mask), weights, 0).astype(dtype)
    if mixed is None:
        sparse = weights if dropout_key is None else dropout(dropout_key, weights, dropout_rate)
        mixed = matrix_product(sparse, v)  # [h, n, v]
    if edit.is_used("head_output"):
        heads = edit("head_output", jnp.einsum("hnv,hvd->hnd", mixed, params.w_o))
    if edit.has_edit("head_output"):
        output = heads.sum(axis=0)
    else:
        output = jnp.einsum("hnv,hvd->nd", mixed, params.w_o)  # [n, d]
    return output if params.b_o is None else output + params.b_o[None, :], weights


def apply_mix(
    mix: Callable, q: ArrayLike, k: ArrayLike, v: ArrayLike, context: AttentionContext
) -> tuple[Array, Array | None]:
    """Call the caller's attention: (M [h, n, m], output [h, n, v] or None).

    Args:
        mix: `AttentionConfig.mix`.
        q, k, v: Queries, keys and values of every head.
        context: Passed on to mix.

    Raises:
        ValueError: The function returned arrays of other shapes.
    """
    results = mix(q, k, v, context)
    weights, output = results if isinstance(results, tuple) else (results, None)
    expected = ((*q.shape[:2], k.shape[1]), (*q.shape[:2], v.shape[2]))
    shapes = getattr(weights, "shape", None), getattr(output, "shape", None)
    if shapes not in (expected, (expected[0], None)):
        raise ValueError(
            f"mix returned the shapes {shapes}, but (M, out) must have the shapes {expected}"
        )
    return weights.astype(v.dtype), None if output is None else output.astype(v.dtype)
