"""Networks whose weights a theorem prescribes, passed by the toolkit's own `rc.apply`.

Axis letters: l layers, h heads, n tokens, d width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jax.typing import ArrayLike
from jaxtyping import Array, Float

import rank_collapse as rc


def unit_norm(x: Float[Array, "n d"]) -> Float[Array, "n 1"]:
    """Computes 1/|x_i|, the factor of a norm that puts tokens on the unit sphere."""
    return jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True))


def make_network(depth: int, d: int, *, num_heads: int = 1, **fields: Any) -> rc.TransformerConfig:
    """Makes attention without MLPs, with heads of the tokens' width and one layer for all.

    Scores are not divided by √d, so a theorem's β is the inverse temperature.

    Args:
        depth, d: L and the width.
        num_heads: H.
        **fields: Further fields of the configuration.
    """
    fields = {"layer_map": (0,) * depth, "scale_scores": False, "d_qk": d, "d_v": d} | fields
    return rc.TransformerConfig(depth=depth, num_heads=num_heads, d_model=d, **fields)


def make_sphere(
    depth: int, d: int, beta: ArrayLike, gain: ArrayLike, **fields: Any
) -> rc.TransformerConfig:
    """Makes post-norm attention on the unit sphere: x ← (x + gain · SA(x)) / |·|.

    Each layer is a step of length `gain` of the flow ẋ_i = (I − x_i x_iᵀ) Σ_j P_ij V x_j.

    Args:
        depth, d: L and the width.
        beta: Inverse temperature.
        gain: Gain of the branch; L layers take the time L · gain.
        **fields: See `make_network`.
    """
    fields = {"attention_skip": True, "norm_placement": "post", "norm": unit_norm} | fields
    return make_network(depth, d, temperature=1 / beta, branch_gain=gain, **fields)


def make_params(
    config: rc.TransformerConfig, query_key: ArrayLike | None = None, value: ArrayLike | None = None
) -> rc.network.TransformerParams:
    """Makes parameters with scores x_iᵀ A_h x_j and branches P_h x V_h; the identity by default.

    Args:
        config: Configuration from `make_network`.
        query_key: A_h, [d, d], [h, d, d] or [l, h, d, d]; None for I.
        value: V_h, of the same shapes; None for I.
    """
    rows, h, d = config.num_rows, config.num_heads, config.d_model

    def broadcast(matrix):
        matrix = jnp.eye(d) if matrix is None else jnp.asarray(matrix)
        return jnp.broadcast_to(matrix, (rows, h, d, d))

    params = rc.init(jax.random.key(0), config)
    attention = params.layers.attention.replace(
        w_q=broadcast(query_key), w_k=broadcast(None), w_v=broadcast(value), w_o=broadcast(None)
    )
    norms = params.layers.replace(attention=attention)
    return jax.tree.map(lambda a: a.astype(jnp.result_type(float)), params.replace(layers=norms))


@partial(jax.jit, static_argnames="every")
def pass_states(
    params: rc.network.TransformerParams,
    x: Float[Array, "n d"],
    config: rc.TransformerConfig,
    every: int = 1,
) -> Float[Array, "l n d"]:
    """Passes tokens through a network, and returns every k-th state, the input first.

    Args:
        params, config: The network.
        x: Tokens.
        every: k.
    """
    return rc.apply(params, x, config).hidden[::every]


def fix_attention(matrices: Float[Array, "l h n n"]) -> Partial:
    """Makes a `normalise` function that returns prescribed attention weights instead of softmax.

    Args:
        matrices: Matrices of each layer, or [1, h, n, n] for all layers.
    """
    return Partial(_select_matrices, jnp.asarray(matrices))


def _select_matrices(matrices, scores, context):
    return jnp.broadcast_to(matrices[jnp.minimum(context.layer, len(matrices) - 1)], scores.shape)


def draw_sphere(key: jax.Array, n: int, d: int) -> Float[Array, "n d"]:
    """Draws n tokens uniformly from the unit sphere."""
    x = jax.random.normal(key, (n, d))
    return x * unit_norm(x)
