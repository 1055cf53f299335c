"""Predictions of the next token from parts of an output: loss and token of some paths alone.

Logits are linear in the output of a network, hence a sum over its parts; their softmax is not.
Vocabularies are read in pieces, so that no table of logits [n, vocab] is ever whole.

Axis letters: p parts, s sums of parts, n tokens, d width, v words of a piece of the vocabulary.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import struct
from rank_collapse.network.precision import full_precision
from rank_collapse.paths.contributions import PathContributions


class NextToken(struct.Struct):
    """Partial results on the next token from the words so far."""

    largest: Any  # [s, n], the largest logit
    total: Any  # [s, n], Σ exp(logit − largest)
    token: Any  # [s, n], the word with the largest logit
    right: Any  # [s, n], the logit of the true next token; −inf before it came

    @property
    def loss(self) -> Float[Array, "*b s n"]:
        """−log softmax(logits)[true token], in nats."""
        return self.largest + jnp.log(self.total) - self.right


def empty_next_token(num_sums: int, num_tokens: int, dtype: Any = jnp.float32) -> NextToken:
    """The partial results before the first piece of the vocabulary."""
    nothing = jnp.full((num_sums, num_tokens), -jnp.inf, dtype)
    return NextToken(
        largest=nothing,
        total=jnp.zeros_like(nothing),
        token=jnp.zeros(nothing.shape, jnp.int32),
        right=nothing,
    )


def list_sums_by_length(
    found: PathContributions,
) -> tuple[Float[Array, "p n d"], Float[Array, "s p"]]:
    """(parts, which of them each sum has): the whole output, lengths up to k, all but length k.

    Parts are C_0 .. C_L and the offset, which is in every sum. Sums: the whole; up to 0 .. L;
    without 0 .. L: s = 2L + 3.
    """
    parts = jnp.concatenate([found.by_attention_length, found.offset[None]])
    k = len(parts) - 1
    chosen = jnp.concatenate([jnp.ones((1, k)), jnp.tril(jnp.ones((k, k))), 1 - jnp.eye(k)])
    return parts, jnp.concatenate([chosen, jnp.ones((len(chosen), 1))], axis=1).astype(parts.dtype)


@full_precision
def add_words(
    known: NextToken,
    words: Float[Array, "v d"],
    first: Any,
    parts: Float[Array, "p n d"],
    sums: Float[Array, "s p"],
    targets: Int[Array, "n"],
    *,
    bias: Any = None,
    softcap: Any = None,
    word_mask: Any = None,
) -> NextToken:
    """What is known when a further piece of the vocabulary is counted in.

    Args:
        known: Before; `no_words` at first.
        words: Rows of the unembedding W for words first, first + 1, ...
        first: Index of the first of them; may be traced.
        parts: Parts of the output, the final norm frozen in them.
        sums: Weight of each part in each sum; from `sums_by_length`, or the identity.
        targets: The true next token of each token.
        bias: [v], of these words; None for none.
        softcap: c of c tanh(logit/c); None for none.
        word_mask: Bool [v], words that exist, where a piece is filled up; None for all.
    """
    logits = jnp.einsum("sp,pnv->snv", sums, jnp.einsum("pnd,vd->pnv", parts, words))
    if bias is not None:
        logits = logits + bias[None, None]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if word_mask is not None:
        logits = jnp.where(word_mask[None, None], logits, -jnp.inf)
    best = jnp.argmax(logits, axis=-1)
    top = jnp.max(logits, axis=-1)
    largest = jnp.maximum(known.largest, top)
    total = known.total * jnp.exp(known.largest - largest)
    place = targets - first
    here = (place >= 0) & (place < logits.shape[-1])
    index = jnp.clip(place, 0, logits.shape[-1] - 1)[None, :, None]
    right = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    return NextToken(
        largest=largest,
        total=total + jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1),
        token=jnp.where(top > known.largest, first + best, known.token).astype(jnp.int32),
        right=jnp.where(here[None], right, known.right),
    )


def measure_agreement(known: NextToken, keep: Any) -> tuple[Float[Array, "s"], Float[Array, "s"]]:
    """(mean loss, share of positions with the first sum's next token) of every sum.

    Args:
        keep: Bool [n], positions that have a next token.
    """
    count = jnp.sum(keep)

    def mean(values):
        return jnp.sum(jnp.where(keep[None], values, 0), axis=-1) / count

    return mean(known.loss), mean((known.token == known.token[:1]).astype(known.loss.dtype))


def measure_next_token_by_length(known: NextToken, keep: Any) -> dict[str, Float[Array, "*k"]]:
    """Next-token loss and agreement by path length.

    loss           of the whole network, a scalar, in nats per token
    loss_up_to     of lengths 0 .. k, [L + 1]
    loss_without   of all lengths but k, [L + 1]
    same_up_to     share of positions with the whole network's next token, [L + 1]
    same_without   the same of all lengths but k, [L + 1]

    The sums are frozen: attention, norms (the final one too) and gates are the whole network's.
    """
    loss, same = measure_agreement(known, keep)
    k = (len(loss) - 1) // 2
    return {
        "loss": loss[0],
        "loss_up_to": loss[1 : 1 + k],
        "loss_without": loss[1 + k :],
        "same_up_to": same[1 : 1 + k],
        "same_without": same[1 + k :],
    }
