"""The next token of a checkpoint's language-model head, whose table is read in pieces.

The logit lens is what a language model would predict if it stopped after a layer: the state X^l
goes through the final norm and the unembedding. *Recomputed*: with the norm's statistics of X^l
itself (nostalgebraist 2020). *Frozen*: with those of the last state, so that the lens is linear and
the differences of two layers are what a layer adds to the logits.

Axis letters: b examples, l layers, p parts, s sums or states, n tokens, d width, v words of a
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
from rank_collapse.network import Covers, States, Tokens, Walked, final_norm, full_precision
from rank_collapse.paths import next_token
from rank_collapse.paths.channels import ByLength
from rank_collapse.paths.frozen import Frozen, freeze_final
from rank_collapse.paths.next_token import NextToken, add_words, no_words
from rank_collapse.pretrained.lazy import Table, Unembedding

WORDS = 2048  # of the vocabulary at once: bounds the memory of the logits of all sums


def targets_of(
    ids: Any, mask: Any = None
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """(the token after each, whether there is one): the last token of each text has none."""
    ids = np.asarray(ids)
    targets = np.roll(ids, -1, axis=1)
    keep = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
    return targets, keep & np.concatenate([keep[:, 1:], np.zeros((len(ids), 1), bool)], axis=1)


def pieces(unembedding: Unembedding, dtype: Any) -> Any:
    """(first word, s words [v, d], s bias [v], Bool [v] which of them exist), piece by piece."""
    table = unembedding.table
    if not isinstance(table, Table):
        whole = np.asarray(table)
        table = Table(lambda first, last: whole[first:last], whole.shape)
    vocab, d = table.shape
    size, scale = min(WORDS, vocab), jnp.asarray(unembedding.scale, dtype)
    for first, words in table.chunks(size):
        count = len(words)
        filled = jnp.zeros((size, d), dtype).at[:count].set(jnp.asarray(words).astype(dtype))
        bias = np.zeros(size, dtype)
        if unembedding.bias is not None:
            bias[:count] = np.asarray(unembedding.bias)[first : first + count]
        exist = jnp.arange(size) < count
        yield jnp.asarray(first), scale * filled, scale * jnp.asarray(bias), exist


@full_precision
def next_tokens(
    unembedding: Unembedding, parts: Any, sums: Float[Array, "s p"], targets: Any
) -> NextToken:
    """What sums of parts of the output say of the next token, [b, s, n].

    Args:
        unembedding: The head; its table is read once.
        parts: Of the output of each example [b, p, n, d], the final norm in them.
        targets: From `targets_of`, [b, n].
    """
    parts = jnp.asarray(parts)
    known = jax.vmap(lambda _: no_words(len(sums), parts.shape[2], parts.dtype))(targets)
    for piece in pieces(unembedding, parts.dtype):
        known = _add(known, *piece, parts, sums, targets, unembedding.softcap)
    return known


def losses_of(
    unembedding: Unembedding, states: Any, ids: Any, mask: Any = None
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """(loss, share of positions with the next token of the first state) of outputs of one network.

    Args:
        unembedding: The head; its table is read once.
        states: [b, s, n, d], after the final norm.
        ids, mask: As of `targets_of`.
    """
    targets, keep = targets_of(ids, mask)
    known = next_tokens(unembedding, states, jnp.eye(np.shape(states)[1]), targets)
    return jax.vmap(next_token.agreement)(known, jnp.asarray(keep))


def losses_by_length(
    unembedding: Unembedding, sums: Any, ids: Any, mask: Any = None
) -> dict[str, Float[Array, "b *k"]]:
    """`paths.next_token.by_length` of the sums of `paths.contributions.LengthPass`."""
    targets, keep = targets_of(ids, mask)
    sums = jax.tree.map(jnp.asarray, sums)
    parts = jax.vmap(lambda one: next_token.sums_by_length(one)[0])(sums)
    _, chosen = next_token.sums_by_length(jax.tree.map(lambda a: a[0], sums))
    known = next_tokens(unembedding, parts, chosen, targets)
    return jax.vmap(next_token.by_length)(known, jnp.asarray(keep))


@functools.partial(jax.jit, donate_argnames="known")
def _add(known, first, words, bias, word_mask, parts, sums, targets, softcap):
    options = {"bias": bias, "softcap": softcap, "word_mask": word_mask}

    def one(item):
        known, parts, targets = item
        return add_words(known, words, first, parts, sums, targets, **options)

    # One example after the other: the logits of all sums of all of them would be much memory.
    return jax.lax.map(one, (known, parts, targets))


@full_precision
def loss_gradient(
    unembedding: Unembedding, output: Any, known: NextToken, targets: Any, keep: Any
) -> Float[Array, "b n d"]:
    """The gradient of each example's mean next-token loss with respect to the output.

    Args:
        unembedding: The head; its table is read once.
        output: Y [b, n, d].
        known: From `next_tokens`, whose first sum is Y.
        targets, keep: From `targets_of`, [b, n].
    """
    output = jnp.asarray(output)
    gradient = jnp.zeros_like(output)
    log_total = known.largest[:, 0] + jnp.log(known.total[:, 0])
    share = keep / keep.sum(axis=1, keepdims=True)
    for piece in pieces(unembedding, output.dtype):
        known = output, log_total, targets, share
        gradient = _pull(gradient, *piece, *known, unembedding.softcap)
    return gradient


@functools.partial(jax.jit, donate_argnames="gradient")
def _pull(gradient, first, words, bias, word_mask, output, log_total, targets, share, softcap):
    logits = output @ words.T + bias[None, None]
    slope = 1.0
    if softcap is not None:
        capped = jnp.tanh(logits / softcap)
        logits, slope = softcap * capped, 1 - jnp.square(capped)
    place = targets - first
    right = place[..., None] == jnp.arange(len(words))[None, None]
    share_of = jnp.where(word_mask[None, None], jnp.exp(logits - log_total[..., None]), 0)
    change = share_of - right
    return gradient + (slope * change * share[..., None]) @ words


TOP = 5  # words whose overlap is measured, as of Csordás et al. 2025


@dataclasses.dataclass(frozen=True)
class LensPass(States):
    """X^0 .. X^L after the final norm, [2, L + 1, n, d]: recomputed, then frozen."""

    covers: ClassVar[Covers] = dataclasses.replace(ByLength.covers, name="the logit lens")

    def finish(self, walked: Walked) -> Float[Array, "2 l n d"]:
        """The states that the unembedding reads."""
        states = super().finish(walked)
        outside = walked.params, walked.prepared, walked.config
        recomputed = jax.vmap(lambda x: final_norm(Tokens(), x, *outside))(states)
        constants = freeze_final(walked.params, walked.last, walked.config)
        algebra = Frozen(jnp.ones(len(states), states.dtype))
        return jnp.stack([recomputed, final_norm(algebra, states, *outside, constants)])


class _Words(struct.Struct):
    """Partial sums over the words so far, for logits z of each state and y of the output."""

    largest: Any  # [s, n], max z
    total: Any  # [s, n], Σ exp(z − largest)
    weighted: Any  # [s, n], Σ exp(z − largest) (z − y)
    top: Any  # [s, n, k], the largest z
    words: Any  # [s, n, k], their words


@full_precision
def lens_measures(
    unembedding: Unembedding, states: Float[Any, "b s n d"], output: Float[Any, "b n d"], keep: Any
) -> dict[str, Float[np.ndarray, "b s"]]:
    """How near the prediction of each state is to that of the output, means over tokens.

    kl       KL(p_s ‖ p) = Σ_v p_s(v) (log p_s(v) − log p(v)) in nats, p_s of the state, p of the
             output
    overlap  share of the five words of largest p that are among the five of largest p_s

    Args:
        unembedding: The head; its table is read once, in pieces.
        states, output: After the final norm.
        keep: Bool [b, n], the tokens that exist.

    Source: Csordás et al. 2025, Do language models use their depth efficiently?
    """
    both = jnp.concatenate([jnp.asarray(states), jnp.asarray(output)[:, None]], axis=1)
    shape = (*both.shape[:3], TOP)
    known = _Words(
        largest=jnp.full(shape[:3], -jnp.inf, both.dtype),
        total=jnp.zeros(shape[:3], both.dtype),
        weighted=jnp.zeros(shape[:3], both.dtype),
        top=jnp.full(shape, -jnp.inf, both.dtype),
        words=jnp.full(shape, -1, jnp.int32),
    )
    for piece in pieces(unembedding, both.dtype):
        known = _add_states(known, *piece, both, unembedding.softcap)
    kl, overlap = _compared(known, jnp.asarray(keep, bool))
    return {"kl": np.asarray(kl), "overlap": np.asarray(overlap)}


@functools.partial(jax.jit, donate_argnames="known")
def _add_states(known, first, words, bias, word_mask, states, softcap):
    def one(item):
        known, states = item
        logits = jnp.einsum("snd,vd->snv", states, words) + bias[None, None]
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        less = logits - logits[-1:]
        logits = jnp.where(word_mask[None, None], logits, -jnp.inf)
        largest = jnp.maximum(known.largest, logits.max(axis=-1))
        faded, share = jnp.exp(known.largest - largest), jnp.exp(logits - largest[..., None])
        top, place = jax.lax.top_k(logits, min(TOP, logits.shape[-1]))
        together = jnp.concatenate([known.top, top], axis=-1)
        numbers = jnp.concatenate([known.words, first + place], axis=-1)
        top, place = jax.lax.top_k(together, TOP)
        return _Words(
            largest=largest,
            total=faded * known.total + share.sum(axis=-1),
            weighted=faded * known.weighted + jnp.sum(share * less, axis=-1),
            top=top,
            words=jnp.take_along_axis(numbers, place, axis=-1),
        )

    # One example after the other: the logits of all states of all of them would be much memory.
    return jax.lax.map(one, (known, states))


@jax.jit
def _compared(known: _Words, keep: Bool[Array, "b n"]) -> tuple[Array, Array]:
    log_total = known.largest + jnp.log(known.total)
    kl = known.weighted / known.total - (log_total - log_total[:, -1:])
    words, right = known.words[..., :, None], known.words[:, -1:, :, None, :]
    overlap = jnp.mean(jnp.any(words == right, axis=-2), axis=-1, dtype=kl.dtype)

    def mean(values):
        return jnp.sum(jnp.where(keep[:, None], values, 0), axis=-1)[:, :-1] / jnp.sum(
            keep, axis=-1, keepdims=True
        )

    return mean(jnp.maximum(kl, 0)), mean(overlap)
