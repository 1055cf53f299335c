"""Options of `rc.monitor` and `rc.profile` together: which tokens, of which examples and layers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.layer_measures import NEEDS_TWO_TOKENS
from rank_collapse.measures.monitor import ATTENTION, TOKENS
from rank_collapse.measures.profiles import make_profile
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.measures.spikes import choose_tokens
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused, parametrize_refusals

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
    for name in TOKENS:
        least = 2 if name in NEEDS_TWO_TOKENS else 1
        values = [rc.MEASURES[name](x) for x in examples if len(x) >= least]
        assert_close(statistics[name], np.mean(values), err_msg=name)
    pooled = np.stack([x.mean(axis=0) for x in examples])
    assert_close(statistics["batch_residual_ratio"], rc.residual_ratio(pooled))
    assert_close(statistics["batch_effective_rank"], rc.effective_rank(pooled))
    assert float(statistics["left_out"]) == (MASK & ~kept).sum()
    whole = rc.monitor(X, P, mask=MASK)
    for name in (*ATTENTION, "attention_entropy_least", "attention_entropy_largest"):
        assert statistics[name] == whole[name]
    assert "left_out" not in whole
    layers = rc.profile(X[None], mask=MASK, batch_axis=1, exclude="spikes", **options)
    np.testing.assert_array_equal(layers.left_out[0], (MASK & ~kept).sum(axis=-1))
    ratios = [rc.residual_ratio(x) if len(x) > 1 else np.nan for x in examples]
    assert_close(layers["residual_ratio"][0], ratios)
    ranks = rc.profile(X[:1], measures="effective_rank", exclude="spikes", **options)
    assert int(ranks.left_out[0]) == 1 and ranks.rounding is None and ranks.spiked is None


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
    is_refused("has not 6 queries", rc.monitor, X[0], P[0][:, :5])
    is_refused("beside x of", rc.monitor, X, P[:2])
    is_refused("sink=-0.1", rc.monitor, X, sink=-0.1)


def test_a_token_as_long_as_the_threshold_says_is_none_to_leave_out():
    x = np.array([1.0, -1, 1, 5, 1])[:, None]
    for threshold, left in ((5.0, 0), (4.9, 1), (0.9, 5)):
        for options in ({}, {"mask": np.ones(5, bool)}):
            chosen = choose_tokens(x, exclude="spikes", threshold=threshold, **options)
            assert chosen[2] == left and chosen[1].sum() == 5 - left
    assert choose_tokens(x, exclude="spikes")[2] == 0
    x[3] = 5.01
    _, mask, left = choose_tokens(x, exclude="spikes")
    assert left == 1 and mask.tolist() == [True, True, True, False, True]
    even = np.array([1.0, 1, 3, 9, 1e300])[:, None]  # the median of the four that exist is 2
    exists = np.arange(5) < 4
    for threshold, left in ((4.4, 1), (4.6, 0)):
        assert choose_tokens(even, exists, exclude="spikes", threshold=threshold)[2] == left
    same, mask, left = choose_tokens(even, exists)
    assert same is even and mask is exists and left is None
    for tokens in ("raw", "unit"):
        is_refused(f"not with '{tokens}'", choose_tokens, x, read=x, tokens=tokens)
    is_refused("needs norm=", choose_tokens, x, tokens="read")


def test_each_layer_is_read_by_its_own_norm():
    norms = [lambda h, k=k: h + k for k in range(B)]
    profile = rc.profile(X, tokens="read", norm=norms)["residual_ratio"]
    assert_close(profile, [rc.residual_ratio(x + k) for k, x in enumerate(X)])
    for wrong in (norms[:2], [*norms, norms[0]], [*norms[:2], None], None):
        message = "needs norm=, the norm of all 3 states or one for each"
        is_refused(message, rc.profile, X, tokens="read", norm=wrong)


def test_what_is_not_finite_in_padding_does_not_count():
    x, keep = X.copy(), np.arange(N) < 4
    x[:, 4:], x[2, 0] = np.nan, np.inf
    for kind in ("raw", "unit"):
        profile = rc.profile(x, mask=keep, measures=("residual_ratio", "spike_norm"), tokens=kind)
        want = rc.profile(X[:2, :4], measures=("residual_ratio", "spike_norm"), tokens=kind)
        for name in want.measures:
            assert_close(profile[name][:2], want[name])
            assert np.isnan(profile[name][2])
        assert profile.spiked.tolist() == [*want.spiked.tolist(), False]
        assert not profile.rounding.any()


def test_one_token_has_no_residual_ratio_and_two_have():
    for count in (1, 2):
        mask = np.arange(N) < count
        profile = rc.profile(
            X, measures=("residual_ratio", "token_cosine", "stable_rank"), mask=mask
        )
        isnan = {name: np.isnan(a).all() for name, a in profile.measures.items()}
        assert isnan == {
            "residual_ratio": count < 2,
            "token_cosine": count < 2,
            "stable_rank": False,
        }
    assert np.isnan(rc.profile(X[:, :1])["residual_ratio"]).all()


def test_a_layer_is_spiked_where_one_token_holds_more_than_half():
    half, more = [[1.0], [-1.0], [0.0]], [[2.0], [-1.0], [-1.0]]
    assert rc.profile(np.array([half, more])).spiked.tolist() == [False, True]


def test_rounding_is_at_the_limit_and_overrules_a_spike():
    limit = 2.0**-7
    values = {
        "residual_ratio": np.array([limit, 1.01 * limit, 1]),
        "spiked": np.array([True, True, False]),
        "left_out": np.array([1, 0, 0]),
    }
    profile = make_profile(values, limit)
    assert profile.rounding.tolist() == [True, False, False]
    assert profile.spiked.tolist() == [False, True, False]
    assert list(profile.measures) == ["residual_ratio"] and profile.left_out.tolist() == [1, 0, 0]
    by_layer = make_profile(
        {"residual_ratio": np.full((2, 3), 0.01), "spiked": np.ones((2, 3), bool)},
        np.array([0.1, 0.001]),
    )
    assert by_layer.rounding.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (np.float64, 8 * 2**-52),
        (jnp.float32, 8 * 2**-23),
        ("torch.float32", 8 * 2**-23),
        (np.dtype("float16"), 2**-10),
        (jnp.bfloat16, 2**-7),
        (ml_dtypes.float8_e5m2, 2**-2),
        (np.dtype(ml_dtypes.float8_e4m3fn), 2**-3),
        ("float4_e2m1fn", 2**-1),
    ],
)
def test_rounding_limits_are_those_of_the_digits_of_a_dtype(dtype, limit):
    """ml_dtypes and NumPy say how far 1 is from the next number."""
    assert rounding_limit(dtype) == limit
    if not isinstance(dtype, str):
        name = np.dtype(dtype)
        rounds = 8 if name in (np.float32, np.float64) else 1
        assert float(ml_dtypes.finfo(name).eps) * rounds == limit


@parametrize_refusals([("int32", "dtype='int32' is not one of"), (bool, "bool")])
def test_other_dtypes_are_refused(arguments, message):
    is_refused(message, rounding_limit, *arguments)


def test_the_limit_is_of_each_layer_and_of_the_least_precise_example():
    close = (np.ones((3, 4, 2)) + 2e-3 * RNG.normal(size=(3, 4, 2))).astype(np.float32)
    low = close.astype(ml_dtypes.bfloat16)
    assert rc.profile([close[0], low[1], close[2]]).rounding.tolist() == [False, True, False]
    for examples in ([close, low], [low, close]):
        assert rc.profile(examples, batch_axis=0).rounding.all()
    assert not rc.profile([close, close], batch_axis=0).rounding.any()
    whole = np.full((1, 2, 1), 10**7)  # numbers that are no floats count as float32
    whole[0, 1] += 1
    assert rc.profile(whole)["residual_ratio"][0] > 1e-8 and rc.profile(whole).rounding.all()
    assert not rc.profile(close.astype(np.float64) * 1e-3 + 1).rounding.any()
    last_digit = rc.profile(np.array([[[1.0], [1 + 2**-52]]]))
    assert last_digit["residual_ratio"][0] > 0 and last_digit.rounding[0]


def test_what_has_an_axis_of_heads_is_attention():
    p = RNG.dirichlet(np.ones(3), (2, 2, 2, 3))  # [l, b, h, n, n]
    for arrays, options, shape in (
        (p[:, 0], {}, (2,)),
        (p, {"batch_axis": 1}, (2, 2)),
        ([*p], {}, (2, 2)),
    ):
        profile = rc.profile(arrays, **options)
        assert list(profile.measures) == ["attention_entropy"]
        assert profile["attention_entropy"].shape == shape
    assert_close(profile["attention_entropy"], rc.attention_entropy(p).mean(axis=-1))
    states = RNG.normal(size=(2, 3, 4, 4))  # [l, b, n, d] of as many tokens as features
    for arrays, options in ((states, {"batch_axis": 1}), ([*states], {}), (states[0], {})):
        assert list(rc.profile(arrays, **options).measures) == ["residual_ratio"]
    examples = rc.profile(states.swapaxes(0, 1), batch_axis=0)["residual_ratio"]
    assert_close(examples, rc.residual_ratio(states))


def test_a_profile_is_read_by_names_and_as_a_tuple():
    profile = rc.profile(X, exclude="spikes", measures=["residual_ratio", "residual_spike"])
    measures, rounding, spiked, left_out = profile
    assert profile[0] is profile.measures is measures and profile[3] is left_out is profile.left_out
    assert profile["residual_spike"] is measures["residual_spike"]
    assert profile[1:3] == (rounding, spiked)
    assert list(profile.columns()[1]) == [*measures, "rounding", "spiked", "left_out"]


def test_layers_are_a_list_of_one_shape_of_any_framework():
    x = X.astype(np.float32)
    for layers in (lambda h: [x[0], h], lambda h: (h, x[0])):
        profile = jax.eval_shape(lambda h, layers=layers: rc.profile(layers(h)), x[1])
        assert profile["residual_ratio"].shape == (2,)
        values = rc.profile(layers(jnp.asarray(x[1])))["residual_ratio"]
        near(sorted(values), sorted(rc.residual_ratio(x[:2])), rtol=1e-6)
    is_refused("or there are none", rc.profile, [])
    is_refused("hidden states are None: a model of", rc.profile, [x[0], None])
    is_refused("attention weights are None", rc.profile, [None], measures="sink_rate")


def test_attention_is_measured_of_masks_of_queries_and_of_keys():
    names, exists = ("first_column", "sink_rate", "attention_entropy"), np.arange(N) > 1
    queries = np.array([1, 1, 0, 1, 1, 1], bool)
    p = RNG.dirichlet(np.ones(N), (2, H, N)) * exists
    p /= p.sum(axis=-1, keepdims=True)
    profile = rc.profile(p, measures=names, mask=queries, key_mask=exists)
    first = p[:, :, queries][..., 2].mean(axis=-1)
    assert_close(profile["first_column"], first.mean(axis=-1))
    assert_close(profile["sink_rate"], (first > 0.3).mean(axis=-1))
    rows = p[:, :, queries][..., 2:]
    entropy = -(rows * np.log(rows)).sum(axis=-1).mean(axis=(1, 2))
    assert_close(profile["attention_entropy"], entropy)
    is_refused(
        "segments= and key_mask= exclude each other",
        rc.profile,
        p,
        segments=[0] * N,
        key_mask=exists,
    )
