"""Measures of a few tokens by hand: defaults, edges, masks, and what is converted to what."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures import arrays, documents, norms, residuals as rs
from rank_collapse.measures.spikes import masked_median
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(11)
X = RNG.normal(size=(2, 5, 3)) + 0.5
MASK = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]], bool)
# −3 and 4 are the largest entries, of different tokens and features
SMALL = np.array([[1.0, -3.0, 0.0], [2.0, 0.0, 0.5], [0.5, 1.0, 4.0]])
BY_HAND = {
    "one": 4.5,
    "inf": 5.5,
    "composite": np.sqrt(4.5 * 5.5),
    "frobenius": np.sqrt(1 + 9 + 4 + 0.25 + 0.25 + 1 + 16),
    "max": 4,
}


@pytest.mark.parametrize("norm", BY_HAND)
def test_norms_by_hand_with_masks_and_of_every_size(norm):
    assert float(norms.matrix_norm(SMALL, norm)) == pytest.approx(BY_HAND[norm])
    assert float(norms.matrix_norm(-SMALL, norm)) == pytest.approx(BY_HAND[norm])
    for size in (1e-200, 1e200, 1e-300):
        value = float(norms.matrix_norm(size * SMALL, norm))
        assert value / size == pytest.approx(BY_HAND[norm], rel=1e-12)
    both = np.stack([SMALL, SMALL[::-1]])
    mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
    expected = [norms.matrix_norm(SMALL[:2], norm), norms.matrix_norm(SMALL[2:], norm)]
    assert_close(norms.matrix_norm(both, norm, mask=mask), expected)


def test_norms_have_their_defaults():
    assert norms.norm_1(SMALL) == 4.5 and norms.norm_inf(SMALL) == 5.5
    assert rc.composite_norm(SMALL) == norms.matrix_norm(SMALL) == pytest.approx(np.sqrt(24.75))
    for measure in (rc.residual_ratio, rc.rank_one_ratio):
        composite, other = measure(SMALL, norm="composite"), measure(SMALL, norm="frobenius")
        assert measure(SMALL) == composite != other


def test_the_smaller_of_the_two_products_is_made():
    for shape in ((2, 5), (5, 2), (3, 3)):
        x = RNG.normal(size=shape)
        gram = norms.smaller_gram_matrix(x)
        assert gram.shape == (min(shape),) * 2
        assert_close(gram, x @ x.T if shape[0] <= shape[1] else x.T @ x)


def test_scaling_by_powers_of_four_changes_no_digit():
    for dtype, least, most in ((np.float64, 1e-300, 1e300), (np.float32, 1e-37, 1e38)):
        for size in (least, 0.25, 1, 3.99, 4, 17, most):
            x = np.array([[size, -size / 3]], dtype)
            scaled, scale = norms.scale_to_unit(x)
            assert 1 <= np.abs(scaled).max() < 4 and scaled.dtype == dtype
            assert np.log2(float(scale)) % 2 == 0
            np.testing.assert_array_equal(scaled * scale, x)
    scaled, scale = norms.scale_to_unit(np.array([[8.0, 1], [0.5, 0]]), axis=-1)
    np.testing.assert_array_equal(scaled, [[2, 0.25], [2, 0]])
    np.testing.assert_array_equal(scale, [4, 0.25])
    np.testing.assert_array_equal(norms.scale_to_unit(np.zeros((2, 2)))[0], 0)


def ranks_by_hand(x):
    s = np.linalg.svd(x, compute_uv=False)
    s = s[s > 1e-12]
    p, q = s / s.sum(), s**2 / (s**2).sum()
    return {
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "matrix_entropy": -(q * np.log(q)).sum(),
        "participation_ratio": (s**2).sum() ** 2 / (s**4).sum(),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_ranks_of_masked_batches(shape, dtype):
    x = RNG.normal(size=(2, *shape)).astype(dtype)
    mask = np.arange(shape[0]) < np.array([[shape[0]], [2]])
    expected = [ranks_by_hand(a[m].astype(float)) for a, m in zip(x, mask, strict=True)]
    for name in expected[0]:
        values = rc.MEASURES[name](x, mask=mask)
        assert values.dtype == dtype
        want = [one[name] for one in expected]
        assert_close(values, want, rtol=2e-5 if dtype == np.float32 else 1e-9)
    orthogonal = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    for name, value in (("matrix_entropy", np.log(4)), ("participation_ratio", 4)):
        assert float(rc.MEASURES[name](orthogonal)) == pytest.approx(value)


def test_a_share_of_the_rank_is_of_the_most_that_the_tokens_allow():
    """Residuals of two tokens have rank 1 of 1, of many tokens in a plane 2 of 2."""
    assert float(rs.effective_rank_share([[1.0, 2, 3], [3, 1, 0]])) == pytest.approx(1)
    square = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert float(rs.effective_rank_share(square + 7)) == pytest.approx(1)
    tall = np.concatenate([square, np.zeros((4, 2))], axis=1) + 1  # rank 2 of min(3, 4)
    assert float(rs.effective_rank_share(tall)) == pytest.approx(2 / 3)
    mask = [True, True, True, False]
    assert float(rs.effective_rank_share(tall, mask=mask)) == pytest.approx(
        ranks_by_hand(tall[:3] - tall[:3].mean(axis=0))["effective_rank"] / 2
    )
    assert np.isnan(rs.effective_rank_share(tall[:1]))
    assert np.isnan(rs.effective_rank_share(tall, mask=[True, False, False, False]))
    assert float(rs.effective_rank_share(np.ones((3, 2)))) == 0


def cosine_by_hand(x):
    lengths = [np.linalg.norm(a) or 1 for a in x]
    pairs = itertools.permutations(range(len(x)), 2)
    return np.mean([x[i] @ x[j] / lengths[i] / lengths[j] for i, j in pairs])


def test_a_zero_token_has_cosine_0_with_each_other():
    zeros = np.concatenate([SMALL, np.zeros((2, 3))])
    for x in (SMALL, zeros, zeros[1:4], np.zeros((3, 2))):
        assert float(rc.token_cosine(x)) == pytest.approx(cosine_by_hand(x), abs=1e-15)
    masked = rc.token_cosine(np.stack([zeros, -zeros]), mask=MASK)
    expected = [cosine_by_hand(x[m]) for x, m in zip((zeros, -zeros), MASK, strict=True)]
    assert_close(masked, expected)
    assert np.isnan(rc.token_cosine(SMALL, mask=[0, 1, 0]))


def test_nothing_is_0_and_no_token_is_nan():
    zeros, none = np.zeros((3, 2)), np.zeros(3, bool)
    ratios = [rc.residual_ratio, rc.rank_one_ratio, rc.stable_rank, rc.effective_rank]
    for measure in (*ratios, rs.matrix_entropy, rc.participation_ratio, rs.stable_rank_bound):
        assert measure(zeros) == 0 and np.isnan(measure(zeros, mask=none))
        one = measure(zeros, mask=[1, 0, 0])
        assert np.isnan(one) if measure is rc.residual_ratio else one == 0
    assert np.isnan(rc.residual_ratio(np.ones((1, 2))))
    assert np.isnan(rc.profile(np.ones((2, 1, 2)))["residual_ratio"]).all()
    assert rc.measures.spike_token(zeros, mask=[0, 1, 1]) == 1
    assert rc.measures.spike_feature(zeros, mask=[0, 1, 1]) == 0
    for name in ("spike_share", "spike_norm", "spike_entry", "residual_spike"):
        assert np.isnan(rc.MEASURES[name](zeros)), name
    assert rc.measures.spike_token(zeros) == rc.measures.spike_feature(zeros) == 0
    is_refused("leaves no token", rc.residual, X, mask=np.array([[1] * 5, [0] * 5]))
    is_refused("leaves no token", rc.composite_norm, X, mask=np.zeros(5, bool))


def test_spikes_of_even_numbers_of_tokens_and_of_masks():
    """Medians are means of the middle two; what does not exist is neither a spike nor counted."""
    x = np.array([[1.0, 2], [3, 4], [-9, 5], [60, 70]])
    sizes, lengths = np.abs(x), np.linalg.norm(x, axis=1)
    for rows in ([0, 1, 2, 3], [0, 1, 2], [0, 1], [1]):
        mask = np.isin(np.arange(4), rows)
        spikes = {n: rc.MEASURES[n](x, mask=mask) for n in rc.MEASURES if n.startswith("spike")}
        largest = np.unravel_index(sizes[rows].argmax(), (len(rows), 2))
        assert spikes == pytest.approx(
            {
                "spike_entry": sizes[rows].max() / np.median(sizes[rows]),
                "spike_norm": lengths[rows].max() / np.median(lengths[rows]),
                "spike_share": (lengths[rows] ** 2).max() / (lengths[rows] ** 2).sum(),
                "spike_token": rows[largest[0]],
                "spike_feature": largest[1],
            }
        )
    ties = np.array([[1.0, -5, 5], [5, 5, -5]])
    assert (rc.measures.spike_token(ties), rc.measures.spike_feature(ties)) == (0, 1)
    most_zero = np.array([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert np.isnan(rc.measures.spike_entry(most_zero))
    assert np.isnan(rc.measures.spike_norm(most_zero))


def test_a_median_is_of_what_exists_in_each_column():
    x = RNG.normal(size=(2, 5, 3))
    count = np.array([[4], [3]])
    x[0, [1]] = x[1, [0, 4]] = np.inf
    medians = masked_median(x, count)
    assert medians.shape == (2, 1, 3)
    for values, median in zip(x, medians, strict=True):
        assert_close(median[0], np.median(values[np.isfinite(values[:, 0])], axis=0))


def test_the_residual_of_a_batch_keeps_what_exists():
    tokens = 50 * X
    residuals = rc.residual(tokens, mask=MASK)
    for x, mask, residual in zip(tokens, MASK, residuals, strict=True):
        assert_close(residual[mask], x[mask] - x[mask].mean(axis=0), atol=1e-13)
        assert (residual[~mask] == 0).all()


def test_integers_and_low_precision_become_float32_and_float64_stays():
    for dtype in (np.int8, np.uint16, np.bool_, np.float16, ml_dtypes.bfloat16, np.float32):
        assert arrays.as_floats(np.ones((2, 2), dtype)).dtype == np.float32
        assert rc.residual_ratio(np.ones((2, 2), dtype)).dtype == np.float32
    assert arrays.as_floats([[1.0]]).dtype == np.float64
    assert arrays.as_floats((jnp.ones(2), [1.0, 2.0])).shape == (2, 2)  # JAX's among them
    assert isinstance(arrays.as_array([(jnp.ones(2),), (jnp.zeros(2),)]), jax.Array)
    whole = (SMALL * 4).astype(np.int32)
    np.testing.assert_allclose(rc.residual_ratio(whole), rc.residual_ratio(SMALL), rtol=1e-6)


class Variable:
    """A variable of NNX, as far as measures see it."""

    def __jax_array__(self):
        return SMALL


def test_a_variable_is_its_value():
    assert rc.residual_ratio(Variable()) == rc.residual_ratio(SMALL)
    assert rc.composite_norm(SMALL.tolist()) == rc.composite_norm(SMALL)


@parametrize_refusals(
    [
        ([["a", "b"]], "a list is not an array of numbers"),
        ([[b"a"]], "not an array of numbers"),
        (np.array([[1, None]]), "a ndarray is not an array of numbers"),
        (np.zeros((2, 2), "m8[s]"), "not an array of numbers"),
        (np.zeros((2, 2), "M8[s]"), "not an array of numbers"),
        (np.zeros((2, 2), complex), "x of dtype complex128 is not real"),
        (((1.0, 2.0), (3.0,)), "a tuple of rows of different lengths: pad, with mask="),
    ]
)
def test_what_are_no_numbers_is_refused(arguments, message):
    is_refused(message, arrays.as_array, *arguments)


def test_masks_are_booleans_or_0_and_1():
    for mask in ([1, 0], [1.0, 0.0], [True, False], np.uint8([1, 0]), jnp.array([1.0, 0.0])):
        booleans = arrays.as_bools(mask)
        assert booleans.dtype == bool and booleans.tolist() == [True, False]
    for zeros in ([0, 0], np.uint8([0, 0])):  # of integers all may be 0
        assert not arrays.as_bools(zeros).any()
    for wrong in ([2, 0], [-1, 0]):
        is_refused("m of dtype int64 has values other than 0 and 1", arrays.as_bools, wrong, "m")
    for wrong in ([0.5, 1.0], [0.0, 0.0], [-np.inf, 1.0], [np.nan, 1.0]):
        is_refused("m of dtype float64: a mask is boolean", arrays.as_bools, wrong, "m")
    is_refused(r"mask='causal' is not an array: use config.replace", arrays.as_bools, "causal")
    for shape in ((2,), (3, 2), (1, 2, 5), ()):
        is_refused("does not fit tokens of", rc.residual_ratio, X, mask=np.ones(shape, bool))
    for traced in ([True, False], [1, 0]):
        booleans = jax.eval_shape(arrays.as_bools, jnp.asarray(traced))
        assert booleans.dtype == bool


def test_the_bound_of_the_stable_rank_takes_twenty_steps():
    """Of two singular values near each other, so that each step shows."""
    x = np.diag([1.0, 0.97, 0.5])
    v, gram = np.random.default_rng(0).standard_normal(3), x @ x
    bounds = []
    for _ in range(21):
        bounds.append(np.trace(gram) * (v @ v) / (v @ gram @ v))
        v = gram @ v
    assert float(rs.stable_rank_bound(x)) == pytest.approx(bounds[20], rel=1e-13)
    assert bounds[19] > bounds[20] * (1 + 1e-4) > rc.stable_rank(x)


def test_documents_are_the_tokens_of_a_number_that_exist_in_order_of_their_first():
    parts = documents.split_documents(
        [1, 0, 1, 0, 7, 9], np.array([1, 1, 1, 0, 1, 0], bool), (2, 6)
    )
    assert parts.row.tolist() == [[0]] * 3 + [[1]] * 3
    assert parts.place.tolist() == [[0, 2], [1, 0], [4, 0]] * 2
    assert parts.exists.tolist() == [[True, True], [True, False], [True, False]] * 2
    single = documents.split_documents(np.array([[True, False]]), None, (1, 2))
    assert single.place.tolist() == [[0, 0], [1, 0]] and single.exists[:, 0].all()
    assert not single.exists[:, 1].any()  # one token has no pair: two places at least
    x = np.arange(12.0).reshape(2, 6, 1)
    tokens = parts.split_tokens(x)[..., 0]
    assert tokens[parts.exists].tolist() == [0, 2, 1, 4, 6, 8, 7, 10]
    heads = parts.split_heads(np.stack([x, -x], axis=1))
    assert heads.shape == (6, 2, 2, 1)
    np.testing.assert_array_equal(heads[:, 1, :, 0], -tokens)
    p = RNG.random((2, 3, 6, 6))
    weights = parts.split_weights(p)
    np.testing.assert_array_equal(weights[0], p[0][:, [0, 2]][:, :, [0, 2]])
    np.testing.assert_array_equal(weights[4, :, 0, 0], p[1, :, 1, 1])
    assert (weights[4, :, :, 1] == 0).all()
    layers = parts.split_weights(np.stack([p, 2 * p]))
    np.testing.assert_array_equal(layers, np.stack([weights, 2 * weights]))


def test_documents_of_one_token_have_no_ratio():
    profile = rc.profile(X, segments=np.arange(5), measures=("residual_ratio", "spike_norm"))
    assert profile["residual_ratio"].shape == (2, 5) and np.isnan(profile["residual_ratio"]).all()
    assert_close(profile["spike_norm"], 1)


def split_traced(mask):
    return jax.eval_shape(lambda m: rc.profile(X, segments=[0, 0, 1, 1, 1], mask=m), mask)


def test_attention_of_one_packed_example_is_that_of_its_documents():
    p = np.zeros((2, 3, 5, 5))  # [l, h, n, n] of tokens 0 and 1, and 2 to 4
    p[:, :, :2, :2] = RNG.dirichlet(np.ones(2), (2, 3, 2))
    p[:, :, 2:, 2:] = RNG.dirichlet(np.ones(3), (2, 3, 3))
    names, last = ("attention_entropy", "first_column"), np.arange(5) == 4
    shorter = np.where(last, 0, p)
    shorter /= shorter.sum(axis=-1, keepdims=True)
    for weights, mask, end in ((p, None, 5), (shorter, ~last, 4)):
        profile = rc.profile(weights, segments=[4, 4, 0, 0, 0], measures=names, mask=mask)
        for column, places in enumerate((slice(0, 2), slice(2, end))):
            block = weights[:, :, places, places]
            entropy = -(block * np.log(block)).sum(axis=-1).mean(axis=(1, 2))
            assert_close(profile["attention_entropy"][:, column], entropy)
            first = block[..., 0].mean(axis=(1, 2))
            assert_close(profile["first_column"][:, column], first)


@parametrize_refusals(
    [
        (lambda: split_traced(np.ones(5, bool)), "say num_segments="),
        (lambda: rc.profile(X, segments=["a"] * 5), "not an array of numbers"),
        (lambda: documents.split_documents([0.0, 1], None, (1, 2)), "dtype float64 and shape"),
        (
            lambda: documents.split_documents([0, 1, 1], None, (1, 2)),
            r"integers of \(2,\) or \(1, ",
        ),
    ]
)
def test_what_is_no_segment_is_refused(arguments, message):
    is_refused(message, *arguments)
