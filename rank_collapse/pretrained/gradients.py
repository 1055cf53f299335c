"""Gradients by path length on a checkpoint, layer by layer from the last to the first.

Axis letters: b examples, l layers, k path lengths, n tokens, d width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.network.gains import layer_gains
from rank_collapse.network.passes import row_of
from rank_collapse.network.precision import full_precision
from rank_collapse.paths.gradients import at_output, pulled_back, require_lengths
from rank_collapse.pretrained.opened import OpenCheckpoint
from rank_collapse.pretrained.streaming import entered_layer


@full_precision
def stream_gradients(
    source: OpenCheckpoint,
    inputs: Mapping[str, Any],
    states: Any,
    cotangents: Any,
    *,
    done: Callable[[int], None] | None = None,
) -> Float[Array, "b k n d"]:
    """`length_gradients` of every example, in one pass over the weights from the last to the first.

    Args:
        source: From `rank_collapse.pretrained.open_checkpoint`.
        inputs: As in `stream`.
        states: X^0 .. X^L [b, l, n, d], from a `StatePass`.
        cotangents: Gradients of the outputs [b, n, d].
        done: Called behind each layer with the number of layers done.
    """
    require_lengths(source.config)
    config, outside, given = source.entered(inputs)
    states, gradients = np.asarray(states), None
    depth = config.depth
    try:
        for index in reversed(range(depth)):
            layer = source.stored_layer(index, max(index - 1, 0))
            if gradients is None:
                gradients = _last_gradients(
                    layer, outside, states[:, -1], cotangents, given, config
                )
            gradients = _pull_back(
                layer, jnp.asarray(index), outside, states[:, index], gradients, given, config
            )
            jax.block_until_ready(gradients)
            layer = None
            if done is not None:
                done(depth - index)
    finally:
        source.layers.drop()
    return gradients[:, ::-1]


_WHOLE = ("Transformer", "published", "bert")


@jax.jit
def _last_gradients(layer, outside, last, cotangents, examples, config):
    def one(last, cotangent, example):
        params, _, own = entered_layer(layer, outside, example, config, _WHOLE)
        return at_output(params, last, cotangent, own)

    return jax.vmap(one)(last, cotangents, examples)


@functools.partial(jax.jit, donate_argnames="gradients")
def _pull_back(layer, index, outside, x, gradients, examples, config):
    def one(x, gradients, example):
        params, entry, own = entered_layer(layer, outside, example, config, _WHOLE)
        gains = jax.tree.map(lambda a: a[index], layer_gains(own, entry.x.dtype, params))
        return pulled_back(row_of(params), gains, index, x, gradients, entry, own)

    return jax.vmap(one)(x, gradients, examples)
