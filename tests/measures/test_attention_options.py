"""Options of the measures of attention: thresholds, masks of each shape, wrong sums."""

import itertools

import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close
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


OFF = ": pass weights after the softmax"


@parametrize_refusals(
    [
        (sums_to(0.97), {}, rf"a row whose sum differs from 1 by 0\.03{OFF}"),
        (sums_to(1.03), {}, rf"a row whose sum differs from 1 by 0\.03{OFF}"),
        (sums_to(1.04), {"missing_key": True}, rf"a row whose sum differs from 1 by 0\.04{OFF}"),
        ([[0.5, 0.5], [1.5, -0.5]], {}, "has the weight -0.5: pass weights"),
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
    is_refused("a row whose sum differs from 1 by 1", rc.attention_entropy, p)


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
    head_masks = np.array([[np.roll(row, h) for h in range(H)] for row in EXISTS])
    for mask, rows in (
        (EXISTS[1], lambda b, h: EXISTS[1]),
        (EXISTS, lambda b, h: EXISTS[b]),
        (head_masks, lambda b, h: head_masks[b, h]),
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
