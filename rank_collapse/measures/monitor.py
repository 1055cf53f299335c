"""A few scalars of one layer that show collapse coming, cheap enough for every training step.

Axis letters: b leading axes as one, n tokens, d width, h heads, m keys.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.measures.attention_entropy import attention_entropy
from rank_collapse.measures.norms import as_array, as_floats, as_tokens, in_own_precision
from rank_collapse.measures.residuals import residual_ratio, token_cosine
from rank_collapse.measures.saturation import largest_weight
from rank_collapse.measures.sinks import largest_column, sink_rate
from rank_collapse.network.entry import as_mask
from rank_collapse.network.precision import full_precision

# Steps of the power iteration behind `stable_rank`; each is one product with G.
POWER_STEPS = 20


@full_precision
def monitor(
    x: Any, attention: Any = None, *, mask: Any = None, sink: float = 0.3
) -> dict[str, Float[Array, ""]]:
    """Scalars of one layer's tokens and attention weights, means over leading axes and heads.

    "residual_ratio": ‖res(X)‖/‖X‖, 0 when all tokens are equal (Dong et al. 2021); "token_cosine":
    1 when all point one way; "participation_ratio": tr(G)²/‖G‖_F², G = XXᵀ, how many directions
    carry the squares, 1 to min(n, d); "stable_rank": ‖X‖_F²/σ_1², σ_1 by 20 power steps and so at
    most the true one. With attention: "attention_entropy" in nats and "largest_weight" of a row,
    log m and 1/m when uniform; "largest_column": max_j mean_i P_ij, the most looked at key of a
    head; "sink_rate": share of heads whose first key has mean_i P_i1 > sink (Gu et al. 2025).

    Computed in float32 whatever comes in (float64 stays), without singular values; pure, so it goes
    inside jit, scan, remat and vmap. What is not finite gives NaN, no error. Cost: 2 n d min(n, d)
    operations for G, and n m per head for the attention.

    Args:
        x: Tokens [..., n, d] of any framework.
        attention: Weights [..., h, n, m] with the same leading axes; None for none.
        mask: Bool [n] or [..., n], the tokens that exist; None for all. Where m = n they are the
            keys too, and the first key is the first that exists; elsewhere it is key 0.
        sink: See "sink_rate".

    Returns:
        Scalars by name.

    Raises:
        ValueError: Shapes that do not fit each other, or fewer than two tokens.
    """
    x = as_floats(x)
    if x.ndim < 2 or x.shape[-2] < 2:
        raise ValueError(f"x of shape {x.shape} is not [..., n, d] with two tokens or more")
    *leading, n, d = x.shape
    if mask is not None:
        mask = as_mask(as_array(mask))
        if mask.shape not in ((n,), (*leading, n)):
            raise ValueError(f"mask of shape {mask.shape} is not {(n,)} or {(*leading, n)}")
        mask = jnp.broadcast_to(mask, (*leading, n)).reshape(-1, n)
    if attention is not None:
        attention = as_floats(attention)
        if attention.shape[:-3] != tuple(leading) or attention.ndim < 3:
            raise ValueError(
                f"attention of shape {attention.shape} is not [..., h, n, m] beside x of {x.shape}"
            )
        if attention.shape[-2] != n:
            raise ValueError(f"attention of shape {attention.shape} has not {n} queries")
        attention = attention.reshape(-1, *attention.shape[-3:])
    return _means(x.reshape(-1, n, d), attention, mask, sink)


@jax.jit
def _means(x, attention, mask, sink):
    found = jax.vmap(lambda x, p, mask: _single(x, p, mask, sink))(x, attention, mask)
    return jax.tree.map(jnp.mean, found)


def _single(x, p, mask, sink):
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)
    gram = _gram(x)
    out = {
        "residual_ratio": residual_ratio(x, mask=mask),
        "token_cosine": token_cosine(x, mask=mask),
        "participation_ratio": _participation(gram),
        "stable_rank": _power_stable_rank(gram),
    }
    if p is None:
        return out
    own = mask if p.shape[-1] == x.shape[0] else None
    return out | {
        "attention_entropy": jnp.mean(attention_entropy(p, mask=mask)),
        "largest_weight": jnp.mean(largest_weight(p, mask=mask)),
        "largest_column": jnp.mean(largest_column(p, mask=mask)),
        "sink_rate": sink_rate(p, sink=sink, mask=mask, key_mask=own),
    }


# How libraries name the weights of queries, keys and values; a part of a leaf's path is compared.
PARTS = {
    "query": frozenset(("w_q", "wq", "q", "query", "q_proj", "q_lin", "to_q", "query_proj")),
    "key": frozenset(("w_k", "wk", "k", "key", "k_proj", "k_lin", "to_k", "key_proj")),
    "value": frozenset(("w_v", "wv", "v", "value", "v_proj", "v_lin", "to_v", "value_proj")),
}


@full_precision
def monitor_gradients(
    gradients: Any, *, layer_axis: int | None = None
) -> dict[str, Float[Array, ""] | Float[Array, "l"]]:
    """Norms of the gradients of queries', keys' and values' weights, of any tree of a network.

    "query_gradient", "key_gradient", "value_gradient": √(Σ g²) over all leaves whose path has a
    name of `PARTS` in it, biases too. At rank collapse the first two vanish (Noci et al. 2022).

    Args:
        gradients: Of a pytree of parameters: ours, Flax's, Equinox's, or a dictionary by names
            such as "layers.0.attention.q_proj.weight".
        layer_axis: Of every such leaf, where layers are stacked: then norms are by layer, [l].

    Returns:
        Norms by name; a part that no leaf is named after is left out.

    Raises:
        ValueError: No leaf is named after queries, keys or values, as where one matrix holds them.
    """
    squares: dict[str, Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    for path, leaf in leaves:
        names = set(jax.tree_util.keystr(path, simple=True, separator=".").split("."))
        for part in (p for p, known in PARTS.items() if names & known):
            leaf = as_floats(leaf)
            axes = range(leaf.ndim) if layer_axis is None else _without(layer_axis, leaf.ndim)
            square = jnp.sum(jnp.square(leaf), axis=tuple(axes))
            squares[part] = squares.get(part, 0) + square
    if not squares:
        seen = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves[:3]]
        raise ValueError(f"no leaf is named after queries, keys or values: {', '.join(seen)}, ...")
    return {f"{part}_gradient": jnp.sqrt(squares[part]) for part in PARTS if part in squares}


def _without(axis, ndim):
    return (i for i in range(ndim) if i != axis % ndim)


@in_own_precision
@full_precision
def participation_ratio(x: Any, *, mask: Any = None) -> Float[Array, ""]:
    """tr(G)²/‖G‖_F² of G = XXᵀ, (Σ σ_i²)² / Σ σ_i⁴: how many directions carry the squares.

    1 for rank one, min(n, d) where all singular values are equal, 0 where X = 0.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: As `composite_norm`.
    """
    x, _ = as_tokens(x, mask)
    return _participation(_gram(x))


def _gram(x):
    """The smaller of XXᵀ and XᵀX, of X over its largest entry."""
    scale = jnp.max(jnp.abs(x))
    x = x / jnp.where(scale == 0, 1, scale)
    return x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x


def _participation(gram):
    square = jnp.sum(jnp.square(gram))
    return jnp.square(jnp.trace(gram)) / jnp.where(square == 0, 1, square)


def _power_stable_rank(gram):
    """tr(G)/λ_1 by power steps from a random direction."""
    start = jax.random.normal(jax.random.key(0), gram.shape[:1], gram.dtype)

    def normalised(v):
        length = jnp.sqrt(jnp.sum(jnp.square(v)))
        return v / jnp.where(length == 0, 1, length)

    def step(v, _):
        return normalised(gram @ v), None

    v, _ = jax.lax.scan(step, normalised(start), None, length=POWER_STEPS)
    largest = v @ gram @ v
    return jnp.trace(gram) / jnp.where(largest == 0, 1, largest)
