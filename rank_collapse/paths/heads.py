"""The contribution of each head to the output: the sum of all frozen paths through it.

Once attention weights, norm statistics and gates are frozen, a head's output reaches the end
through an affine map. Every head's output is carried through the layers above it, without telling
path lengths apart.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.network import edits
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import final_norm, walk, walk_layer
from rank_collapse.paths.contributions import path_gains
from rank_collapse.paths.frozen import Frozen, carry_edit, freeze, self_attention


@full_precision
def head_contributions(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    attention_gain: Any = None,
    cross_gain: Any = None,
    mlp_gain: Any = None,
    chunk: int = 12,
    **inputs: Any,
) -> Float[Array, "l h n d"]:
    """Sum of all paths through each head of each layer, of whatever length, biases included.

    The output is linear in the gain of each head once everything is frozen; this is the derivative
    with respect to `head_gain` of `path_contributions`. Paths that pass two heads count for both.
    Cost: about L H / 2 uses of the layers' value, output and MLP matrices.

    Args:
        params, x, config: As in `apply`.
        attention_gain, cross_gain, mlp_gain: See `path_contributions`.
        chunk: Heads carried at once, which bounds the memory beside the result: chunk · n · d_ff.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`.

    Raises:
        ValueError: As `path_contributions`; a chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is below 1")
    params, prepared = prepare_inputs(params, x, config, covers=COVERS, **inputs)
    gains = layer_gains(config, prepared.x.dtype, params)
    factors = {"attention": attention_gain, "cross": cross_gain, "mlp": mlp_gain}
    _, on_paths = path_gains(config, gains, None, factors)
    return _carry_heads(params, prepared, config, on_paths, min(chunk, config.num_heads))


# What an edit makes of a head's output is of all heads together.
_EDITS = [name for name in edits.NAMES if not name.endswith("head_output")]
COVERS = dataclasses.replace(EVERYTHING, name="head_contributions", edits=_EDITS)


class _Started(Frozen):
    """Channels that begin at this layer, as the output of its own heads [h, n, d]."""

    def __init__(self, ones, own):
        super().__init__(ones)
        self.own = own

    def attention(self, layer, seen):
        return carry_edit(layer, "attention_branch", self.own, self.ones), None


@functools.partial(jax.jit, static_argnames="chunk")
def _carry_heads(params, prepared, config, on_paths, chunk):
    h, (n, d) = config.num_heads, prepared.x.shape
    one = jnp.ones(1, prepared.x.dtype)
    none, everything = 0 * one, Frozen(one)
    constants, of_final = freeze(params, prepared, config)

    def pieces(fn, c):
        """fn of the heads, `chunk` at a time."""
        if chunk >= h:
            return fn(c)
        return jax.lax.map(lambda one: fn(one[None])[0], c, batch_size=chunk)

    def step(layer, carry):
        whole, outputs = carry
        whole, passages = walk_layer(everything, layer, whole)
        seen = passages["attention"].branch_input
        own = self_attention(layer, seen, one, summed=False)[0]

        def carried(c):
            return walk_layer(Frozen(none), layer, c)[0]

        def started(own):
            # The stream is 0: what a head writes, an MLP beside it does not read.
            return walk_layer(_Started(none, own), layer, jnp.zeros_like(own))[0]

        def of_layer(item):
            """The heads of one layer after this one: carried on, started here, or still 0."""
            origin, c = item
            branches = (lambda c: pieces(carried, c), lambda c: pieces(started, own), lambda c: c)
            return jax.lax.switch(jnp.sign(origin - layer.index) + 1, branches, c)

        outputs = jax.lax.map(of_layer, (jnp.arange(config.depth), outputs))
        return (whole, outputs), None

    carry = (prepared.x[None], jnp.zeros((config.depth, h, n, d), prepared.x.dtype))
    (_, outputs), _ = walk(step, carry, params, prepared, config, extra=constants, gains=on_paths)
    flat = outputs.reshape(-1, n, d)
    return final_norm(Frozen(none), flat, params, prepared, config, of_final).reshape(outputs.shape)
