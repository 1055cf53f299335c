"""Packed rows, where an example is a document: all frameworks against one document at a time."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused, parametrize_refusals

B, H, N, D = 2, 3, 7, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, B, N, D)) + 0.5  # of three layers
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [5, 5, 2, 2, 2, 9, 9]])
MASK = np.array([[1, 1, 1, 0, 1, 0, 1], [1, 1, 0, 1, 1, 1, 0]], bool)
# (example, its tokens), by hand; the last document has one token that exists
WHOLE = [(0, [0, 1, 2]), (0, [3, 4, 5, 6]), (1, [0, 1]), (1, [2, 3, 4]), (1, [5, 6])]
PADDED = [(0, [0, 1, 2]), (0, [4, 6]), (1, [0, 1]), (1, [3, 4]), (1, [5])]
Q, K_ROWS = RNG.normal(size=(B, H, N, 5)), RNG.normal(size=(B, 1, N, 5))


def draw_block_weights(seed, documents):
    """Draws weights [b, h, n, n] inside the documents; rows of other tokens are 0."""
    p = np.zeros((B, H, N, N))
    for row, places in documents:
        block = np.random.default_rng(seed).dirichlet(np.ones(len(places)), (H, len(places)))
        p[np.ix_([row], range(H), places, places)] = block
    return p


def get_converter(name):
    convert = {"numpy": np.asarray, "jax": jnp.asarray}.get(name)
    return convert or pytest.importorskip("torch").tensor


FRAMEWORKS = pytest.mark.parametrize("convert", ["numpy", "jax", "torch"])
CASES = pytest.mark.parametrize(
    ("mask", "documents"), [pytest.param(None, WHOLE, marks=pytest.mark.full), (MASK, PADDED)]
)


@FRAMEWORKS
@CASES
def test_a_profile_has_a_column_for_each_document(convert, mask, documents):
    convert = get_converter(convert)
    names = ("residual_ratio", "token_cosine", "effective_rank", "spike_norm")
    options = {} if mask is None else {"mask": convert(mask)}
    x = X.astype(np.float32)
    profiles = rc.profile(
        convert(x), measures=names, batch_axis=1, segments=convert(SEGMENTS), **options
    )
    for column, (row, places) in enumerate(documents):
        expected = rc.profile(x[:, row, places], measures=names) if len(places) > 1 else None
        for name in names:
            if expected is None and name in ("residual_ratio", "token_cosine"):
                assert np.isnan(np.asarray(profiles[name])[:, column]).all()
            elif expected is not None:
                values = np.asarray(profiles[name])[:, column]
                np.testing.assert_allclose(values, expected[name], rtol=2e-5, err_msg=name)
    p = np.stack([draw_block_weights(seed, documents) for seed in range(2)])
    names = ("attention_entropy", "largest_column", "sink_rate")
    profiles = rc.profile(
        convert(p), measures=names, batch_axis=1, segments=convert(SEGMENTS), **options
    )
    for column, (row, places) in enumerate(documents):
        block = p[:, row][:, :, places][..., places]
        expected = rc.profile(block, measures=names)
        for name in names:
            values = np.asarray(profiles[name])[:, column]
            np.testing.assert_allclose(values, expected[name], rtol=2e-5, atol=1e-7, err_msg=name)


@FRAMEWORKS
@CASES
def test_a_monitor_has_means_over_documents(convert, mask, documents):
    convert = get_converter(convert)
    p = draw_block_weights(3, documents)
    options = {} if mask is None else {"mask": convert(mask)}
    scalars = rc.monitor(convert(X[0]), convert(p), segments=convert(SEGMENTS), **options)
    singles = [
        rc.monitor(X[0, row, places], p[row][:, places][..., places])
        for row, places in documents
        if len(places) > 1
    ]
    for name in ("residual_ratio", "token_cosine"):
        want = np.mean([single[name] for single in singles])
        np.testing.assert_allclose(scalars[name], want, rtol=2e-5, err_msg=name)
    if mask is None:
        for name in ("participation_ratio", "attention_entropy", "largest_column", "sink_rate"):
            want = np.mean([single[name] for single in singles])
            np.testing.assert_allclose(scalars[name], want, rtol=2e-5, err_msg=name)
    pooled = np.array([X[0, row, places].mean(axis=0) for row, places in documents])
    np.testing.assert_allclose(
        scalars["batch_residual_ratio"], rc.residual_ratio(pooled), rtol=2e-5
    )


@FRAMEWORKS
@pytest.mark.parametrize(("mask", "documents"), [(None, WHOLE), (MASK, PADDED)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_attention_stay_in_their_documents(convert, mask, documents, causal):
    convert = get_converter(convert)
    options = {} if mask is None else {"mask": convert(mask)}
    arrays = convert(Q), convert(K_ROWS)
    values = rc.attention_rows(*arrays, segments=convert(SEGMENTS), causal=causal, **options)
    for column, (row, places) in enumerate(documents):
        want = rc.attention_rows(
            Q[row][:, places], K_ROWS[row][:, places], causal=causal, layout="hnk"
        )
        near({n: np.asarray(a)[column] for n, a in values.items()}, want, rtol=2e-5, atol=1e-7)


@pytest.mark.full
def test_one_row_and_constant_segments_in_jit():
    """Documents are known where a program is traced; the tokens are not."""
    segments = SEGMENTS[0]
    traced = jax.jit(lambda x: rc.monitor(x, segments=segments))
    near(traced(X[0, 0]), rc.monitor(X[0, 0], segments=segments), rtol=2e-5)
    ratios = rc.profile(X[:, 0], segments=segments)["residual_ratio"]
    assert ratios.shape == (3, 2)
    assert_close(ratios[:, 0], rc.profile(X[:, 0, :3])["residual_ratio"])


K = 4  # one document more than a row has


@FRAMEWORKS
def test_a_number_of_segments_gives_what_the_split_gives(convert):
    """Documents that a mask and their numbers make, measured without splitting the rows."""
    convert = get_converter(convert)
    options = {"segments": convert(SEGMENTS), "mask": convert(MASK)}
    p = draw_block_weights(3, PADDED)
    outside = (p == 0) / (p == 0).sum(axis=-1, keepdims=True)
    x, p = convert(X), convert(0.99 * p + 0.01 * outside)  # what is left out of a document
    for choice in (
        {},
        {"tokens": "unit", "exclude": "spikes", "threshold": 1.1},
        {"tokens": "read", "norm": lambda x: x / (1 + abs(x))},
    ):
        split, counted = (
            rc.monitor(x[0], p, **options, **choice, num_segments=k) for k in (None, K)
        )
        bounds = [float(scalars.pop("stable_rank_bound")) for scalars in (counted, split)]
        assert_close(*bounds, rtol=0.02)  # power steps on another Gram matrix
        near(counted, split, rtol=1e-6)
        split, counted = (
            rc.profile(x, batch_axis=1, measures=NAMES, **options, **choice, num_segments=k)
            for k in (None, K)
        )
        near(drop_empty(counted.measures), split.measures, rtol=1e-6)
        near(drop_empty(counted.notes), split.notes, rtol=1e-6)
    single = {"segments": convert(SEGMENTS[1]), "mask": convert(MASK[1]), "num_segments": K}
    alone = rc.profile(x[:, 1], measures=NAMES, **single, **choice).measures
    near(alone, {name: a[:, K:] for name, a in counted.measures.items()}, rtol=1e-6)
    weights = {"measures": ("attention_entropy", "largest_column", "sink_rate"), "batch_axis": 1}
    split, counted = (rc.profile(p[None], **weights, **options, num_segments=k) for k in (None, K))
    near(drop_empty(counted.measures), split.measures, rtol=1e-6)
    for window in (None, 2):
        rows = {"causal": True, "window": window, "soft_cap": 2.0}
        split, counted = (
            rc.attention_rows(convert(Q), convert(Q[:, :1]), **options, **rows, num_segments=k)
            for k in (None, K)
        )
        counted = {name: np.asarray(a)[EXISTING] for name, a in counted.items()}
        near(counted, split, rtol=1e-6)


NAMES = ("residual_ratio", "effective_rank", "spike_norm")
EXISTING = [0, 1, 4, 5, 6]  # of two documents, then three, of four each


def drop_empty(columns):
    """Drops the columns of documents that a row does not have, which are empty."""
    arrays = {name: np.asarray(a) for name, a in columns.items()}
    for name, a in arrays.items():
        assert a.shape[-1] == 2 * K
        empty = np.delete(a, EXISTING, axis=-1)
        assert np.isnan(empty).all() if name in NAMES else not np.nan_to_num(empty).any()
    return {name: a[..., EXISTING] for name, a in arrays.items()}


IDS = jnp.array([[1, 1, 1, 2, 2, 0, 0], [3, 3, 3, 3, 1, 1, 1]])  # 0 is padding
SINGLES = [X[0, 0, :3], X[0, 0, 3:5], X[0, 1, :4], X[0, 1, 4:]]


def monitor_packed(x, ids, num_segments=3):
    return rc.monitor(x, segments=ids, mask=ids > 0, num_segments=num_segments)


def test_traced_segments_in_jit_and_vmap():
    x, ratios = jnp.asarray(X[0]), [rc.residual_ratio(s) for s in SINGLES]
    scalars = jax.jit(monitor_packed)(x, IDS)
    np.testing.assert_allclose(scalars["residual_ratio"], np.mean(ratios), rtol=1e-5)
    by_row = jax.vmap(monitor_packed)(x, IDS)["residual_ratio"]
    np.testing.assert_allclose(by_row, np.reshape(ratios, (2, 2)).mean(axis=1), rtol=1e-5)
    monitor_one = jax.jit(functools.partial(monitor_packed, num_segments=1))
    for ids in (IDS, IDS.at[0].set(1)):  # of both rows, of the second alone
        assert all(np.isnan(a) for a in monitor_one(x, ids).values())

    @functools.partial(jax.jit, static_argnums=2)
    def profile_packed(x, ids, count):
        options = {"segments": ids, "mask": ids > 0, "batch_axis": 1}
        return rc.profile(x, num_segments=count, **options)["residual_ratio"]

    profiles = profile_packed(jnp.asarray(X), IDS, 2)
    np.testing.assert_allclose(profiles[0], ratios, rtol=1e-5)
    assert np.isnan(profile_packed(jnp.asarray(X), IDS.at[0].set(1), 1)).all()


@pytest.mark.full
def test_the_gradient_of_traced_segments():
    x = jnp.asarray(X[0])
    gradient = jax.jit(jax.grad(lambda x: monitor_packed(x, IDS)["residual_ratio"]))(x)
    gradients = [jax.grad(rc.residual_ratio)(jnp.asarray(s)) / 4 for s in SINGLES]
    expected = np.zeros_like(X[0])
    expected[0, :3], expected[0, 3:5], expected[1, :4], expected[1, 4:] = gradients
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_constant_segments_with_a_mask_in_jit():
    for mask in (MASK, MASK.tolist(), MASK.astype(np.float32)):
        traced = jax.jit(lambda x, mask=mask: rc.monitor(x, segments=SEGMENTS, mask=mask))(X[0])
        near(traced, rc.monitor(X[0], segments=SEGMENTS, mask=MASK), rtol=1e-4)
    traced = jax.jit(lambda x: rc.profile(x, segments=SEGMENTS, mask=MASK, batch_axis=1).measures)(
        X
    )
    near(traced, profile(segments=SEGMENTS, mask=MASK).measures, rtol=1e-5)
    traced = jax.jit(lambda q, k: rc.attention_rows(q, k, segments=SEGMENTS, mask=MASK))(Q, K_ROWS)
    near(traced, rc.attention_rows(Q, K_ROWS, segments=SEGMENTS, mask=MASK), rtol=1e-5)


profile = functools.partial(rc.profile, X, batch_axis=1)


@parametrize_refusals(
    [
        (lambda: profile(segments=SEGMENTS * 1.0), "float64"),
        (lambda: profile(segments=SEGMENTS[:, :3]), r"\(2, 3\)"),
        (lambda: profile(segments=SEGMENTS, mask=0 * MASK), "no document"),
        (lambda: rc.attention_rows(Q, K_ROWS, segments=SEGMENTS, rows=[0]), "rows="),
        (lambda: profile(segments=SEGMENTS, num_segments=2), "num_segments=2 is less than the 3"),
        (
            lambda: jax.grad(lambda x: rc.monitor(x, segments=SEGMENTS, num_segments=2))(X[0]),
            "is less than the 3 documents in a row",
        ),
        (lambda: profile(num_segments=2), "needs segments="),
        (lambda: rc.monitor(X[0], num_segments=2), "needs segments="),
        (lambda: rc.attention_rows(Q, Q, num_segments=2), "needs segments="),
        (lambda: rc.monitor(X[0], segments=SEGMENTS, num_segments=0), "num_segments=0"),
        (lambda: jax.jit(lambda s: profile(segments=s))(SEGMENTS), "pass num_segments="),
    ]
)
def test_what_is_no_segment_is_refused(arguments, message):
    is_refused(message, *arguments)


NO_SEGMENTS = {
    "of other numbers": SEGMENTS * 1.0,
    "of one column": SEGMENTS[:, :1],
    "of fewer columns": SEGMENTS[:, :3],
    "of one row, too short": SEGMENTS[0, :3],
    "of one number": SEGMENTS[0, 0],
    "transposed": SEGMENTS.T,
    "of more rows": np.concatenate([SEGMENTS, SEGMENTS[:1]]),
    "of one axis": SEGMENTS.reshape(-1),
}


@FRAMEWORKS
@pytest.mark.parametrize("segments", NO_SEGMENTS.values(), ids=NO_SEGMENTS)
def test_what_is_no_segment_is_refused_with_a_number_and_a_mask_too(convert, segments):
    """In every function, in every framework, with and without num_segments= and mask=."""
    convert = get_converter(convert)
    wrong, message = (
        convert(segments),
        r"dtype \S+ and shape {} are not integers of shape \(7,\) or",
    )
    for mask, count in itertools.product((None, MASK), (None, K)):
        options = {"segments": wrong, "num_segments": count}
        options |= {} if mask is None else {"mask": convert(mask)}
        for measure in (
            functools.partial(rc.profile, convert(X), batch_axis=1),
            functools.partial(rc.monitor, convert(X[0])),
            functools.partial(rc.attention_rows, convert(Q), convert(K_ROWS)),
        ):
            with pytest.raises(ValueError, match=message.format(re.escape(str(segments.shape)))):
                measure(**options)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "bool"])
def test_segments_are_numbers_of_any_whole_dtype(dtype):
    segments = SEGMENTS % 2 if dtype == "bool" else SEGMENTS
    for count in (None, K):
        options = {"mask": MASK, "num_segments": count}
        scalars = rc.monitor(X[0], segments=segments.astype(dtype), **options)
        near(scalars, rc.monitor(X[0], segments=segments, **options), rtol=0)


def test_segments_of_lists_are_those_of_arrays():
    for count in (None, K):
        options = {"num_segments": count, "mask": MASK}
        for measure in (
            functools.partial(rc.monitor, X[0]),
            functools.partial(rc.attention_rows, Q, K_ROWS),
            lambda **o: profile(measures=("residual_ratio",), **o).measures,
        ):
            lists, arrays = (measure(segments=s, **options) for s in (SEGMENTS.tolist(), SEGMENTS))
            near(lists, arrays, rtol=0)


@pytest.mark.parametrize("convert", ["numpy", "torch"])
def test_documents_of_one_token_each_are_measured_by_what_one_token_has(convert):
    """NaN for what takes two tokens; the documents among each other have their ratio."""
    x, convert = X[0], get_converter(convert)
    segments = np.stack([np.arange(N), np.arange(N)[::-1]])
    scalars = rc.monitor(convert(x), convert(np.tile(np.eye(N), (B, H, 1, 1))), segments=segments)
    for name in ("residual_ratio", "token_cosine", "bulk_ratio", "spiked"):
        assert np.isnan(float(scalars[name])), name
    for name, value in (("participation_ratio", 1), ("attention_entropy", 0), ("sink_rate", 1)):
        assert_close(float(scalars[name]), value, atol=1e-12, err_msg=name)
    pooled = x.reshape(-1, D)
    assert_close(float(scalars["batch_residual_ratio"]), rc.residual_ratio(pooled), rtol=1e-12)
    profile = rc.profile(convert(X), measures=("token_cosine",), batch_axis=1, segments=segments)
    assert profile["token_cosine"].shape == (3, B * N)
    assert np.isnan(np.asarray(profile["token_cosine"])).all()
