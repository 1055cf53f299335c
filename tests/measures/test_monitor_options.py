"""Options of `rc.monitor` and `rc.profile` together: which tokens, of which examples and layers."""

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.layer_measures import NEEDS_TWO_TOKENS
from rank_collapse.measures.monitor import ATTENTION_MEASURES, TOKEN_MEASURES
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused

RNG = np.random.default_rng(7)
B, H, N, D = 3, 2, 6, 4
X = RNG.normal(size=(B, N, D))
X /= np.linalg.norm(X, axis=-1, keepdims=True)
X[0, 2] *= 8
X[1, [1, 4]] *= 4  # below the default threshold
MASK = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]], bool)
KEPT = {5.0: MASK.copy(), 3.0: MASK.copy()}
KEPT[5.0][0, 2] = False
KEPT[3.0][[0, 1, 1], [2, 1, 4]] = False
P = RNG.dirichlet(np.ones(N), (B, H, N)) * MASK[:, None, None]
P /= P.sum(axis=-1, keepdims=True)


def double(x):
    return x * np.array([1.0, 2.0, 4.0, 8.0])


CHOICES = {
    "raw": ({}, lambda x: x),
    "unit": ({"tokens": "unit"}, lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)),
    "read": ({"tokens": "read", "norm": double}, double),
}


@pytest.mark.parametrize("threshold", KEPT)
@pytest.mark.parametrize("choice", CHOICES)
def test_spikes_are_left_out_of_tokens_of_examples_and_of_the_batch(choice, threshold):
    """Spikes are those of the raw tokens; attention is measured of all tokens that exist."""
    options, change = CHOICES[choice]
    options = options | ({} if threshold == 5 else {"threshold": threshold})
    statistics = rc.monitor(X, P, mask=MASK, exclude="spikes", **options)
    kept = KEPT[threshold]
    examples = [change(x)[rows] for x, rows in zip(X, kept, strict=True)]
    for name in TOKEN_MEASURES:
        least = 2 if name in NEEDS_TWO_TOKENS else 1
        values = [rc.MEASURES[name](x) for x in examples if len(x) >= least]
        assert_close(statistics[name], np.mean(values), err_msg=name)
    pooled = np.stack([x.mean(axis=0) for x in examples])
    assert_close(statistics["batch_residual_ratio"], rc.residual_ratio(pooled))
    assert_close(statistics["batch_effective_rank"], rc.effective_rank(pooled))
    assert float(statistics["left_out"]) == (MASK & ~kept).sum()
    whole = rc.monitor(X, P, mask=MASK)
    for name in (*ATTENTION_MEASURES, "attention_entropy_least", "attention_entropy_largest"):
        assert statistics[name] == whole[name]
    assert "left_out" not in whole
    layers = rc.profile(X[None], mask=MASK, batch_axis=1, exclude="spikes", **options)
    np.testing.assert_array_equal(layers.left_out[0], (MASK & ~kept).sum(axis=-1))
    ratios = [rc.residual_ratio(x) if len(x) > 1 else np.nan for x in examples]
    assert_close(layers["residual_ratio"][0], ratios)
    ranks = rc.profile(X[:1], measures="effective_rank", exclude="spikes", **options)
    assert int(ranks.left_out[0]) == 1 and ranks.rounding is None and ranks.spiked is None


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("exclude", [None, "spikes"])
def test_what_stands_in_the_padding_changes_nothing(exclude, choice, padding):
    options = CHOICES[choice][0] | {"mask": MASK, "exclude": exclude}
    small, padded = 1e-40 * X, np.where(MASK[..., None], 1e-40 * X, padding)
    near(rc.monitor(padded, P, **options), rc.monitor(small, P, **options), rtol=0)
    both = [
        rc.profile(x[None], measures=TOKEN_MEASURES, batch_axis=1, **options)
        for x in (padded, small)
    ]
    near(both[0].measures | both[0].notes, both[1].measures | both[1].notes, rtol=0)


@pytest.mark.parametrize("options", [{}, {"exclude": "spikes"}, {"tokens": "unit"}])
def test_an_example_without_a_token_changes_nothing(options):
    mask = np.concatenate([MASK, np.zeros((1, N), bool)])
    x, p = np.concatenate([X, X[:1]]), np.concatenate([P, P[:1]])
    near(rc.monitor(x, p, mask=mask, **options), rc.monitor(X, P, mask=MASK, **options), rtol=1e-12)


def test_attention_is_measured_where_all_tokens_are_left_out():
    """Its means are over the tokens that exist; those of the tokens are over none."""
    whole, empty = rc.monitor(X, P), rc.monitor(X, P, exclude="spikes", threshold=0.0)
    for name in (*ATTENTION_MEASURES, "attention_entropy_least", "attention_entropy_largest"):
        assert empty[name] == whole[name]
    assert all(np.isnan(empty[name]) for name in TOKEN_MEASURES) and empty["left_out"] == B * N


