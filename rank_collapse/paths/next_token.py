"""Predictions of the next token from parts of an output: loss and token for some paths alone.

Logits are linear in the output of a network, hence a sum over its parts, but their softmax is not.
Vocabularies are read in pieces, so no full table of logits [n, vocab] is ever in memory.

Axis letters: p parts, s sums of parts, n tokens, d width, v words of a piece of the vocabulary.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, DType, Leaf, Number
from rank_collapse.network.precision import full_precision
from rank_collapse.paths.contributions import PathContributions


class NextToken(struct.Struct):
    """Partial results on the next token from the words so far."""

    largest: Leaf  # [s, n], the largest logit
    total: Leaf  # [s, n], Σ exp(logit − largest)
    token: Leaf  # [s, n], the word with the largest logit
    right: Leaf  # [s, n], the logit of the true next token; −inf before its piece was added

    @property
    def loss(self) -> Float[Array, "*b s n"]:
        """−log softmax(logits)[true token], in nats."""
        return self.largest + jnp.log(self.total) - self.right


def empty_next_token(num_sums: int, num_tokens: int, dtype: DType = jnp.float32) -> NextToken:
    """Make the partial results before the first piece of the vocabulary.

    Args:
        num_sums, num_tokens: s and n.
        dtype: Number format of the logits.
    """
    minus_infinity = jnp.full((num_sums, num_tokens), -jnp.inf, dtype)
    return NextToken(
        largest=minus_infinity,
        total=jnp.zeros_like(minus_infinity),
        token=jnp.zeros(minus_infinity.shape, jnp.int32),
        right=minus_infinity,
    )


def list_sums_by_length(
    contributions: PathContributions,
) -> tuple[Float[Array, "p n d"], Float[Array, "s p"]]:
    """List sums of path lengths: the full output, lengths up to k, all but length k.

    Args:
        contributions: Contributions of one example.

    Returns:
        The parts C_0 .. C_L and the offset, and the weight of each part in each of the 2L + 3
        sums: the full output; lengths up to 0 .. L; all but length 0 .. L. The offset is in all.
    """
    parts = jnp.concatenate([contributions.by_attention_length, contributions.offset[None]])
    k = len(parts) - 1
    weights = jnp.concatenate([jnp.ones((1, k)), jnp.tril(jnp.ones((k, k))), 1 - jnp.eye(k)])
    weights = jnp.concatenate([weights, jnp.ones((len(weights), 1))], axis=1)
    return parts, weights.astype(parts.dtype)


@full_precision
def add_words(
    next_token: NextToken,
    words: Float[Array, "v d"],
    first: Number,
    parts: Float[Array, "p n d"],
    sums: Float[Array, "s p"],
    targets: Int[Array, "n"],
    *,
    bias: ArrayLike | None = None,
    softcap: Number | None = None,
    word_mask: ArrayLike | None = None,
) -> NextToken:
    """Add a further piece of the vocabulary to the partial results, so that no full table of logits
    is in memory.

    Each piece updates the largest logit m and Σ exp(logit − m), from which the loss follows after
    the last piece.

    Args:
        next_token: Partial results so far; `empty_next_token` at first.
        words: Rows of the unembedding W for words first, first + 1, ...
        first: Index of the first of them; may be traced.
        parts: Parts of the output, the final norm frozen in them.
        sums: Weight of each part in each sum; from `list_sums_by_length`, or the identity.
        targets: The true next token of each token.
        bias: [v], of these words; None for none.
        softcap: c of c tanh(logit/c); None for none.
        word_mask: Bool [v], True for words that exist, where a piece is padded; None for all.
    """
    logits = jnp.einsum("sp,pnv->snv", sums, jnp.einsum("pnd,vd->pnv", parts, words))
    if bias is not None:
        logits = logits + bias[None, None]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if word_mask is not None:
        logits = jnp.where(word_mask[None, None], logits, -jnp.inf)
    piece_token = jnp.argmax(logits, axis=-1)
    piece_largest = jnp.max(logits, axis=-1)
    largest = jnp.maximum(next_token.largest, piece_largest)
    total = next_token.total * jnp.exp(next_token.largest - largest)
    target = targets - first
    is_in_piece = (target >= 0) & (target < logits.shape[-1])
    index = jnp.clip(target, 0, logits.shape[-1] - 1)[None, :, None]
    right = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    return NextToken(
        largest=largest,
        total=total + jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1),
        token=jnp.where(
            piece_largest > next_token.largest, first + piece_token, next_token.token
        ).astype(jnp.int32),
        right=jnp.where(is_in_piece[None], right, next_token.right),
    )


def measure_agreement(
    next_token: NextToken, token_mask: ArrayLike
) -> tuple[Float[Array, "s"], Float[Array, "s"]]:
    """Measure how well every sum of paths predicts the next token.

    Args:
        next_token: Results after all pieces of the vocabulary.
        token_mask: Bool [n], positions that have a next token.

    Returns:
        (mean loss [s], share of positions where a sum predicts the same token as the first sum
        [s]).
    """
    count = jnp.sum(token_mask)

    def average(values):
        return jnp.sum(jnp.where(token_mask[None], values, 0), axis=-1) / count

    is_same = next_token.token == next_token.token[:1]
    return average(next_token.loss), average(is_same.astype(next_token.loss.dtype))


def measure_next_token_by_length(
    next_token: NextToken, token_mask: ArrayLike
) -> dict[str, Float[Array, "*k"]]:
    """Measure next-token loss and agreement by path length.

    loss           of the full network, a scalar, in nats per token
    loss_up_to     of lengths 0 .. k, [L + 1]
    loss_without   of all lengths but k, [L + 1]
    same_up_to     share of positions with the full network's next token, [L + 1]
    same_without   the same of all lengths but k, [L + 1]

    The sums are frozen: attention, norms (including the final one) and gates come from the full
    network.

    Args:
        next_token: Loss and agreement of each sum from `list_sums_by_length`.
        token_mask: Bool [n], positions that have a next token.
    """
    loss, same = measure_agreement(next_token, token_mask)
    k = (len(loss) - 1) // 2
    return {
        "loss": loss[0],
        "loss_up_to": loss[1 : 1 + k],
        "loss_without": loss[1 + k :],
        "same_up_to": same[1 : 1 + k],
        "same_without": same[1 + k :],
    }
