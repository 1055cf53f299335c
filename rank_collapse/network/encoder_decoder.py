"""Encoder and decoder from the one network: apply(params, source, target, config) and its parts.

The encoder reads the source; the decoder, causal, reads the target so far and attends to the
encoder's output (Vaswani et al. 2017, figure 1). `rank_collapse.apply` computes each of the two
networks, with every field of its config. Greedy decoding is in `decoding`.

Axis letters: m source tokens, n target tokens, d model width, c target vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Key, Leaf, Number
from rank_collapse.network import admin, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.input_checks import as_mask
from rank_collapse.network.inputs import input_states
from rank_collapse.network.parameters import TransformerParams, init as init_network
from rank_collapse.network.trace import Trace


class EncoderDecoderConfig(struct.Struct):
    """The networks of an encoder-decoder and the weights that they share.

    A pytree, like its two networks: gains and temperatures may be swept. The decoder has
    cross_attention=True, mask="causal" and token ids as inputs; the encoder is any network of the
    same width.

    Attributes:
        encoder, decoder: The halves.
        shared_embedding: One table of token embeddings for source and target.
        tied_output: Logits are output · tableᵀ, with the decoder's table (Press and Wolf 2017);
            otherwise output · W + b.
    """

    encoder: TransformerConfig
    decoder: TransformerConfig
    shared_embedding: bool = struct.static(False)
    tied_output: bool = struct.static(False)

    def __post_init__(self):
        encoder, decoder = self.encoder, self.decoder
        if not isinstance(encoder, TransformerConfig) or not isinstance(decoder, TransformerConfig):
            return  # a transformation of the pytree put something else there
        target = decoder.embedding
        if decoder.mask != "causal":
            raise ValueError(f"decoder.mask={decoder.mask!r} lets tokens attend to later ones")
        if encoder.d_model != decoder.d_model:
            raise ValueError(
                f"encoder.d_model={encoder.d_model} is not decoder.d_model={decoder.d_model}, "
                "which attends to its output"
            )
        if target is None or not target.vocab_size:
            raise ValueError("decoder.embedding must have a vocab_size: the decoder reads tokens")
        if target.class_token:
            raise ValueError("decoder.embedding.class_token=True moves every token by one position")
        source = encoder.embedding
        source_table = None if source is None else (source.vocab_size, source.d_embed)
        target_table = (target.vocab_size, target.d_embed)
        if self.shared_embedding and source_table != target_table:
            raise ValueError(
                f"shared_embedding=True, but (vocab_size, d_embed) of the encoder is "
                f"{source_table}, of the decoder {target_table}"
            )
        if self.tied_output and target.d_embed != decoder.d_model:
            raise ValueError(
                f"tied_output=True, but decoder.embedding.d_embed={target.d_embed} is not "
                f"d_model={decoder.d_model}"
            )


class EncoderDecoderParams(struct.Struct):
    """Parameters of both halves and of the output; shared weights are stored once.

    Attributes:
        encoder, decoder: Parameters of the encoder and of the decoder. With a shared embedding the
            decoder's token table is None; `decoder_params` puts it back.
        w_output: [d, c]; None where the output is tied.
        b_output: [c]; None for none, as where the output is tied.
    """

    encoder: TransformerParams
    decoder: TransformerParams
    w_output: Leaf | None = None
    b_output: Leaf | None = None


class EncoderDecoderTrace(struct.Struct):
    """The traces of both halves, and the logits.

    Attributes:
        encoder, decoder: Traces of the halves; `decoder.cross_attention` [L, h, n, m].
        logits: [n, c]; row t predicts target token t + 1.
    """

    encoder: Trace
    decoder: Trace
    logits: Leaf


def init(
    key: Key, config: EncoderDecoderConfig, weight_scale: Number = 1.0, bias_scale: Number = 0.0
) -> EncoderDecoderParams:
    """Draw parameters as `rank_collapse.init` does for each network; the output is normal(0, 0.02)
    without bias.

    Args:
        key: Random key.
        config: Configuration of both halves.
        weight_scale, bias_scale: See `rank_collapse.init`; they apply to the layers of both
            networks.
    """
    key_encoder, key_decoder, key_output = jax.random.split(key, 3)
    encoder = init_network(key_encoder, config.encoder, weight_scale, bias_scale)
    decoder = init_network(key_decoder, config.decoder, weight_scale, bias_scale)
    if config.shared_embedding:
        decoder = decoder.replace(embedding=decoder.embedding.replace(tokens=None))
    w, b = None, None
    if not config.tied_output:
        shape = (config.decoder.d_model, config.decoder.embedding.vocab_size)
        w, b = 0.02 * jax.random.normal(key_output, shape), jnp.zeros(shape[1])
    return EncoderDecoderParams(encoder=encoder, decoder=decoder, w_output=w, b_output=b)


def decoder_params(params: EncoderDecoderParams, config: EncoderDecoderConfig) -> TransformerParams:
    """Return the decoder's parameters with the shared table, as `apply` and path measures need
    them.

    `rc.path_contributions(decoder_params(params, config), target, config.decoder,
    memory=trace.encoder.output)` splits the decoder's output by path length, for example.
    """
    if not config.shared_embedding:
        return params.decoder
    tokens = params.encoder.embedding.tokens
    return params.decoder.replace(embedding=params.decoder.embedding.replace(tokens=tokens))


def compute_logits(
    params: EncoderDecoderParams, output: Float[Array, "n d"], config: EncoderDecoderConfig
) -> Float[Array, "n c"]:
    """Compute the logits of the decoder's output.

    Args:
        params: Parameters of both halves.
        output: Output of the decoder.
        config: Configuration of both halves.

    Raises:
        ValueError: An output matrix that is missing, or that exists although the output is tied.
    """
    if (params.w_output is None) != config.tied_output:
        raise ValueError(
            f"params.w_output is {'missing' if params.w_output is None else 'set'}, but "
            f"tied_output={config.tied_output}"
        )
    w = params.w_output
    if w is None:
        w = decoder_params(params, config).embedding.tokens.T
    logits = output @ w
    return logits if params.b_output is None else logits + params.b_output[None, :]


def shift_target(target: Int[Array, "n"], begin: ArrayLike) -> Int[Array, "n"]:
    """Put the begin mark before all but the last token: the decoder's input for `target`.

    Args:
        target: The sequence to write.
        begin: Token id of the begin mark.
    """
    begin = jnp.asarray(begin, target.dtype)[None]
    return jnp.concatenate([begin, target[:-1]])


def apply(
    params: EncoderDecoderParams,
    source: ArrayLike,
    target: ArrayLike,
    config: EncoderDecoderConfig,
    *,
    source_mask: ArrayLike | None = None,
    target_mask: ArrayLike | None = None,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
) -> EncoderDecoderTrace:
    """Run encoder and decoder on one pair of sequences, under teacher forcing.

    Args:
        params: Parameters from `init`.
        source: Input of the encoder: token ids Int [m], or any input of its embedding.
        target: Int [n], the input of the decoder, which begins with the begin mark: see
            `shift_target`.
        config: Configuration of both halves.
        source_mask: Bool [m], the source tokens that exist, for both networks; None for all.
        target_mask: Bool [n], the target tokens that exist, or [n, n], the tokens to which each may
            attend.
        dropout_key, dropout_rate: Dropout on embeddings, attention weights and branches; None for
            none.

    Returns:
        An `EncoderDecoderTrace`.

    Raises:
        ValueError: In the same cases as `rank_collapse.apply`; a source mask that is not [m].
    """
    encoder_key, decoder_key = None, None
    if dropout_key is not None:
        encoder_key, decoder_key = dropout_branches(dropout_key, 2)
    source_mask = _check_source_mask(source_mask)
    encoder = _apply_half(
        params.encoder, source, config.encoder, encoder_key, dropout_rate, mask=source_mask
    )
    decoder = _apply_half(
        decoder_params(params, config),
        target,
        config.decoder,
        decoder_key,
        dropout_rate,
        mask=target_mask,
        memory=encoder.output,
        memory_mask=source_mask,
    )
    return EncoderDecoderTrace(encoder, decoder, compute_logits(params, decoder.output, config))


def encode(
    params: EncoderDecoderParams,
    source: ArrayLike,
    config: EncoderDecoderConfig,
    source_mask: ArrayLike | None = None,
) -> Float[Array, "m d"]:
    """Compute the memory that the decoder attends to: the encoder's output.

    Args:
        params: Parameters of both halves.
        source: Input of the encoder.
        config: Configuration of both halves.
        source_mask: Bool [m], which source tokens exist; None for all.
    """
    mask = _check_source_mask(source_mask)
    return transformer.apply(params.encoder, source, config.encoder, mask=mask).output


def admin_profile(
    params: EncoderDecoderParams,
    source: ArrayLike,
    target: ArrayLike,
    config: EncoderDecoderConfig,
    *,
    source_mask: ArrayLike | None = None,
    target_mask: ArrayLike | None = None,
) -> EncoderDecoderConfig:
    """Profile Admin's ω of both halves on one batch, the encoder's first.

    Args:
        params: Parameters before training.
        source, target: Batches [b, m] and [b, n] of the inputs of `apply`.
        config: Both halves Post-LN.
        source_mask, target_mask: Bool [b, m] and [b, n], which tokens exist.

    Raises:
        ValueError: In the same cases as `rank_collapse.network.admin_profile`.
    """
    encoder = admin.admin_profile(params.encoder, source, config.encoder, mask=source_mask)
    config = dataclasses.replace(config, encoder=encoder)
    memory = jax.vmap(lambda x, mask: encode(params, x, config, mask))(source, source_mask)
    decoder = admin.admin_profile(
        decoder_params(params, config),
        target,
        config.decoder,
        mask=target_mask,
        memory=memory,
        memory_mask=source_mask,
    )
    return dataclasses.replace(config, decoder=decoder)


def _apply_half(params, x, config, key, rate, **options):
    """Run the encoder or the decoder; with a key, its embedding has dropout, too.

    Args:
        params, x, config: Parameters, input and configuration of the encoder or decoder, as in
            `rank_collapse.apply`.
        key, rate: Key and rate of dropout; None switches dropout off.
        **options: Further inputs of `rank_collapse.apply`.
    """
    if key is None:
        return transformer.apply(params, x, config, dropout_rate=rate, **options)
    key, key_embedding = dropout_branches(key, 2)
    states = dropout(key_embedding, input_states(params, x, config), rate)
    config = config.replace(embedding=None)
    return transformer.apply(params, states, config, dropout_key=key, dropout_rate=rate, **options)


def _check_source_mask(mask):
    """Convert a source mask to Bool [m]; None stays.

    Raises:
        ValueError: A mask of another shape.
    """
    if mask is None:
        return None
    mask = as_mask(mask, "source_mask")
    if mask.ndim != 1:
        raise ValueError(f"source_mask of shape {mask.shape} is not [m]; use jax.vmap for a batch")
    return mask
