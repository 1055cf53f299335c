"""The contribution of each head to the output: the sum of all frozen paths through it.

Once attention weights, norm statistics and gates are frozen, the output is linear in the gain of
each head; a head's contribution is the derivative with respect to its gain.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.checks import check_whole
from rank_collapse.network import edits
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import apply_final_norm, walk_layer, walk_layers
from rank_collapse.paths.frozen import Frozen, freeze


@full_precision
def head_contributions(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    chunk: int = 12,
    **inputs: ArrayLike | None,
) -> Float[Array, "l h n d"]:
    """Sum all paths through each head of each layer, of any length, including biases.

    The derivative of the sum of all paths with respect to `head_gain` of `path_contributions`.
    Paths that pass two heads count for both. Cost: L H uses of the frozen network.

    Args:
        params, x, config: See `apply`.
        chunk: Heads carried at once, which bounds the memory besides the result: chunk · n · d_ff.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`.

    Raises:
        ValueError: In the same cases as `path_contributions`; a chunk below 1.
    """
    chunk = check_whole("chunk", chunk, 1)
    params, prepared = prepare_inputs(params, x, config, covers=COVERS, **inputs)
    return _head_derivatives(params, prepared, config, min(chunk, config.depth * config.num_heads))


# What an edit makes of a head's output is of all heads together.
_EDIT_POINTS = edits.edit_point_shapes(TransformerConfig(cross_attention=True, mlp="gelu"))
_EDITS = [name for name in _EDIT_POINTS if not name.endswith("head_output")]
COVERS = dataclasses.replace(EVERYTHING, name="head_contributions", edits=_EDITS)


@functools.partial(jax.jit, static_argnames="chunk")
def _head_derivatives(params, prepared, config, chunk):
    """Differentiate the frozen output with respect to the gain of each head, at gains of 1.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        chunk: See `head_contributions`.
    """
    constants, final_constants = freeze(params, prepared, config)
    algebra = Frozen(jnp.ones(1, prepared.x.dtype))

    def step(layer, c):
        return walk_layer(algebra, layer, c)[0], None

    def compute_output(head_gain):
        extra = constants.replace(head_gain=head_gain)
        c, _ = walk_layers(step, prepared.x[None], params, prepared, config, extra=extra)
        return apply_final_norm(algebra, c, params, prepared, config, final_constants)[0]

    ones = jnp.ones((config.depth, config.num_heads), prepared.x.dtype)
    _, derivative = jax.linearize(compute_output, ones)
    unit_gains = jnp.eye(ones.size, dtype=ones.dtype).reshape(-1, *ones.shape)
    contributions = jax.lax.map(derivative, unit_gains, batch_size=chunk)
    return contributions.reshape(*ones.shape, *prepared.x.shape)
