"""Options of the measures of attention: thresholds, masks of each shape, caches, refusals."""

import itertools

import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(5)
B, H, N = 3, 3, 4  # as many examples as heads, so that shapes say nothing
P = RNG.dirichlet(np.ones(N), (B, H, N))
EXISTS = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]], bool)


def sums_to(total):
    return np.array([[0.5 * total, 0.3 * total, 0.2 * total]] * 2)


@pytest.mark.parametrize("total", [0.985, 1.015])
def test_rows_may_be_off_1_by_what_bfloat16_rounds(total):
    p = sums_to(total)
    entropy = -(p[0] * np.log(p[0])).sum()
    assert_close(rc.attention_entropy(p), entropy)
    lacking = max(1 - total, 0)  # more than 1 leaves nothing for a further key
    further = -lacking * np.log(lacking) if lacking else 0
    assert_close(rc.attention_entropy(p, missing_key=True), entropy + further)
    assert_close(rc.measures.largest_weight(p), 0.5 * total)


OFF = "off 1: expected weights after the softmax"


@parametrize_refusals(
    [
        (sums_to(0.97), {}, rf"a row whose sum is 0\.03 {OFF}"),
        (sums_to(1.03), {}, rf"a row whose sum is 0\.03 {OFF}"),
        (sums_to(1.04), {"missing_key": True}, rf"a row whose sum is 0\.04 {OFF}"),
        ([[0.5, 0.5], [1.5, -0.5]], {}, "has the weight -0.5: expected weights"),
    ]
)
def test_rows_further_off_are_refused(arguments, message):
    p, options = arguments
    is_refused(message, lambda: rc.attention_entropy(p, **options))


def test_what_a_row_lacks_is_the_weight_of_a_further_key():
    whole = RNG.dirichlet(np.ones(5), (2, N))
    values = rc.attention_entropy(whole[..., :4], missing_key=True, mask=[1, 1, 0, 1])
    by_row = -(whole * np.log(whole)).sum(axis=-1)
    assert_close(values, by_row[:, [0, 1, 3]].mean(axis=-1))


def test_rows_with_a_nan_hide_no_wrong_row():
    p = np.full((3, 4), 0.25)
    p[0, 0] = np.nan
    assert np.isnan(rc.attention_entropy(p))
    p[1] *= 2
    with pytest.raises(ValueError, match="a row whose sum is 1 off 1"):
        rc.attention_entropy(p)


def test_a_row_is_saturated_above_099_and_a_head_a_sink_above_03():
    p = np.array([[0.98, 0.02], [0.995, 0.005], [0.5, 0.5], [0.004, 0.996]])
    assert float(rc.measures.saturated_share(p)) == 0.5
    for threshold, share in ((0.97, 0.75), (np.float32(0.97), 0.75), ([0.99, 0.999, 0, 1], 0.25)):
        threshold = np.asarray(threshold) if isinstance(threshold, list) else threshold
        assert float(rc.measures.saturated_share(p, threshold)) == share
    heads = np.array([[[w, 1 - w]] for w in (0.25, 0.29, 0.31, 0.75)])
    assert float(rc.sink_rate(heads)) == 0.5
    assert float(rc.sink_rate(heads, sink=0.25)) == 0.75  # at the threshold is not above
    assert float(rc.sink_rate(heads, sink=np.array([0.2, 0.3, 0.3, 0.8]))) == 0.5
    broken = heads.copy()
    broken[0] = np.nan
    assert np.isnan(rc.sink_rate(broken)) and np.isnan(rc.measures.saturated_share(broken[0]))


