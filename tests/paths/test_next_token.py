"""Next tokens from parts of an output: against numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.paths import next_token
from rank_collapse.paths.contributions import PathContributions
from tests.oracles import draws
from tests.oracles.path_examples import relative

K, TOKENS, D, VOCAB = 4, 5, 6, 11


def draw_contributions():
    contributions = PathContributions(
        by_length=draws.normal(K, TOKENS, D, seed=5), offset=draws.normal(TOKENS, D, seed=2)
    )
    targets = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, TOKENS))
    return contributions, draws.normal(VOCAB, D, seed=4), targets


def compute_by_hand(contributions, words, targets, keep, bias=0.0, cap=None):
    parts, offset, words = (
        np.asarray(a, float) for a in (contributions.by_length, contributions.offset, words)
    )
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
    contributions, words, targets = draw_contributions()
    keep = np.arange(TOKENS) < TOKENS - 1
    sums = next_token.list_sums_by_length(contributions)
    # by the number of MLPs too: their sum is meant
    halves = jnp.stack([0.3 * contributions.by_length, 0.7 * contributions.by_length], axis=1)
    counted = contributions.replace(by_length=halves, count_mlps=True)
    assert relative(next_token.list_sums_by_length(counted)[0], sums[0]) < 1e-6
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.float16), contributions)
    assert next_token.list_sums_by_length(narrow)[1].dtype == jnp.float16
    partial = next_token.empty_next_token(len(sums[1]), TOKENS)
    partial = next_token.add_words(partial, words, 0, *sums, targets)
    effects = next_token.measure_next_token_by_length(partial, jnp.asarray(keep))
    loss, same = compute_by_hand(contributions, words, targets, keep)
    ours = [effects["loss"][None], effects["loss_up_to"], effects["loss_without"]]
    assert relative(jnp.concatenate(ours), loss) < 1e-5
    assert np.allclose(jnp.concatenate([effects["same_up_to"], effects["same_without"]]), same[1:])
    assert 0 < same[1] < 1


def test_pieces_of_the_vocabulary_with_bias_and_cap():
    contributions, words, targets = draw_contributions()
    bias, cap, size = np.linspace(-1, 1, VOCAB).astype(np.float32), 2.0, 4
    parts, sums = next_token.list_sums_by_length(contributions)
    partial = next_token.empty_next_token(len(sums), TOKENS)
    add = jax.jit(next_token.add_words)
    for first in range(0, VOCAB, size):
        piece = np.arange(first, first + size)
        rows = np.minimum(piece, VOCAB - 1)
        partial = add(
            partial,
            words[rows],
            first,
            parts,
            sums,
            targets,
            bias=jnp.asarray(bias[rows]),
            softcap=cap,
            word_mask=jnp.asarray(piece < VOCAB),
        )
    keep = np.ones(TOKENS, bool)
    loss, same = next_token.measure_agreement(partial, jnp.asarray(keep))
    expected = compute_by_hand(contributions, words, targets, keep, bias, cap)
    assert relative(loss, expected[0]) < 1e-5 and np.allclose(same, expected[1])


def test_of_equal_logits_the_first_word_counts_and_a_target_has_to_be_read():
    parts, sums, targets = jnp.ones((1, 2, 1)), jnp.ones((1, 1)), jnp.array([1, 2])
    partial = next_token.empty_next_token(1, 2)
    assert partial.token.dtype == jnp.int32 and partial.right.dtype == jnp.float32
    narrow = next_token.empty_next_token(1, 2, jnp.float16)
    assert narrow.largest.dtype == narrow.total.dtype == narrow.right.dtype == jnp.float16
    add = jax.jit(next_token.add_words)
    partial = add(partial, jnp.array([[1.0], [2.0]]), 0, parts, sums, targets)
    np.testing.assert_allclose(partial.loss, [[np.log(np.e + np.e**2) - 2, np.inf]], rtol=1e-6)
    partial = add(partial, jnp.array([[0.0], [2.0]]), 2, parts, sums, targets)
    np.testing.assert_array_equal(partial.token, [[1, 1]])
    partial = add(partial, jnp.array([[3.0], [0.5]]), 4, parts, sums, targets)
    np.testing.assert_array_equal(partial.token, [[4, 4]])
    total = np.log(np.exp([1, 2, 0, 2, 3, 0.5]).sum())
    np.testing.assert_allclose(partial.loss, [[total - 2, total]], rtol=1e-6)
    loss, same = next_token.measure_agreement(partial, jnp.array([True, False]))
    np.testing.assert_allclose([loss, same], [[total - 2], [1]], rtol=1e-6)
    low = add(
        next_token.empty_next_token(1, 2), jnp.array([[-500.0], [-400.0]]), 0, parts, sums, targets
    )
    np.testing.assert_array_equal(low.token, [[1, 1]])
    np.testing.assert_array_equal(low.loss[0, 0], 0)
