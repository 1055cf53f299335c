"""Options of `rc.profile`: norms by layer, tokens that exist, limits of rounding."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused

RNG = np.random.default_rng(7)


B, H, N, D = 3, 2, 6, 4


X = RNG.normal(size=(B, N, D))


X /= np.linalg.norm(X, axis=-1, keepdims=True)


X[0, 2] *= 8


X[1, [1, 4]] *= 4  # below the default threshold


def test_each_layer_is_read_by_its_own_norm():
    norms = [lambda h, k=k: h + k for k in range(B)]
    profile = rc.profile(X, tokens="read", norm=norms)["residual_ratio"]
    assert_close(profile, [rc.residual_ratio(x + k) for k, x in enumerate(X)])
    same_profile = rc.profile(X, tokens="read", norm=tuple(norms))["residual_ratio"]
    np.testing.assert_array_equal(same_profile, profile)
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
