"""Predictions of a language model: the next token, and the logit lens of every layer.

The head's table is read in pieces. Lens: the state X^l goes through the final norm and the
unembedding. *Recomputed*: with the norm's statistics of X^l itself (nostalgebraist 2020). *Frozen*:
with the statistics of the last state, so that the lens is linear and the difference of two layers
is the layer's contribution to the logits.

Axis letters: b examples, p parts, s sums or states, l layers, n tokens, d width, v words of a
piece, k top words.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rank_collapse import struct
from rank_collapse.annotations import AnyArray, ArrayLike, DType, Leaf
from rank_collapse.checks import refuse_if
from rank_collapse.network.covers import Covers
from rank_collapse.network.passes import States, WalkResult
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import TokenAlgebra
from rank_collapse.network.walk import apply_final_norm
from rank_collapse.paths import next_token
from rank_collapse.paths.channels import ByLength
from rank_collapse.paths.frozen import Frozen, freeze_final
from rank_collapse.paths.next_token import NextToken, add_words, empty_next_token
from rank_collapse.pretrained.weights import Table, Unembedding

WORDS = 2048  # of the vocabulary at once: bounds the memory of the logits of all sums


def targets_of(
    ids: ArrayLike, mask: ArrayLike | None = None
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """Return (the token after each token, whether there is one); the last token of each text has
    none.

    Args:
        ids: Tokens [b, n].
        mask: Bool [b, n], the tokens that exist; None for all.
    """
    ids = np.asarray(ids)
    targets = np.roll(ids, -1, axis=1)
    keep = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
    return targets, keep & np.concatenate([keep[:, 1:], np.zeros((len(ids), 1), bool)], axis=1)


def read_pieces(unembedding: Unembedding, dtype: DType) -> Any:
    """Yield the unembedding in pieces of `WORDS` words.

    Args:
        unembedding: The head.
        dtype: Number format of the yielded arrays.

    Returns:
        An iterator of (first word, words [v, d] and bias [v] times the head's scale, Bool [v]
        which words exist).
    """
    table = unembedding.table
    if not isinstance(table, Table):
        full_table = np.asarray(table)
        table = Table(lambda first, last: full_table[first:last], full_table.shape)
    vocab, d = table.shape
    size, scale = min(WORDS, vocab), jnp.asarray(unembedding.scale, dtype)
    for first, words in table.chunks(size):
        count = len(words)
        padded_words = jnp.zeros((size, d), dtype).at[:count].set(jnp.asarray(words).astype(dtype))
        bias = np.zeros(size, dtype)
        if unembedding.bias is not None:
            bias[:count] = np.asarray(unembedding.bias)[first : first + count]
        exist = jnp.arange(size) < count
        yield jnp.asarray(first), scale * padded_words, scale * jnp.asarray(bias), exist


@full_precision
def next_tokens(
    unembedding: Unembedding, parts: ArrayLike, sums: Float[Array, "s p"], targets: ArrayLike
) -> NextToken:
    """Predict the next token from sums of parts of the output, [b, s, n].

    Args:
        unembedding: The head; its table is read once.
        parts: Parts of the output of each example [b, p, n, d], the final norm in them.
        sums: Weights of the parts in each sum, [s, p].
        targets: Targets from `targets_of`, [b, n].
    """
    parts = jnp.asarray(parts)
    partial = jax.vmap(lambda _: empty_next_token(len(sums), parts.shape[2], parts.dtype))(targets)
    for piece in read_pieces(unembedding, parts.dtype):
        partial = _add_words(partial, *piece, parts, sums, targets, unembedding.softcap)
    return partial


def mean_losses(
    unembedding: Unembedding, states: ArrayLike, ids: ArrayLike, mask: ArrayLike | None = None
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Compute loss and agreement of several outputs of one network.

    Args:
        unembedding: The head; its table is read once.
        states: [b, s, n, d], after the final norm.
        ids, mask: See `targets_of`.

    Returns:
        (loss in nats, share of positions with the next token of the first state), [b, s] each.
    """
    targets, keep = targets_of(ids, mask)
    predictions = next_tokens(unembedding, states, jnp.eye(np.shape(states)[1]), targets)
    return jax.vmap(next_token.measure_agreement)(predictions, jnp.asarray(keep))


