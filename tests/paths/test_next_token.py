"""Next tokens from parts of an output: against softmax in numpy, whole and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
from path_examples import relative

from rank_collapse.paths import next_token
from rank_collapse.paths.contributions import PathContributions

K, TOKENS, D, VOCAB = 4, 5, 6, 11


def draws():
    keys = jax.random.split(jax.random.key(0), 4)
    found = PathContributions(
        by_length=jax.random.normal(keys[0], (K, TOKENS, D)),
        offset=jax.random.normal(keys[1], (TOKENS, D)),
    )
    targets = jax.random.randint(keys[3], (TOKENS,), 0, VOCAB)
    return found, jax.random.normal(keys[2], (VOCAB, D)), targets


def by_hand(found, words, targets, keep, bias=0.0, cap=None):
    parts, offset, words = (np.asarray(a, float) for a in (found.by_length, found.offset, words))
    sums = [parts.sum(axis=0), *np.cumsum(parts, axis=0)]
    sums += [np.delete(parts, k, axis=0).sum(axis=0) for k in range(K)]
    losses, tokens = [], []
    for total in sums:
        z = (total + offset) @ words.T + bias
        z = z if cap is None else cap * np.tanh(z / cap)
        losses.append(np.log(np.exp(z).sum(axis=1)) - z[np.arange(TOKENS), targets])
        tokens.append(z.argmax(axis=1))
    same = [(t == tokens[0])[keep].mean() for t in tokens]
    return np.array(losses)[:, keep].mean(axis=1), np.array(same)


def test_by_length_against_softmax_in_numpy():
    found, words, targets = draws()
    keep = np.arange(TOKENS) < TOKENS - 1
    sums = next_token.sums_by_length(found)
    known = next_token.no_words(len(sums[1]), TOKENS)
    known = next_token.add_words(known, words, 0, *sums, targets)
    effects = next_token.by_length(known, jnp.asarray(keep))
    loss, same = by_hand(found, words, targets, keep)
    ours = [effects["loss"][None], effects["loss_up_to"], effects["loss_without"]]
    assert relative(jnp.concatenate(ours), loss) < 1e-5
    assert np.allclose(jnp.concatenate([effects["same_up_to"], effects["same_without"]]), same[1:])
    assert 0 < same[1] < 1


def test_pieces_of_the_vocabulary_with_bias_and_cap():
    found, words, targets = draws()
    bias, cap, size = np.linspace(-1, 1, VOCAB).astype(np.float32), 2.0, 4
    parts, sums = next_token.sums_by_length(found)
    known = next_token.no_words(len(sums), TOKENS)
    add = jax.jit(next_token.add_words)
    for first in range(0, VOCAB, size):
        here = np.arange(first, first + size)
        rows = np.minimum(here, VOCAB - 1)
        known = add(
            known,
            words[rows],
            first,
            parts,
            sums,
            targets,
            bias=jnp.asarray(bias[rows]),
            softcap=cap,
            word_mask=jnp.asarray(here < VOCAB),
        )
    keep = np.ones(TOKENS, bool)
    loss, same = next_token.agreement(known, jnp.asarray(keep))
    expected = by_hand(found, words, targets, keep, bias, cap)
    assert relative(loss, expected[0]) < 1e-5 and np.allclose(same, expected[1])
