"""The next token of a checkpoint's language-model head, whose table is read in pieces.

Axis letters: b examples, p parts, s sums, n tokens, d width, v words.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rank_collapse.network.precision import full_precision
from rank_collapse.paths import next_token
from rank_collapse.paths.next_token import NextToken, add_words, empty_next_token
from rank_collapse.pretrained.lazy import Table, Unembedding
from rank_collapse.struct import refuse_if

WORDS = 2048  # of the vocabulary at once: bounds the memory of the logits of all sums


def targets_of(
    ids: Any, mask: Any = None
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """Returns (the token after each, whether there is one): the last token of each text has none.

    Args:
        ids: Tokens [b, n].
        mask: Bool [b, n], the tokens that exist; None for all.
    """
    ids = np.asarray(ids)
    targets = np.roll(ids, -1, axis=1)
    keep = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
    return targets, keep & np.concatenate([keep[:, 1:], np.zeros((len(ids), 1), bool)], axis=1)


def read_pieces(unembedding: Unembedding, dtype: Any) -> Any:
    """Yields the unembedding in pieces of `WORDS` words.

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
    unembedding: Unembedding, parts: Any, sums: Float[Array, "s p"], targets: Any
) -> NextToken:
    """Predict the next token from sums of parts of the output, [b, s, n].

    Args:
        unembedding: The head; its table is read once.
        parts: Parts of the output of each example [b, p, n, d], the final norm in them.
        sums: Which parts make each sum, [s, p].
        targets: From `targets_of`, [b, n].
    """
    parts = jnp.asarray(parts)
    partial = jax.vmap(lambda _: empty_next_token(len(sums), parts.shape[2], parts.dtype))(targets)
    for piece in read_pieces(unembedding, parts.dtype):
        partial = _add_words(partial, *piece, parts, sums, targets, unembedding.softcap)
    return partial


def mean_losses(
    unembedding: Unembedding, states: Any, ids: Any, mask: Any = None
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
    unembedding: Unembedding, states: Any, targets: Any, chosen: Any
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Compute (loss in nats, share of right tokens) of outputs of one network, over some tokens.

    Args:
        unembedding: The head; its table is read once.
        states: What it is applied to, [b, s, n, d].
        targets: The true tokens, [b, n]: the next ones (`targets_of`), or those that were masked.
        chosen: Bool [b, n], of which tokens the means are; at least one of each example.

    Raises:
        ValueError: An example of which none is chosen.
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
    unembedding: Unembedding, sums: Any, ids: Any, mask: Any = None
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
def _add_words(partial, first, words, bias, word_mask, parts, sums, targets, softcap):
    """Add a piece of the vocabulary, of `read_pieces`, to the partial results of all examples."""
    options = {"bias": bias, "softcap": softcap, "word_mask": word_mask}

    def add_example(item):
        partial, parts, targets = item
        return add_words(partial, words, first, parts, sums, targets, **options)

    # One example after the other: the logits of all sums of all of them would be much memory.
    return jax.lax.map(add_example, (partial, parts, targets))