def test_an_example_of_which_one_token_is_left_has_no_ratio_to_count():
    x = np.array([[[1.0, 2], [2, 1], [1, 1]], [[1, 0], [9, 9], [0, 0]]])
    mask = np.array([[1, 1, 1], [1, 1, 0]], bool)
    statistics = rc.monitor(x, mask=mask, exclude="spikes", threshold=1.6)
    assert float(statistics["left_out"]) == 1 and statistics["spiked"] == rc.monitor(x[0])["spiked"]
    for name in ("residual_ratio", "token_cosine"):
        assert_close(statistics[name], rc.MEASURES[name](x[0]))
    assert_close(statistics["stable_rank_bound"], (1 + rc.stable_rank(x[0])) / 2)


def test_documents_are_read_and_left_out_as_examples_are():
    segments = np.array([[0, 0, 0, 1, 1, 1], [3, 3, 3, 3, 2, 2], [1] * 6])
    options = {"segments": segments, "exclude": "spikes", "threshold": 3.0}
    statistics = rc.monitor(X, mask=MASK, tokens="read", norm=double, **options)
    # of two tokens none is 3 medians long
    documents = [X[0, :2], X[0, 3:5], X[1, [0, 2, 3]], X[1, 4:], X[2, 2:3]]
    assert float(statistics["left_out"]) == 2
    cosines = [rc.token_cosine(double(d)) for d in documents if len(d) > 1]
    assert_close(statistics["token_cosine"], np.mean(cosines))
    layers = rc.profile(X[None], mask=MASK, batch_axis=1, tokens="read", norm=double, **options)
    ratios = [rc.residual_ratio(double(d)) if len(d) > 1 else np.nan for d in documents]
    assert_close(layers["residual_ratio"][0], ratios)


def test_spiked_is_a_share_of_the_examples_of_two_tokens_or_more():
    statistics = rc.monitor(X, mask=MASK)["spiked"]
    assert float(statistics) == 0.5 and float(rc.monitor(X[:1])["spiked"]) == 1
    assert "batch_residual_ratio" not in rc.monitor(X[0])
    assert "batch_residual_ratio" in rc.monitor(X[:2])


def test_a_head_is_a_sink_above_03_of_the_first_key_that_exists():
    p = np.zeros((2, 4, N, N))
    for head, weight in enumerate((0.2, 0.29, 0.31, 0.4)):
        p[0, head, :, 0] = weight
        p[1, head, :, 2] = weight
        p[:, head, :, 5] = 1 - weight
    mask = np.array([np.ones(N), np.arange(N) > 1], bool)
    assert float(rc.monitor(X[:2], p, mask=mask)["sink_rate"]) == 0.5
    assert float(rc.monitor(X[:2], p, mask=mask, sink=0.25)["sink_rate"]) == 0.75
    assert float(rc.monitor(X[:2], p)["sink_rate"]) == 0.25  # of key 0, which the second has not
    wide = np.concatenate([p, 0 * p[..., :1]], axis=-1)  # other keys than the queries
    assert float(rc.monitor(X[:2], wide, mask=mask)["sink_rate"]) == 0.25


def test_entropies_of_the_extreme_heads_are_of_means_over_examples():
    p = np.stack([np.stack([np.eye(N), np.full((N, N), 1 / N)])] * 2)
    p[1] = p[1, ::-1]
    statistics = rc.monitor(X[:2], p)
    assert_close(statistics["attention_entropy_least"], np.log(N) / 2)
    assert_close(statistics["attention_entropy_largest"], np.log(N) / 2)
    masked = rc.monitor(X[:2], p, mask=np.array([[1] * N, [0] * N]))
    assert_close(masked["attention_entropy_least"], 0, atol=1e-12)
    assert_close(masked["attention_entropy_largest"], np.log(N))


def test_weights_of_whole_numbers_are_weights():
    statistics = rc.monitor(X[0], np.eye(N, dtype=int)[None].tolist())
    assert float(statistics["attention_entropy"]) == 0 and float(statistics["largest_weight"]) == 1


def test_leading_axes_and_documents_are_examples():
    x, p = X.reshape(1, B, N, D), P.reshape(1, B, H, N, N)
    near(rc.monitor(x, p, mask=MASK[None]), rc.monitor(X, P, mask=MASK), rtol=1e-12)
    segments = np.array([[[0, 0, 0, 1, 1, 1], [3, 3, 3, 3, 2, 2], [1] * 6]])
    statistics = rc.monitor(x, segments=segments)
    near(statistics, rc.monitor(X, segments=segments[0]), rtol=1e-12)
    documents = [X[0, :3], X[0, 3:], X[1, :4], X[1, 4:], X[2]]
    cosines = [rc.token_cosine(document) for document in documents]
    assert_close(statistics["token_cosine"], np.mean(cosines))
    is_refused("is not .*two tokens", rc.monitor, X[0, :1])
    is_refused("has 5 queries, but x has 6 tokens", rc.monitor, X[0], P[0][:, :5])
    is_refused("with the leading axes of x of", rc.monitor, X, P[:2])
    is_refused("sink=-0.1", rc.monitor, X, sink=-0.1)