def token_losses(
    unembedding: Unembedding, states: ArrayLike, targets: ArrayLike, chosen: ArrayLike
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Compute (loss in nats, share of right tokens) of outputs of one network, over some tokens.

    Args:
        unembedding: The head; its table is read once.
        states: Outputs to which the head is applied, [b, s, n, d].
        targets: The true tokens, [b, n]: the next ones (`targets_of`), or those that were masked.
        chosen: Bool [b, n], the tokens to average over; at least one in each example.

    Raises:
        ValueError: An example without a chosen token.
    """
    chosen, targets = jnp.asarray(chosen), jnp.asarray(targets)
    count = chosen.sum(axis=-1)
    refuse_if(not count.all(), f"example {int(jnp.argmin(count))} has no token to predict")
    predictions = next_tokens(unembedding, states, jnp.eye(np.shape(states)[1]), targets)
    right = (predictions.token == targets[:, None]).astype(predictions.loss.dtype)

    def average(values):
        return jnp.sum(jnp.where(chosen[:, None], values, 0), axis=-1) / count[:, None]

    return average(predictions.loss), average(right)


def losses_by_length(
    unembedding: Unembedding, sums: ArrayLike, ids: ArrayLike, mask: ArrayLike | None = None
) -> dict[str, Float[Array, "b *k"]]:
    """Compute `measure_next_token_by_length` of the sums of `paths.contributions.LengthPass`.

    Args:
        unembedding: The head; its table is read once.
        sums: `PathContributions` of each example.
        ids, mask: See `targets_of`.
    """
    targets, keep = targets_of(ids, mask)
    sums = jax.tree.map(jnp.asarray, sums)
    parts = jax.vmap(lambda example: next_token.list_sums_by_length(example)[0])(sums)
    _, weights = next_token.list_sums_by_length(jax.tree.map(lambda a: a[0], sums))
    predictions = next_tokens(unembedding, parts, weights, targets)
    return jax.vmap(next_token.measure_next_token_by_length)(predictions, jnp.asarray(keep))


@functools.partial(jax.jit, donate_argnames="partial")
def _add_words(partial, first, words, bias, word_mask, parts, weights, targets, softcap):
    """Add a piece of the vocabulary, of `read_pieces`, to the partial results of all examples.

    Args:
        partial: Partial results of each example.
        first: Number of the piece's first word.
        words, bias, word_mask: Rows of the head's table, their bias, and which words exist.
        parts: Parts of the output [b, p, n, d].
        weights: Weight of each part in each sum [s, p], the same for all examples.
        targets: The true tokens [b, n].
        softcap: See `add_words`.
    """
    options = {"bias": bias, "softcap": softcap, "word_mask": word_mask}

    def add_example(example):
        partial, parts, targets = example
        return add_words(partial, words, first, parts, weights, targets, **options)

    # One example after the other: the logits of all sums of all of them would be much memory.
    return jax.lax.map(add_example, (partial, parts, targets))


TOP = 5  # words whose overlap is measured, as of Csordás et al. 2025


@dataclasses.dataclass(frozen=True)
class LensPass(States):
    """X^0 .. X^L after the final norm, [2, L + 1, n, d]: recomputed, then frozen."""

    covers: ClassVar[Covers] = dataclasses.replace(ByLength.covers, name="the logit lens")

    def build_result(self, walk_result: WalkResult) -> Float[Array, "2 l n d"]:
        """Return the states that the unembedding reads."""
        states = super().build_result(walk_result)
        outside = walk_result.params, walk_result.prepared, walk_result.config
        recomputed = jax.vmap(lambda x: apply_final_norm(TokenAlgebra(), x, *outside))(states)
        constants = freeze_final(walk_result.last_state, walk_result.config)
        algebra = Frozen(jnp.ones(len(states), states.dtype))
        return jnp.stack([recomputed, apply_final_norm(algebra, states, *outside, constants)])


class _Words(struct.Struct):
    """Partial sums over the words so far, for logits z of each state and y of the output."""

    largest: Leaf  # [s, n], max z
    total: Leaf  # [s, n], Σ exp(z − largest)
    weighted: Leaf  # [s, n], Σ exp(z − largest) (z − y)
    top: Leaf  # [s, n, k], the largest z
    words: Leaf  # [s, n, k], their words


@full_precision
def lens_measures(
    unembedding: Unembedding,
    states: Float[AnyArray, "b s n d"],
    output: Float[AnyArray, "b n d"],
    keep: ArrayLike,
) -> dict[str, Float[np.ndarray, "b s"]]:
    """Compare the prediction of each state with the prediction of the output, means over tokens.

    kl       KL(p_s ‖ p) = Σ_v p_s(v) (log p_s(v) − log p(v)) in nats, p_s of the state, p of the
             output
    overlap  share of the five words of largest p that are among the five of largest p_s

    Args:
        unembedding: The head; its table is read once, in pieces.
        states, output: States and output after the final norm.
        keep: Bool [b, n], the tokens that exist.

    Source: Csordás et al. 2025, Do language models use their depth efficiently?
    """
    all_states = jnp.concatenate([jnp.asarray(states), jnp.asarray(output)[:, None]], axis=1)
    shape = (*all_states.shape[:3], TOP)
    partial = _Words(
        largest=jnp.full(shape[:3], -jnp.inf, all_states.dtype),
        total=jnp.zeros(shape[:3], all_states.dtype),
        weighted=jnp.zeros(shape[:3], all_states.dtype),
        top=jnp.full(shape, -jnp.inf, all_states.dtype),
        words=jnp.full(shape, -1, jnp.int32),
    )
    for piece in read_pieces(unembedding, all_states.dtype):
        partial = _add_lens_words(partial, *piece, all_states, unembedding.softcap)
    kl, overlap = _compare_predictions(partial, jnp.asarray(keep, bool))
    return {"kl": np.asarray(kl), "overlap": np.asarray(overlap)}


@functools.partial(jax.jit, donate_argnames="partial")
def _add_lens_words(partial, first, words, bias, word_mask, states, softcap):
    """Add a piece of the vocabulary to the partial sums of all examples.

    Args:
        partial: `_Words` so far, leaves [b, ...].
        first, words, bias, word_mask: Results of `read_pieces`.
        states: [b, s, n, d]; the last one is the output.
        softcap: See `Unembedding`.
    """

    def add_example(example):
        """Add a piece of the vocabulary to the partial sums of one example."""
        partial, states = example
        logits = jnp.einsum("snd,vd->snv", states, words) + bias[None, None]
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        difference = logits - logits[-1:]  # z − y
        logits = jnp.where(word_mask[None, None], logits, -jnp.inf)
        largest = jnp.maximum(partial.largest, logits.max(axis=-1))
        rescale = jnp.exp(partial.largest - largest)
        exponentials = jnp.exp(logits - largest[..., None])
        piece_top, index = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
        candidates = jnp.concatenate([partial.top, piece_top], axis=-1)
        candidate_words = jnp.concatenate([partial.words, first + index], axis=-1)
        top, index = jax.lax.top_k(candidates, TOP)
        return _Words(
            largest=largest,
            total=rescale * partial.total + exponentials.sum(axis=-1),
            weighted=rescale * partial.weighted + jnp.sum(exponentials * difference, axis=-1),
            top=top,
            words=jnp.take_along_axis(candidate_words, index, axis=-1),
        )

    # One example after the other: the logits of all states of all of them would be much memory.
    return jax.lax.map(add_example, (partial, states))


@jax.jit
def _compare_predictions(partial: _Words, keep: Bool[Array, "b n"]) -> tuple[Array, Array]:
    """Compare the next token that each state predicts with the prediction of the output, the last
    state.

    Args:
        partial: Sums over the vocabulary, and the likeliest words, of each state.
        keep: Bool [b, n], the tokens that count; results are means over them.

    Returns:
        (KL divergence in nats, share of the likeliest words in common), [b, s − 1] each.
    """
    log_total = partial.largest + jnp.log(partial.total)
    kl = partial.weighted / partial.total - (log_total - log_total[:, -1:])
    words, output_words = partial.words[..., :, None], partial.words[:, -1:, :, None, :]
    overlap = jnp.mean(jnp.any(words == output_words, axis=-2), axis=-1, dtype=kl.dtype)
    num_tokens = jnp.sum(keep, axis=-1, keepdims=True)

    def masked_mean(values):
        return jnp.sum(jnp.where(keep[:, None], values, 0), axis=-1)[:, :-1] / num_tokens

    return masked_mean(jnp.maximum(kl, 0)), masked_mean(overlap)
