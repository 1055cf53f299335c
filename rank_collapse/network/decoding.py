"""Greedy decoding of an encoder-decoder: one pass of the full decoder for each token.

Axis letters: m source tokens, n target tokens, c target vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from rank_collapse import checks, struct
from rank_collapse.annotations import ArrayLike, Leaf
from rank_collapse.network import transformer
from rank_collapse.network.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderParams,
    compute_logits,
    decoder_params,
    encode,
)


class Decoded(struct.Struct):
    """A sequence that a decoder wrote.

    Attributes:
        tokens: Int [n], without the begin mark; after the end mark all tokens are end marks.
        exists: Bool [n], True up to and including the first end mark.
        logits: [n, c], from which each token was chosen; the logits after the end have no meaning.
    """

    tokens: Leaf
    exists: Leaf
    logits: Leaf


def greedy_decode(
    params: EncoderDecoderParams,
    source: ArrayLike,
    config: EncoderDecoderConfig,
    *,
    begin: ArrayLike,
    end: ArrayLike,
    max_len: int,
    source_mask: ArrayLike | None = None,
) -> Decoded:
    """Write a target token by token, each the one with the largest logit.

    The source is encoded once; every token costs a pass of the decoder over all of them.

    Args:
        params: Parameters from `init`.
        source: Input of the encoder, as in `apply`; one example.
        config: Configuration of both halves.
        begin, end: Token ids of the marks; may be traced.
        max_len: Number of tokens to write, including the end mark; static.
        source_mask: Bool [m], which source tokens exist; None for all.

    Raises:
        ValueError: A length that leaves no token, more tokens than positions, or a mark that is not
            a token.
    """
    max_len = checks.check_whole("max_len", max_len, 1)
    for name, mark in (("begin", begin), ("end", end)):
        if not isinstance(mark, jax.core.Tracer):
            checks.check_whole(name, mark, 0, config.decoder.embedding.vocab_size - 1)
    memory = encode(params, source, config, source_mask)
    marks = jnp.asarray(begin, jnp.int32), jnp.asarray(end, jnp.int32)
    return _write(params, memory, source_mask, marks, config, max_len)


@functools.partial(jax.jit, static_argnames="max_len")
def _write(params, memory, source_mask, marks, config, max_len):
    """Scan over the positions; carry the next token, whether the end was reached, and all tokens.

    Args:
        params, source_mask, config, max_len: See `greedy_decode`.
        memory: The encoder's output.
        marks: Token ids of the begin and the end mark.
    """
    begin, end = marks
    decoder = decoder_params(params, config)

    def step(carry, t):
        """Write token t, and choose the next one from the decoder's logits.

        Returns:
            ((next token, whether the sequence has ended, tokens), (next token, whether it counts,
            logits)).
        """
        token, ended, tokens = carry
        tokens = tokens.at[t].set(token)
        output = transformer.apply(
            decoder, tokens, config.decoder, memory=memory, memory_mask=source_mask
        ).output
        logits = compute_logits(params, output, config)[t]
        next_token = jnp.where(ended, end, jnp.argmax(logits).astype(end.dtype))
        return (next_token, ended | (next_token == end), tokens), (next_token, ~ended, logits)

    start = (begin, jnp.zeros((), bool), jnp.broadcast_to(begin, (max_len,)))
    return Decoded(*jax.lax.scan(step, start, jnp.arange(max_len))[1])