MEASURES = {
    "attention_entropy": lambda p: np.mean([-(r * np.log(r)).sum() for r in p]),
    "largest_weight": lambda p: np.mean([max(r) for r in p]),
    "largest_column": lambda p: np.mean(p, axis=0).max(),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_mask_of_each_shape_is_of_queries_of_an_example_or_of_a_head(name):
    of_heads = np.array([[np.roll(row, h) for h in range(H)] for row in EXISTS])
    for mask, rows in (
        (EXISTS[1], lambda b, h: EXISTS[1]),
        (EXISTS, lambda b, h: EXISTS[b]),
        (of_heads, lambda b, h: of_heads[b, h]),
    ):
        expected = np.empty((B, H))
        for b, h in itertools.product(range(B), range(H)):
            expected[b, h] = MEASURES[name](P[b, h][rows(b, h)])
        assert_close(rc.MEASURES[name](P, mask=mask), expected)
    layers, masks = np.stack([P, P[::-1]]), np.stack([EXISTS, EXISTS[::-1]])
    values = rc.MEASURES[name](layers, mask=masks)
    expected = rc.MEASURES[name](P, mask=EXISTS)
    assert_close(values, [expected, expected[::-1]])


def test_the_first_key_is_that_of_key_mask_and_else_the_first_that_padding_leaves():
    at_key_1 = np.eye(3)[[1, 1, 1]]
    queries = np.array([False, True, True])
    for key_mask, share in ((None, 1), ([1, 1, 1], 0), ([0, 1, 1], 1), ([0, 0, 1], 0)):
        assert float(rc.measures.first_column(at_key_1, mask=queries, key_mask=key_mask)) == share
        rate = rc.sink_rate(at_key_1[None], mask=queries, key_mask=key_mask)
        assert float(rate) == share
    assert float(rc.measures.first_column(at_key_1)) == 0  # without a mask it is key 0
    some = np.stack([at_key_1, np.eye(3)[[0, 0, 1]]])  # in the second head a query sees key 0
    np.testing.assert_array_equal(rc.measures.first_column(some, mask=queries), [1, 0.5])
    both = rc.measures.first_column(P, key_mask=EXISTS)
    expected = [
        [p[:, first].mean() for p in heads] for heads, first in zip(P, (0, 1, 0), strict=True)
    ]
    assert_close(both, expected)


def test_the_largest_logit_under_masks_of_pairs():
    s = RNG.normal(size=(2, 3, 4, 5))
    pairs = RNG.random((2, 3, 4, 5)) < 0.5
    pairs[0, 1] = False
    expected = [[max(s[b, h][pairs[b, h]], default=-np.inf) for h in range(3)] for b in range(2)]
    np.testing.assert_array_equal(rc.measures.largest_logit(s, mask=pairs), expected)
    one = np.arange(20).reshape(4, 5) % 3 == 1
    expected = [[s[b, h][one].max() for h in range(3)] for b in range(2)]
    np.testing.assert_array_equal(rc.measures.largest_logit(s, mask=one), expected)
    assert rc.measures.largest_logit(s[0, 0]) == s[0, 0].max()


SCORES, Q, K = np.zeros((4, 4)), RNG.normal(size=(2, 3, 4, 5)), RNG.normal(size=(2, 1, 6, 5))
SHORT = K[:, :, :4]


@parametrize_refusals(
    [
        (lambda: rc.measures.largest_logit(SCORES, mask=np.ones((1, 4, 4), bool)), r"\(1, 4, 4\)"),
        (lambda: rc.measures.largest_logit(SCORES[0]), r"\(4,\) are not"),
        (lambda: rc.measures.largest_logit(SCORES[:, :3], mask=np.ones(3, bool)), r"\(3, 3\)"),
        (lambda: rc.attention_rows(Q, K, rows=[0, -1]), "not all among the 4 queries"),
        (lambda: rc.attention_rows(Q, K, mask=np.ones(4, bool)), r"mask of shape \(4,\) is not"),
        (
            lambda: rc.attention_rows(Q, SHORT, segments=[0, 0, 1, 1], positions=[0, 1, 2, 3]),
            "without rows=, positions=",
        ),
        (lambda: rc.attention_rows(Q, K, segments=[0, 0, 1, 1]), "segments= is of all tokens"),
        (lambda: rc.attention_rows(Q, K, causal=True, positions=[0, 1, 2]), r"\(3,\) are not"),
        (lambda: rc.attention_rows(Q, K, window=3), "4 queries of 6 keys: say positions="),
        (lambda: rc.attention_rows(Q, K[..., :4]), "does not fit"),
        (lambda: rc.attention_rows(Q, K[:1]), "does not fit"),
        (lambda: rc.attention_rows(Q, SHORT, sink=1.5), "sink=1.5"),
        (lambda: rc.attention_rows(Q, SHORT, scale=np.nan), "scale=nan"),
    ]
)
def test_what_does_not_fit_is_refused(arguments, message):
    is_refused(message, *arguments)


def compute_rows(q, k, scale=5**-0.5):
    """Computes the weights [h, n, m] of one example whose heads share their keys."""
    e = np.exp(scale * np.einsum("hnk,mk->hnm", q, k[0]))
    return e / e.sum(axis=-1, keepdims=True)


def test_rows_take_a_scale_and_a_sink():
    p = np.stack([compute_rows(q, k, 0.3) for q, k in zip(Q, K, strict=True)])
    first = p[..., 0].mean(axis=-1)
    rates = []
    for sink in (0.0, float(np.sort(first.ravel())[2]) + 1e-6, 1.0):
        values = rc.attention_rows(Q, K, scale=0.3, sink=sink)
        assert_close(values["first_column"], first)
        assert_close(values["sink_rate"], (first > sink).mean(axis=-1))
        rates.append(values["sink_rate"].mean())
    assert rates[0] == 1 > rates[1] > rates[2] == 0
    entropy = -(p * np.log(p)).sum(axis=-1).mean(axis=-1)
    assert_close(values["attention_entropy"], entropy)
    sunk = rc.attention_rows(np.ones((2, 3, 1)), [[[0.0], [-np.log(1.9)], [-np.log(2.1)]]])
    assert sunk["first_column"][0] == pytest.approx(1 / (1 + 1 / 1.9 + 1 / 2.1))
    assert sunk["sink_rate"] == 1  # 0.4995 is above 0.3


def test_scores_of_any_size_have_weights():
    q = np.array([[[2000.0], [-3000.0], [0.0]]])
    rows = rc.attention_rows(q, [[[0.0], [1.0], [1.0]]])  # keys 2 and 3; key 1; all
    entropy = (np.log(2) + 0 + np.log(3)) / 3
    assert_close(rows["attention_entropy"], [entropy])
    assert_close(rows["largest_weight"], [(1 / 2 + 1 + 1 / 3) / 3])


def test_rows_of_low_precision_are_of_float32_and_masks_of_numbers_are_masks():
    mask = np.array([1.0, 0, 1, 1, 1, 1])
    for dtype in (np.float16, np.int32):
        q, k = (4 * Q).astype(dtype), (4 * K).astype(dtype)
        rows = rc.attention_rows(q, k, scale=0.1, mask=mask, causal=True, positions=[2, 3, 4, 5])
        keys, places = mask == 1, np.array([2, 3, 4, 5])
        wide = (q.astype(np.float32), k.astype(np.float32))
        want = rc.attention_rows(*wide, scale=0.1, mask=keys, causal=True, positions=places)
        near(rows, want, rtol=0)
        assert {a.dtype for a in rows.values()} == {np.dtype(np.float32)}
    added = np.where(mask, 0, -np.inf)
    with pytest.raises(ValueError, match="additive masks go to bias="):
        rc.attention_rows(Q, K, mask=added)


def test_as_many_heads_as_tokens_need_no_layout():
    q = RNG.normal(size=(4, 4, 5))
    near(rc.attention_rows(q, q), rc.attention_rows(q, q, layout="hnk"), rtol=0)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 2}], ids=str)
