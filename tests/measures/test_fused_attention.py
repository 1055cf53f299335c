"""Options of the measures of attention: thresholds, masks of each shape, caches, refusals."""

import itertools

import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(5)


SCORES, Q, K = np.zeros((4, 4)), RNG.normal(size=(2, 3, 4, 5)), RNG.normal(size=(2, 1, 6, 5))
SHORT = K[:, :, :4]


@parametrize_refusals(
    [
        (lambda: rc.measures.largest_logit(SCORES, mask=np.ones((1, 4, 4), bool)), r"\(1, 4, 4\)"),
        (lambda: rc.measures.largest_logit(SCORES[0]), r"\(4,\) are not"),
        (lambda: rc.measures.largest_logit(SCORES[:, :3], mask=np.ones(3, bool)), r"\(3, 3\)"),
        (lambda: rc.attention_rows(Q, K, rows=[0, -1]), "not all from 0 to 3"),
        (lambda: rc.attention_rows(Q, K, rows=[[0, 1]]), r"rows of shape \(1, 2\) and dtype int64"),
        (lambda: rc.attention_rows(Q, K, rows=2), r"rows of shape \(\) and dtype int64 are not"),
        (lambda: rc.attention_rows(Q, K, rows=[0.0]), r"rows of shape \(1,\) and dtype float64"),
        (lambda: rc.attention_rows(Q, K, mask=np.ones(4, bool)), r"mask of shape \(4,\) is not"),
        (
            lambda: rc.attention_rows(Q, SHORT, segments=[0, 0, 1, 1], positions=[0, 1, 2, 3]),
            "excludes rows=, positions=",
        ),
        (lambda: rc.attention_rows(Q, K, segments=[0, 0, 1, 1]), "segments= covers all tokens"),
        (lambda: rc.attention_rows(Q, K, causal=True, positions=[0, 1, 2]), r"\(3,\) are not"),
        (lambda: rc.attention_rows(Q, K, window=3), "4 queries have 6 keys: pass positions="),
        (lambda: rc.attention_rows(Q, K[..., :4]), "does not fit"),
        (lambda: rc.attention_rows(Q, K[:1]), "does not fit"),
        (lambda: rc.attention_rows(Q[0], K[0, 0]), r"k of \(6, 5\) are not \[..., h, n, k\]"),
        (lambda: rc.attention_rows(Q[0, 0], K[0]), r"q of shape \(4, 5\) and k of .* are not"),
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
    is_refused("pass an additive mask as bias=", rc.attention_rows, Q, K, mask=added)


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
    is_refused(r"soft_cap=0\.0 is not in", rc.attention_rows, q, k, soft_cap=0)


def test_queries_whose_axes_may_be_swapped_need_a_layout():
    q = np.random.default_rng(3).normal(size=(2, 6, 4, 8))  # 6 heads of 4 tokens, or the reverse
    is_refused("layout='hnk'", rc.attention_rows, q, q)
    is_refused("layout='x'", rc.attention_rows, q, q, layout="x")
    one, other = (
        rc.attention_rows(a, a, layout=k) for a, k in ((q, "hnk"), (np.moveaxis(q, 1, 2), "nhk"))
    )
    near(one, other, rtol=1e-12)
    cached = rc.attention_rows(q[:, :, :1], q)  # one query of six heads, with a cache of 4 keys
    assert cached["largest_weight"].shape == (2, 6)


def weigh_by_hand(q, k, i, keys, scale, cap):
    """Computes the weights of one query over some keys."""
    scores = np.array([scale * q[i] @ k[j] for j in keys])
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    e = np.exp(scores - scores.max())
    return e / e.sum()


def measure_by_hand(q, k, documents, keys_exist, *, rows, places, causal, window, scale, cap, sink):
    """Computes the measures of one example [h, n, k] as loops over heads, queries and keys."""
    (h, n, d), (g, m, _) = q.shape, k.shape
    values = {name: np.zeros(h) for name in ("attention_entropy", "largest_weight", "first_column")}
    scale = d**-0.5 if scale is None else scale
    first = int(np.flatnonzero(keys_exist)[0])
    for head in range(h):
        sums, count = np.zeros(3), 0
        for i in rows:
            if m == n and not keys_exist[i]:
                continue
            keys = [j for j in range(m) if keys_exist[j] and documents[j] == documents[i]]
            if causal:
                keys = [j for j in keys if j <= places[i]]
            if window is not None:
                keys = [j for j in keys if abs(j - places[i]) < window]
            if not keys:
                continue
            p = weigh_by_hand(q[head], k[head * g // h], i, keys, scale, cap)
            count += 1
            sums += -(p * np.log(p)).sum(), p.max(), dict(zip(keys, p, strict=True)).get(first, 0)
        for name, total in zip(values, sums, strict=True):
            values[name][head] = total / count
    return values | {"sink_rate": (values["first_column"] > sink).mean()}


USUAL = {"causal": False, "window": None, "scale": None, "soft_cap": None, "sink": 0.3}


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2},
        {"window": 1, "sink": 0.1},
        {"window": 3, "causal": True, "scale": 0.7, "rows": [5, 2, 3]},
        {"rows": [4, 1], "soft_cap": 0.8},
        {"causal": True, "sink": 0.45, "soft_cap": 1.5, "scale": -0.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [6, 8])
def test_rows_are_those_of_loops_over_heads_queries_and_keys(options, m):
    """Of padding between tokens, groups of heads, and more keys than queries at known places."""
    options = {"rows": None} | USUAL | options
    n = 6
    q, k = RNG.normal(size=(2, 4, n, 5)), RNG.normal(size=(2, 2, m, 5))
    exists = np.ones((2, m), bool)
    exists[0, [0, 3]], exists[1, m - 2 :] = False, False
    places = np.arange(n) if m == n else np.array([3, 0, 7, 5, 2, 4])
    positions = {} if m == n else {"positions": places}
    rows = options.pop("rows")
    listed = range(n) if rows is None else rows
    by_hand = options | {"rows": listed, "places": places, "cap": options["soft_cap"]}
    del by_hand["soft_cap"]
    want = [
        measure_by_hand(*example, np.zeros(m), keys, **by_hand)
        for *example, keys in zip(q, k, exists, strict=True)
    ]
    ours = rc.attention_rows(q, k, mask=exists, rows=rows, **positions, **options)
    for b in range(2):
        near({name: a[b] for name, a in ours.items()}, want[b], rtol=1e-9)
    swapped = [np.moveaxis(a, -2, -3) for a in (q, k)]
    options |= {"layout": "nhk", "rows": rows, "mask": exists} | positions
    near(rc.attention_rows(*swapped, **options), ours, rtol=1e-12)


@pytest.mark.parametrize("num_segments", [None, 3])
@pytest.mark.parametrize(
    "options",
    [{"window": 2}, {"causal": True, "window": 2, "soft_cap": 0.8, "scale": 0.6, "sink": 0.4}],
    ids=str,
)
def test_a_window_counts_the_tokens_of_a_document(options, num_segments):
    """Documents may lie inside of each other; a window is of places in the document."""
    n, segments = 7, np.array([4, 0, 4, 4, 0, 4, 0])
    q, k = RNG.normal(size=(2, n, 5)), RNG.normal(size=(1, n, 5))
    exists = np.arange(n) != 2
    ours = rc.attention_rows(
        q, k, segments=segments, mask=exists, num_segments=num_segments, layout="hnk", **options
    )
    for column, number in enumerate((4, 0)):
        tokens = np.flatnonzero((segments == number) & exists)
        count = len(tokens)
        by_hand = USUAL | options | {"rows": range(count), "places": range(count)}
        by_hand["cap"] = by_hand.pop("soft_cap")
        example = q[:, tokens], k[:, tokens], np.zeros(count), np.ones(count, bool)
        want = measure_by_hand(*example, **by_hand)
        near({name: a[column] for name, a in ours.items()}, want, rtol=1e-9)
    if num_segments:
        assert all(np.isnan(a[2]).all() for a in ours.values())


@pytest.mark.parametrize("leading", [(2,), (2, 1)])
def test_documents_of_a_batch_are_those_of_its_rows(leading):
    """A row has as many results as `num_segments`, those without a document NaN."""
    q, k = RNG.normal(size=(2, 2, 6, 5)), RNG.normal(size=(2, 1, 6, 5))
    segments = np.array([[1, 0, 1, 1, 0, 1], [5, 5, 5, 5, 5, 5]])
    exists = np.array([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]], bool)
    *batch, labels, mask = (a.reshape((*leading, *a.shape[1:])) for a in (q, k, segments, exists))
    ours = rc.attention_rows(*batch, segments=labels, mask=mask, num_segments=2, causal=True)
    for column, row, number in ((0, 0, 1), (1, 0, 0), (2, 1, 5)):
        tokens = np.flatnonzero((segments[row] == number) & exists[row])
        want = rc.attention_rows(q[row][:, tokens], k[row][:, tokens], causal=True, layout="hnk")
        near({name: a[column] for name, a in ours.items()}, want, rtol=1e-9)
    assert all(len(a) == 4 and np.isnan(a[3]).all() for a in ours.values())
