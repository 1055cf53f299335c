"""Greedy decoding of an encoder-decoder, with a cache of keys and values or without.

Axis letters: m source tokens, n target tokens, c target vocabulary, l layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import struct
from rank_collapse.network import projections, streams, transformer
from rank_collapse.network.attention import AttentionContext
from rank_collapse.network.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderParams,
    decoder_params,
    encode,
    logits_of,
)
from rank_collapse.network.inputs import input_states, prepare_inputs
from rank_collapse.network.walk import final_norm, walk


class Past(struct.Struct):
    """Keys and values of one layer's self-attention before token t."""

    known: projections.KeysValues  # [h, n, k], [h, n, v]; those of tokens 0 .. t − 1 count
    position: Any  # t

    def extended(
        self,
        params: projections.AttentionParams,
        x: Float[Array, "1 d"],
        context: AttentionContext,
        norm_eps: float,
    ) -> projections.KeysValues:
        """The keys and values of tokens 0 .. t, x being token t."""
        new = projections.keys_values(params, x, context, norm_eps)

        def written(old, row):
            return jax.lax.dynamic_update_slice_in_dim(old, row, self.position, axis=1)

        return jax.tree.map(written, self.known, new)


class Decoded(struct.Struct):
    """A sequence that a decoder wrote.

    Attributes:
        tokens: Int [n], without the begin mark; the end mark from where it was first chosen.
        exists: Bool [n], the tokens up to the first end mark, with it.
        logits: [n, c], from which each token was chosen; those after the end mean nothing.
    """

    tokens: struct.Leaf
    exists: struct.Leaf
    logits: struct.Leaf


def greedy_decode(
    params: EncoderDecoderParams,
    source: Any,
    config: EncoderDecoderConfig,
    *,
    begin: Any,
    end: Any,
    max_len: int,
    source_mask: Any = None,
    cached: bool = True,
) -> Decoded:
    """Writes a target token by token, each the one with the largest logit.

    The keys and values of the source are computed once, and those of the target as its tokens
    come, so that a token costs one row of attention; without the cache every token costs a pass
    over all of them. Both give the same numbers to rounding.

    Args:
        params: From `init`.
        source: What the encoder reads, as in `apply`; one example.
        begin, end: Token ids of the marks; may be traced.
        max_len: Tokens written, the end mark included; static.
        source_mask: Bool [m], which source tokens exist; None for all.
        cached: Whether keys and values are kept; static.

    Raises:
        ValueError: A length that leaves no token, or more tokens than positions.
    """
    struct.refuse_if(max_len < 1, f"max_len={max_len} leaves no token beside the begin mark")
    memory = encode(params, source, config, source_mask)
    marks = jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32)
    return _write(params, memory, source_mask, marks, config, max_len, cached)


@functools.partial(jax.jit, static_argnames=("max_len", "cached"))
def _write(params, memory, source_mask, marks, config, max_len, cached):
    begin, end = marks
    begins = jnp.broadcast_to(begin, (max_len,))
    steps = _cached_steps if cached else _whole_passes
    state, next_logits = steps(params, memory, source_mask, begins, config)

    def step(carry, t):
        token, ended, state = carry
        logits, state = next_logits(state, token, t)
        chosen = jnp.where(ended, end, jnp.argmax(logits).astype(end.dtype))
        return (chosen, ended | (chosen == end), state), (chosen, ~ended, logits)

    start = (begin, jnp.zeros((), bool), state)
    return Decoded(*jax.lax.scan(step, start, jnp.arange(max_len))[1])


def _whole_passes(params, memory, source_mask, tokens, config):
    """(tokens, function of (tokens, token t, t) → logits and tokens): a whole pass per token."""
    decoder = decoder_params(params, config)

    def next_logits(tokens, token, t):
        tokens = tokens.at[t].set(token)
        output = transformer.apply(
            decoder, tokens, config.decoder, memory=memory, memory_mask=source_mask
        ).output
        return logits_of(params, output, config)[t], tokens

    return tokens, next_logits


def _cached_steps(params, memory, source_mask, tokens, config):
    """(empty cache, function of (cache, token t, t) → logits and cache): one row per token."""
    own = config.decoder
    decoder, prepared = prepare_inputs(
        decoder_params(params, config), tokens, own, memory=memory, memory_mask=source_mask
    )
    dtype = prepared.x.dtype

    def of_layer(layer, none):
        return none, projections.keys_values(layer.params.cross, memory, None, own.norm_eps)

    _, of_memory = walk(of_layer, None, decoder, prepared, own)

    def next_logits(known, token, t):
        x = input_states(decoder, token[None], own, positions=t[None]).astype(dtype)
        x = streams.begin(x, own)
        here = prepared.replace(context=context_of_token(prepared.context, t))

        def step(layer, x):
            known, memory = layer.extra
            inputs = layer.inputs.replace(memory=memory, past=Past(known, t))
            seen = transformer.forward(layer.replace(inputs=inputs), x)
            return seen.state, seen.trace.keys_values

        x, known = walk(step, x, decoder, here, own, extra=(known, of_memory))
        x = final_norm(transformer.Tokens(), x, decoder, here, own)
        return logits_of(params, x, config)[0], known

    shape = (own.depth, own.num_heads, tokens.shape[0])
    widths = own.qk_width, own.v_width
    none_yet = projections.KeysValues(*(jnp.zeros((*shape, width), dtype) for width in widths))
    return none_yet, next_logits


def context_of_token(context: AttentionContext, position: Int[Array, ""]) -> AttentionContext:
    """Row t of the masks, biases and positions of all n tokens, as token t alone needs them.

    Args:
        context: Of all tokens, from `inputs.make_context`.
        position: t; may be traced.
    """

    def row(a, axis):
        return None if a is None else jax.lax.dynamic_slice_in_dim(a, position, 1, axis)

    relative = context.relative
    if relative is not None:  # row p is distance n − 1 − p; here row j is to be distance t − j
        n = (relative.shape[0] + 1) // 2
        relative = jax.lax.dynamic_slice_in_dim(relative, n - 1 - position, n, 0)

    def turned(pair):
        return None if pair is None else tuple(row(a, 0) for a in pair)

    return context.replace(
        mask=row(context.mask, -2),
        bias=row(context.bias, -2),
        rotary=turned(context.rotary),
        relative=relative,
        distance=row(context.distance, -2),
        local_rotary=turned(context.local_rotary),
    )