def test_each_example_of_a_cache_has_places_of_its_own(options):
    """The queries are the last of the keys that exist, wherever the padding is."""
    exists = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
    positions = np.array([[2, 3, 4, 5], [0, 1, 2, 3]])
    rows = rc.attention_rows(Q, K, mask=exists, **options)
    near(rc.attention_rows(Q, K, mask=exists, positions=positions, **options), rows, rtol=1e-12)
    for b in range(2):
        one = rc.attention_rows(Q[b], K[b], mask=exists[b], **options)
        near({name: a[b] for name, a in rows.items()}, one, rtol=1e-12)
        entropies = []
        for head, i in itertools.product(range(3), range(4)):
            place, window = positions[b, i], options.get("window", 9)
            keys = [j for j in range(6) if exists[b, j] and place - window < j <= place]
            p = compute_rows(Q[b][[head]], K[b][:, keys])[0, i]
            entropies.append(-(p * np.log(p)).sum())
        entropies = np.reshape(entropies, (3, 4)).mean(axis=1)
        assert_close(one["attention_entropy"], entropies, atol=1e-12)
    rows = rc.attention_rows(Q, K, mask=exists, rows=[3, 1], **options)
    by_one = [rc.attention_rows(Q, K, mask=exists, rows=[i], **options) for i in (3, 1)]
    near(rows, {n: (by_one[0][n] + by_one[1][n]) / 2 for n in ("first_column",)}, rtol=1e-12)


@pytest.mark.parametrize("cap", [2.0, np.float32(0.5)])
def test_the_soft_cap_of_rows(cap):
    q, k = np.random.default_rng(5).normal(size=(2, 3, 6, 4)) * 3
    scores = cap * np.tanh(q @ k.swapaxes(-1, -2) / 2 / cap)
    scores = np.where(np.tri(6, dtype=bool), scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    rows = rc.attention_rows(q, k, causal=True, soft_cap=cap)
    np.testing.assert_allclose(rows["attention_entropy"], rc.attention_entropy(weights), rtol=1e-6)
    np.testing.assert_allclose(
        rows["largest_weight"], rc.measures.largest_weight(weights), rtol=1e-6
    )
    with pytest.raises(ValueError, match=r"soft_cap=0\.0 is not in"):
        rc.attention_rows(q, k, soft_cap=0)
