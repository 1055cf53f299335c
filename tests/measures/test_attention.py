"""Measures of attention, and of sampled rows of it: against closed forms and plain loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused, parametrize_refusals


def test_closed_forms_of_rows():
    """Uniform rows, rows at one key, and three of the first beside one of the second."""
    both = np.stack([np.full((3, 5), 0.2), np.eye(3, 5)])
    for measure, uniform, one_hot in (
        (rc.attention_entropy, np.log(5), 0),
        (rc.measures.largest_weight, 0.2, 1),
        (rc.measures.saturated_share, 0, 1),
    ):
        np.testing.assert_allclose(measure(both), [uniform, one_hot], rtol=1e-6)
        value = measure(np.concatenate(both), mask=[1, 1, 1, 1, 0, 0])
        np.testing.assert_allclose(value, 0.75 * uniform + 0.25 * one_hot, rtol=1e-6)
    p = np.random.default_rng(0).dirichlet(np.ones(6), (2, 3, 4))
    assert_close(rc.attention_entropy(p), (-p * np.log(p)).sum(-1).mean(-1))


def test_a_weight_at_the_threshold_is_not_above_it():
    assert float(rc.measures.saturated_share([[0.5, 0.5]], 0.5)) == 0


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
def test_a_sink_beside_the_keys_is_one_key_more(framework):
    """Softmax over one more score, whose weight is left out, has the same entropy."""
    p = np.random.default_rng(0).dirichlet(np.ones(6), (2, 3, 4))
    convert = {"numpy": np.asarray, "jax": jnp.asarray}.get(framework)
    convert = convert or pytest.importorskip("torch").tensor
    entropy = rc.attention_entropy(convert(p[..., :5].astype(np.float32)), missing_key=True)
    np.testing.assert_allclose(entropy, rc.attention_entropy(p), rtol=1e-5)
    is_refused("a row whose sum differs from 1", rc.attention_entropy, p[..., :5])
    is_refused("a row whose sum differs from 1", rc.attention_entropy, 1.5 * p, missing_key=True)


def test_the_places_of_queries_on_a_static_cache():
    """Two queries at places 3 and 4 of eight keys, of which five are filled."""
    q, k = RNG.normal(size=(H, 2, K)), RNG.normal(size=(H, 8, K))
    want = rc.attention_rows(q, k[:, :5], causal=True, positions=[3, 4])
    filled = np.arange(8) < 5
    for options in ({"positions": [3, 4]}, {"mask": filled}):
        near(rc.attention_rows(q, k, causal=True, **options), want, rtol=1e-12)
    by_hand = [scores[: 4 + i] for head in q @ k.swapaxes(-1, -2) for i, scores in enumerate(head)]
    weights = [np.asarray(jax.nn.softmax(jnp.asarray(s / K**0.5))) for s in by_hand]
    entropy = np.reshape([-(p * np.log(p)).sum() for p in weights], (H, 2)).mean(axis=1)
    np.testing.assert_allclose(want["attention_entropy"], entropy, rtol=1e-5)
    is_refused("positions=", rc.attention_rows, q, k, causal=True)
    is_refused("mask", rc.attention_rows, q, k, mask=np.ones((2, 8)))


def test_closed_forms_of_sinks():
    uniform, diagonal, sunk = np.full((4, 4), 0.25), np.eye(4), np.eye(4)[[0] * 4]
    p = np.stack([uniform, diagonal, sunk])
    assert_close(rc.measures.largest_column(p), [0.25, 0.25, 1])
    assert_close(rc.measures.first_column(p), [0.25, 0.25, 1])
    assert float(rc.sink_rate(p)) == pytest.approx(1 / 3)
    assert float(rc.sink_rate(p, sink=0.2)) == 1
    causal = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    harmonic = np.mean(1 / np.arange(1, 5))  # the first key gets 1/i of query i
    assert_close(rc.measures.largest_column(causal), harmonic)


def test_batches_and_masks():
    p = np.random.default_rng(0).dirichlet(np.ones(5), (2, 3, 5))  # [l, h, n, m]
    mask = np.array([False, True, True, True, False])
    largest = p[:, :, 1:4].mean(-2).max(-1)
    assert_close(rc.measures.largest_column(p, mask=mask), largest, rtol=1e-12)
    first = rc.measures.first_column(p, mask=mask, key_mask=mask)
    assert_close(first, p[:, :, 1:4, 1].mean(-1), rtol=1e-12)
    expected = (p[..., 0].mean(-1) > 0.2).mean(-1)
    np.testing.assert_allclose(rc.sink_rate(p, sink=0.2), expected, rtol=1e-6)


def test_the_first_key_is_no_guess_from_the_number_of_queries():
    """All queries look at key 0; the first query does not exist, and there are as many keys."""
    p, queries = np.eye(3)[[0] * 3][None], [False, True, True]
    assert float(rc.measures.first_column(p, mask=queries)[0]) == 1
    assert float(rc.sink_rate(p, mask=queries)) == 1
    assert (
        float(rc.measures.first_column(p, mask=queries, key_mask=queries)[0]) == 0
    )  # key 1 is the first
    assert float(rc.sink_rate(p[..., ::-1], key_mask=[False, False, True])) == 1
    split = np.array([[0, 0.5, 0.5]] * 3)[None]  # also at a key after the first query that exists
    assert float(rc.measures.first_column(split, mask=[False, True, False])[0]) == 0.5
    wide = np.eye(4)[[1] * 3][None]
    assert float(rc.sink_rate(wide, mask=queries, key_mask=[False, True, True, True])) == 1
    x = np.random.default_rng(0).normal(size=(3, 2))
    assert float(rc.monitor(x, p, mask=queries)["sink_rate"]) == 0  # tokens, thus keys too


def test_the_largest_logit_of_each_head_is_of_pairs_that_exist():
    s, exists = np.random.default_rng(0).normal(size=(2, 3, 4, 4)), np.array([1, 0, 1, 1], bool)
    causal = np.tril(np.ones((4, 4), bool))
    for mask, pairs in (
        (None, causal | True),
        (causal, causal),
        (exists, exists[:, None] & exists),
    ):
        expected = [[max(h[pairs]) for h in layer] for layer in s]
        np.testing.assert_array_equal(rc.measures.largest_logit(s, mask=mask), expected)
        largest = jax.jit(lambda s, mask=mask: rc.measures.largest_logit(s, mask=mask))(s)
        np.testing.assert_allclose(largest, expected, rtol=1e-6)


WEIGHTS = [name for name, measure in rc.MEASURES.items() if measure.needs == "attention"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_not_weights_is_refused_and_nan_stays(name):
    measure, p = rc.MEASURES[name], np.full((2, 3, 4), 0.25, np.float32)
    wrong = (
        (p - 0.5, {}, "has the weight -0.25"),
        (2 * p, {}, "has a row whose sum differs from 1 by 1"),
        (p[0, 0], {}, r"shape \(4,\) is not \[..., n, m\]"),
        (p, {"mask": [True, False]}, r"mask of shape \(2,\) does not fit 3 queries"),
    )
    for values, options, message in wrong:
        is_refused(message, measure, values, **options)
    padded = np.concatenate([p, 0 * p[:, :1]], axis=1)  # a row that does not exist
    np.testing.assert_allclose(measure(padded, mask=[1, 1, 1, 0]), measure(p), rtol=1e-6)
    assert np.isfinite(jax.jit(measure)(p - 0.5)).all()  # no value is known
    for fn in (measure, jax.jit(measure)):
        broken = np.asarray(fn(np.where(np.arange(4) == 0, np.nan, p).astype(np.float32)))
        assert np.isnan(broken).all()
    assert np.isnan(measure(p, mask=np.zeros(3, bool))).all()


L, B, H, N, M = 3, 2, 4, 5, 6
BATCH = np.random.default_rng(3).dirichlet(0.3 * np.ones(M), (L, B, H, N)).astype(np.float32)
KEEP = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


def measure_one_by_one(measure):
    """Measures [l, b, ...] one example at a time, without the rows that do not exist."""
    rows = [[BATCH[l, b][:, KEEP[b] == 1] for b in range(B)] for l in range(L)]
    return np.array([[measure(p) for p in layer] for layer in rows])


@pytest.mark.parametrize("framework", ["numpy", "jax", "jit", "torch"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_mask_for_each_example(name, framework):
    """[b, n] of integers, floats and booleans; of all layers, of one, of one head."""
    measure = rc.MEASURES[name]
    convert = {"jax": jnp.asarray}.get(framework, np.asarray)
    if framework == "torch":
        convert = pytest.importorskip("torch").tensor
    traced = lambda p, mask: jax.jit(lambda p: measure(p, mask=mask))(p)  # noqa: E731
    fn = traced if framework == "jit" else measure
    want = measure_one_by_one(measure)
    for mask in (KEEP, KEEP.astype(np.float64), np.broadcast_to(KEEP == 1, (L, B, N)).copy()):
        values = fn(convert(BATCH), mask=convert(mask))
        np.testing.assert_allclose(values, want, rtol=1e-5)
    values = fn(convert(BATCH[1]), mask=convert(KEEP.astype(np.float32)))
    np.testing.assert_allclose(values, want[1], rtol=1e-5)
    if name != "sink_rate":
        values = fn(convert(BATCH[1, :, 2]), mask=convert(KEEP))
        np.testing.assert_allclose(values, want[1, :, 2], rtol=1e-5)
    is_refused(
        r"mask of shape \(3, 5\) does not fit 5 queries of",
        fn,
        convert(BATCH),
        mask=convert(np.ones((L, N), int)),
    )


def test_the_first_key_of_each_example():
    """Padding on the left, and masks of keys: against one example after the other."""
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    p = BATCH[0, ..., :N] * mask[:, None, None]
    p = p / p.sum(axis=-1, keepdims=True)
    for options in ({}, {"key_mask": mask}):
        want = [
            rc.measures.first_column(one, mask=rows, **dict.fromkeys(options, rows))
            for one, rows in zip(p, mask, strict=True)
        ]
        np.testing.assert_allclose(
            rc.measures.first_column(p, mask=mask, **options), want, rtol=1e-6
        )
    assert np.abs(np.asarray(want)[0] - p[0, :, 2:, 2].mean(axis=-1)).max() < 1e-6


def test_a_profile_of_attention():
    """Means over heads, from weights of any form and from traces of both kinds of batches."""
    want = {name: measure_one_by_one(rc.MEASURES[name]) for name in WEIGHTS}
    want = {name: a.mean(axis=-1) if a.ndim == 3 else a for name, a in want.items()}
    for arrays, options in (
        ([*BATCH], {}),
        (BATCH, {"batch_axis": 1}),
        (BATCH.swapaxes(0, 1), {"batch_axis": 0}),
    ):
        profile = rc.profile(arrays, measures=WEIGHTS, mask=KEEP * 1.0, **options)
        assert list(profile.measures) == WEIGHTS and profile.rounding is None
        near(profile, want, rtol=1e-5)
    single = rc.profile(BATCH[:, 0], measures="sink_rate", mask=KEEP[0])["sink_rate"]
    assert_close(single, want["sink_rate"][:, 0])
    config = rc.san(B - 1, 2, 4)  # as many states as examples
    params, x = draws.parameters(config), jnp.asarray(BATCH[0, :, 0, :, :4])
    for trace in (
        rc.network.apply_batch(params, x, config),
        jax.vmap(lambda x: rc.apply(params, x, config))(x),
    ):
        means = rc.profile(trace, measures=["attention_entropy"], mask=KEEP)["attention_entropy"]
        singles = [rc.apply(params, one, config).attention for one in x]
        expected = [
            rc.attention_entropy(p, mask=k).mean(-1) for p, k in zip(singles, KEEP, strict=True)
        ]
        np.testing.assert_allclose(means, np.array(expected).T, rtol=1e-5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_with_a_nan_is_no_distribution(name):
    """The NaN is at a key that no sink looks at; rows that do not exist do not count."""
    p = BATCH[0, 0].copy()
    p[1, 2, 4] = np.nan
    nan_places = [1] if name != "sink_rate" else ...
    for fn in (rc.MEASURES[name], jax.jit(rc.MEASURES[name])):
        values = np.atleast_1d(fn(p))
        assert np.isnan(values[nan_places]).all() and np.isnan(values).sum() == 1
        assert np.isfinite(rc.MEASURES[name](p, mask=np.arange(N) != 2)).all()


def test_masks_of_floats():
    p = BATCH[0, 0]
    np.testing.assert_array_equal(
        rc.measures.first_column(p, mask=[1.0, 1, 0, 0, 1]),
        rc.measures.first_column(p, mask=[1, 1, 0, 0, 1]),
    )
    for wrong in ([0.0, 0, -1e9, -np.inf, 0], [0.5] * N, [0.0] * N, [np.nan, 1, 1, 1, 1]):
        call = partial(rc.measures.first_column, p, mask=wrong)
        is_refused(r"a mask is boolean or has 1 .* additive mask", call)
    traced = jax.jit(lambda mask: rc.measures.first_column(p, mask=mask))
    is_refused("pass an additive mask as bias=", traced, np.ones(N, np.float32))


SCORES = np.zeros((2, 3, 4, 4))


@parametrize_refusals(
    [
        (
            lambda: rc.measures.largest_logit(SCORES, mask=np.ones((3, 3), bool)),
            r"mask of shape \(3, 3\) does not fit scores",
        ),
        (
            lambda: rc.profile([BATCH[0, 0, 0]], measures="sink_rate"),
            r"attention weights of shape \(1, 5, 6\) are not \[l, h, n, m\] or",
        ),
        (
            lambda: rc.profile(BATCH, measures="sink_rate"),
            r"batch_axis=None does not fit attention weights of shape \(3, 2, 4, 5, 6\): it is 1",
        ),
        (
            lambda: rc.attention_rows(Q, KEYS, rows=[0, 6]),
            r"rows=\[0 6\] are not all from 0 to 5",
        ),
        (
            lambda: rc.attention_rows(Q, KEYS, rows=np.arange(6) > 3),
            r"rows of shape \(6,\) and dtype bool are not indices",
        ),
        (lambda: rc.attention_rows(Q[0, 0], KEYS[0, 0]), r"q of shape \(6, 5\)"),
        (lambda: rc.attention_rows(Q, KEYS, window=0), "window=0"),
        (
            lambda: rc.attention_rows(Q, np.ones((B, 3, NUM_KEYS, K))),
            r"q of shape .* does not fit k of shape \(2, 3, 8, 5\)",
        ),
        (
            lambda: rc.measures.first_column(np.eye(4), key_mask=[1, 1, 0]),
            r"key_mask of shape \(3,\) does not fit 4 keys",
        ),
        (lambda: rc.attention_rows(Q, KEYS, scale="1"), "scale='1'"),
        (
            lambda: rc.attention_rows(Q, KEYS, causal=True, positions=np.arange(6) + 0.5),
            "positions of shape .* whole numbers, one for each",
        ),
        (lambda: rc.attention_rows(Q, KEYS, window=2.5), "window=2.5 is not a whole number"),
        (lambda: rc.measures.saturated_share(np.eye(4), np.nan), "threshold=nan"),
        (lambda: rc.measures.saturated_share(np.eye(4), 99), r"threshold=99.0 is not in \[0, 1\]"),
        (lambda: rc.sink_rate(np.eye(4)[None], sink="0.3"), "sink='0.3'"),
        (lambda: rc.sink_rate(np.eye(4)), r"shape \(4, 4\) is not \[..., h, n, m\]"),
    ]
)
def test_what_does_not_fit_is_refused(arguments, message):
    is_refused(message, *arguments)


G, QUERIES, NUM_KEYS, K = 2, 6, 8, 5
RNG = np.random.default_rng(0)
Q, KEYS = RNG.normal(size=(B, H, QUERIES, K)), RNG.normal(size=(B, G, NUM_KEYS, K))
LEFT = np.arange(NUM_KEYS) >= np.array([[0], [3]])  # padding on the left


def compute_weights(q, k, mask=None, causal=False, window=None):
    """Computes full weights [b, h, n, m] by query; zeros where no key may be attended to."""
    n, m = q.shape[-2], k.shape[-2]
    p = np.zeros((B, H, n, m))
    for b, h, i in np.ndindex(B, H, n):
        place = i + m - n
        keys = [
            j
            for j in range(m)
            if (mask is None or np.broadcast_to(mask, (B, m))[b, j])
            and (not causal or j <= place)
            and (window is None or abs(place - j) < window)
        ]
        if keys:
            e = np.exp([q[b, h, i] @ k[b, h // (H // G), j] / np.sqrt(K) for j in keys])
            p[b, h, i, keys] = e / e.sum()
    return p


def drop_positions(options):
    """Drops the places of the queries, which `compute_weights` takes to be the last."""
    return {name: value for name, value in options.items() if name != "positions"}


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 3},
        {"window": 2},
        {"mask": LEFT},
        {"mask": LEFT[1], "causal": True, "window": 4},
    ],
    ids=str,
)
def test_rows_are_those_of_full_weights(framework, options):
    kind = {"numpy": np.asarray, "jax": jnp.asarray}.get(framework)
    kind = kind or pytest.importorskip("torch").tensor
    dtype = np.float32 if framework == "jax" else np.float64
    for keys, rows in (
        (KEYS, [5, 0, 3]),
        (KEYS[:, :, :QUERIES], None),
        (KEYS[:, :, :QUERIES], [4, 2]),
    ):
        arguments = dict(options)
        if "mask" in arguments:
            arguments["mask"] = arguments["mask"][..., -keys.shape[-2] :]
        if keys.shape[-2] > QUERIES:
            arguments["positions"] = np.arange(2, NUM_KEYS)
        p = compute_weights(Q, keys, **drop_positions(arguments))[
            :, :, slice(None) if rows is None else rows
        ]
        mask = np.broadcast_to(arguments.get("mask", True), (B, keys.shape[-2]))
        counted = p.sum(axis=-1) > 0
        if keys.shape[-2] == QUERIES:
            counted &= mask[:, None, slice(None) if rows is None else rows]
        measures = rc.attention_rows(
            kind(Q.astype(dtype)), kind(keys.astype(dtype)), rows=rows, **arguments
        )
        for name, value in measures.items():
            extra = {"key_mask": mask} if name in ("first_column", "sink_rate") else {}
            want = rc.MEASURES[name](p, mask=counted, **extra)
            assert_close(value, want, rtol=2e-5 if framework == "jax" else 1e-12)
            assert type(value) is type(kind(np.ones(2, dtype)))
