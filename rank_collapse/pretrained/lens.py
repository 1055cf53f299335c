"""The logit lens: what a language model would predict if it stopped after a layer.

The state X^l goes through the final norm and the unembedding. *Recomputed*: with the norm's
statistics of X^l itself (nostalgebraist 2020). *Frozen*: with those of the last state, so that the
lens is linear and the differences of two layers are what a layer adds to the logits.

Axis letters: b examples, s states, l layers, n tokens, d width, v words of a piece, k top words.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.network.covers import Covers
from rank_collapse.network.passes import States, WalkResult
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import TokenAlgebra
from rank_collapse.network.walk import apply_final_norm
from rank_collapse.paths.channels import ByLength
from rank_collapse.paths.frozen import Frozen, freeze_final
from rank_collapse.pretrained.lazy import Unembedding
from rank_collapse.pretrained.next_token import read_pieces

TOP = 5  # words whose overlap is measured, as of Csordás et al. 2025


@dataclasses.dataclass(frozen=True)
class LensPass(States):
    """X^0 .. X^L after the final norm, [2, L + 1, n, d]: recomputed, then frozen."""

    covers: ClassVar[Covers] = dataclasses.replace(ByLength.covers, name="the logit lens")

    def build_result(self, walk_result: WalkResult) -> Float[Array, "2 l n d"]:
        """Returns the states that the unembedding reads."""
        states = super().build_result(walk_result)
        outside = walk_result.params, walk_result.prepared, walk_result.config
        recomputed = jax.vmap(lambda x: apply_final_norm(TokenAlgebra(), x, *outside))(states)
        constants = freeze_final(walk_result.last_state, walk_result.config)
        algebra = Frozen(jnp.ones(len(states), states.dtype))
        return jnp.stack([recomputed, apply_final_norm(algebra, states, *outside, constants)])


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
    """Compare the prediction of each state with that of the output, means over tokens.

    kl       KL(p_s ‖ p) = Σ_v p_s(v) (log p_s(v) − log p(v)) in nats, p_s of the state, p of the
             output
    overlap  share of the five words of largest p that are among the five of largest p_s

    Args:
        unembedding: The head; its table is read once, in pieces.
        states, output: After the final norm.
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
        partial = _add_words(partial, *piece, all_states, unembedding.softcap)
    kl, overlap = _compare_predictions(partial, jnp.asarray(keep, bool))
    return {"kl": np.asarray(kl), "overlap": np.asarray(overlap)}


@functools.partial(jax.jit, donate_argnames="partial")
def _add_words(partial, first, words, bias, word_mask, states, softcap):
    """Add a piece of the vocabulary to the partial sums of all examples.

    Args:
        partial: `_Words` so far, leaves [b, ...].
        first, words, bias, word_mask: Of `next_token.read_pieces`.
        states: [b, s, n, d], the last of which is the output.
        softcap: See `Unembedding`.
    """

    def add_example(item):
        partial, states = item
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
    """Compute (KL, overlap) of each state with the output, the last state: [b, s − 1] each."""
    log_total = partial.largest + jnp.log(partial.total)
    kl = partial.weighted / partial.total - (log_total - log_total[:, -1:])
    words, output_words = partial.words[..., :, None], partial.words[:, -1:, :, None, :]
    overlap = jnp.mean(jnp.any(words == output_words, axis=-2), axis=-1, dtype=kl.dtype)
    num_tokens = jnp.sum(keep, axis=-1, keepdims=True)

    def masked_mean(values):
        return jnp.sum(jnp.where(keep[:, None], values, 0), axis=-1)[:, :-1] / num_tokens

    return masked_mean(jnp.maximum(kl, 0)), masked_mean(overlap)
