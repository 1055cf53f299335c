"""Trainable models: a network with a linear classifier of each token, or an encoder-decoder.

The first answers with logits (`forward`), the second also with the sequence that it writes
(`decode_pairs`).

Axis letters: b examples, n tokens, i input width, c classes or outputs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Key, Number
from rank_collapse.network import encoder_decoder, parameters, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.decoding import Decoded, greedy_decode
from rank_collapse.network.dropout import dropout, dropout_branches
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.network.inputs import input_states
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.paths.sets import Classifier
from rank_collapse.training.recipe import Recipe
from rank_collapse.training.tasks.examples import Examples, in_batches, part_mask, part_positions
from rank_collapse.training.tasks.sequences import BEGIN, END, SequencePairs


class Model(struct.Struct):
    """A network and the classifier that reads each token of its output."""

    network: TransformerParams
    classifier: Classifier


def init_model(key: Key, recipe: Recipe, init_scale: Number = 1.0) -> Model | EncoderDecoderParams:
    """Draw initial weights: the network by its config, the classifier normal(0, 0.02), bias 0.

    Args:
        key: Random key for all weights.
        recipe: Recipe that holds the network.
        init_scale: Multiplies the layers' weights.

    Returns:
        A `Model`; `EncoderDecoderParams` where the config is of an encoder-decoder.
    """
    if isinstance(recipe.config, EncoderDecoderConfig):
        return encoder_decoder.init(key, recipe.config, init_scale)
    key_network, key_classifier = jax.random.split(key)
    params = parameters.init(key_network, recipe.config, weight_scale=init_scale)
    w = 0.02 * jax.random.normal(key_classifier, (recipe.config.d_model, recipe.num_outputs))
    return Model(network=params, classifier=Classifier(w, jnp.zeros(recipe.num_outputs)))


def forward(
    model: Model,
    inputs: ArrayLike,
    config: TransformerConfig,
    *,
    mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
    output_dropout: Number | bool = False,
) -> Float[Array, "n c"]:
    """Compute logits of one example; with a key, dropout on embedding, attention weights, branches.

    Args:
        model: Network and classifier.
        inputs: Token ids [n] or vectors [n, i].
        config: Configuration of the network.
        mask: Bool [n], which tokens exist, or [n, n], which tokens a token may attend to.
        positions: Int [n], positions of the tokens; 0..n-1 by default.
        dropout_key, dropout_rate: None for none.
        output_dropout: Used only with a key: dropout on the network's output too. False for none,
            True for the same rate, or a factor on the rate, which may be traced.
    """
    states = input_states(model.network, inputs, config, positions=positions)
    if dropout_key is not None:
        dropout_key, key_embedding, key_output = dropout_branches(dropout_key, 3)
        states = dropout(key_embedding, states, dropout_rate)
    # What is embedded already is not embedded again, even if it is as wide as the inputs.
    positions = positions if config.position == "rotary" else None
    output = transformer.apply(
        model.network,
        states,
        config.replace(embedding=None),
        mask=mask,
        positions=positions,
        dropout_key=dropout_key,
        dropout_rate=dropout_rate,
    ).output
    if dropout_key is not None and output_dropout is not False:
        output = dropout(key_output, output, dropout_rate * output_dropout)
    w, b = model.classifier
    return output @ w + b[None, :]


def batch_forward(
    model: Model | EncoderDecoderParams,
    examples: Examples | SequencePairs,
    config: TransformerConfig | EncoderDecoderConfig,
    *,
    dropout_key: Key | None = None,
    dropout_rate: Number = 0.0,
    output_dropout: Number | bool = False,
    batch_size: int | None = None,
) -> Float[Array, "b n c"]:
    """Compute logits of every example; `batch_size` at a time where that is given.

    Args:
        model: A `Model` with Examples; EncoderDecoderParams with SequencePairs, whose targets are
            fed to the decoder.
        examples, config: Examples and configuration of the model.
        dropout_key, dropout_rate, output_dropout: See `forward`.
        batch_size: Examples at a time; None for all.
    """
    keys = None if dropout_key is None else dropout_branches(dropout_key, len(examples))

    def single_pair(example):
        """Computes the logits of one pair of source and target."""
        source, source_mask, target, target_mask, key = example
        return encoder_decoder.apply(
            model,
            source,
            target,
            config,
            source_mask=source_mask,
            target_mask=target_mask,
            dropout_key=key,
            dropout_rate=0.0 if key is None else dropout_rate,
        ).logits

    def single(example):
        """Computes the logits of one example, packed or not."""
        inputs, mask, parts, key = example
        positions = None
        if parts is not None:
            mask, positions = part_mask(parts), part_positions(parts)
        return forward(
            model,
            inputs,
            config,
            mask=mask,
            positions=positions,
            dropout_key=key,
            dropout_rate=dropout_rate,
            output_dropout=output_dropout,
        )

    if isinstance(config, EncoderDecoderConfig):
        target_mask = examples.target_mask[:, :-1]
        pairs = (examples.source, examples.source_mask, examples.inputs, target_mask, keys)
        return in_batches(single_pair, pairs, batch_size)
    items = (examples.inputs, examples.mask, examples.parts, keys)
    return in_batches(single, items, batch_size)


def decode_pairs(
    model: EncoderDecoderParams, pairs: SequencePairs, config: EncoderDecoderConfig
) -> Decoded:
    """Decode each source, as long as the longest target; leaves [b, n, ...]."""

    def single(source: Array, mask: Array) -> Decoded:
        """Decodes the translation of one source."""
        return greedy_decode(
            model,
            source,
            config,
            begin=BEGIN,
            end=END,
            max_len=pairs.labels.shape[1],
            source_mask=mask,
        )

    return jax.vmap(single)(pairs.source, pairs.source_mask)


def exact_share(decoded: Decoded, pairs: SequencePairs) -> Float[Array, ""]:
    """Compute the share of sequences written as their targets, the end mark in its place."""
    exact = jnp.all((decoded.tokens == pairs.labels) | ~pairs.mask, axis=1)
    return jnp.mean(exact.astype(jnp.float32))
