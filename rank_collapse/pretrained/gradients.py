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

from rank_collapse.network.precision import full_precision
from rank_collapse.paths.gradients import COVERS, at_output, pulled_back
from rank_collapse.pretrained.opened import Source
from rank_collapse.pretrained.streaming import layer_of


@full_precision
def stream_gradients(
    source: Source,
    inputs: Mapping[str, Any],
    states: Any,
    cotangents: Any,
    *,
    done: Callable[[int], None] | None = None,
) -> Float[Array, "b k n d"]:
    """The gradient at the input, from a gradient of the output, along paths of each length.

    Of every example, in one pass over the weights from the last to the first; see
    `paths.gradients.pulled_back`.

    Args:
        source: From `rank_collapse.pretrained.open_checkpoint`, or `InMemory`.
        inputs: As in `stream`.
        states: X^0 .. X^L [b, l, n, d], from the pass `States`.
        cotangents: Gradients of the outputs [b, n, d].
        done: Called after each layer with the number of layers done.
    """
    COVERS.check(source.config)
    config, outside, given = source.entered(inputs)
    states, gradients = np.asarray(states), None
    wanted = states[:, 0].shape
    if np.shape(cotangents) != wanted:
        raise ValueError(f"cotangents of shape {np.shape(cotangents)} is not {wanted}")
    cotangents = np.asarray(cotangents, states.dtype)
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


@jax.jit
def _last_gradients(stored, outside, last, cotangents, examples, config):
    def one(last, cotangent, example):
        layer, params = layer_of(stored, outside, example, config, 0)
        return at_output(params, last, cotangent, layer.inputs, layer.config)

    return jax.vmap(one)(last, cotangents, examples)


@functools.partial(jax.jit, donate_argnames="gradients")
def _pull_back(stored, index, outside, x, gradients, examples, config):
    def one(x, gradients, example):
        layer, _ = layer_of(stored, outside, example, config, index)
        return pulled_back(layer, x, gradients)

    return jax.vmap(one)(x, gradients, examples)
