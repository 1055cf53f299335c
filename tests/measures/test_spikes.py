"""Measures of tokens of which one holds nearly all of the norm: `MATH.md`, section 19.

python -m tests.measures.test_spikes     prints the table
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.spikes import choose_ratio, choose_tokens, masked_median
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

N, D, LENGTH = 64, 128, 11.3
SPIKES = (0, 100, 1000)
WAYS = {
    "raw": {},
    "unit": {"tokens": "unit"},
    "read": {"tokens": "read", "norm": lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True))},
    "exclude": {"exclude": "spikes"},
}
COLLAPSE = [
    name
    for name, measure in rc.MEASURES.items()
    if measure.needs == "tokens" and not name.startswith("spike_")
]


@functools.cache
def tokens(spike, equal):
    """63 tokens of norm 11.3, nearly equal or independent, beside one of norm `spike`, if any."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D))
    x[1:] = x[1] + 0.01 * x[1:] if equal else x[1:]
    x *= LENGTH / np.linalg.norm(x, axis=1, keepdims=True)
    x[0] *= spike / LENGTH
    return x if spike else x[1:]


def test_padding_does_not_count_for_the_median_of_spikes():
    x = np.concatenate([tokens(100, equal=False)[:9], np.zeros((20, D))])
    exists = np.arange(29) < 9
    _, mask, left_out = choose_tokens(x, exists, exclude="spikes")
    np.testing.assert_array_equal(mask, exists & (np.arange(29) > 0))
    assert left_out == 1


@functools.cache
def measure_tokens(spike, equal, way):
    return rc.profile(tokens(spike, equal)[None], measures=COLLAPSE, **WAYS[way])


def test_the_residual_ratio_says_nothing_of_the_others():
    """It tends to √2 (n − 1)/n with the spike, whatever the others are; unit tokens say more."""
    for equal in (True, False):
        far = rc.residual_ratio(tokens(1e7, equal))
        assert float(far) == pytest.approx(np.sqrt(2) * (N - 1) / N, rel=1e-3)
        profile = measure_tokens(1000, equal, "raw")
        assert profile["residual_ratio"][0] > 1 and 1 < profile["participation_ratio"][0] < 1.03
        unit, _, _ = choose_tokens(tokens(1000, equal), tokens="unit")
        cosine = (1 + (N - 1) * rc.token_cosine(tokens(1000, equal))) / N
        share = rc.residual_ratio(unit, norm="frobenius") ** 2
        assert float(share) == pytest.approx(1 - float(cosine), rel=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spike", SPIKES)
def test_flags_are_set_where_one_token_decides(spike, way):
    """Equal and independent tokens differ by more than a factor of 3 wherever no flag is set."""
    equal, independent = (measure_tokens(spike, kind, way) for kind in (True, False))
    # among equal unit tokens, too, the one that points elsewhere decides
    flagged = bool(spike) and way != "exclude"
    assert bool(equal.spiked[0]) == flagged
    assert bool(independent.spiked[0]) == (flagged and way == "raw")
    if not (flagged and way == "raw"):
        for name in set(COLLAPSE) - {"effective_rank_share", "residual_spike"}:
            low, high = sorted(abs(float(profile[name][0])) for profile in (equal, independent))
            assert high > 3 * low, name
    if way == "exclude":
        assert int(equal.left_out[0]) == int(independent.left_out[0]) == (spike > 0)
        spikeless_profile = measure_tokens(0, True, "raw")
        assert_close(equal["stable_rank"], spikeless_profile["stable_rank"], rtol=1e-12)


def test_closed_forms_of_spikes():
    """One entry of 30 among ones in 4 tokens of 3 features."""
    x = np.ones((2, 4, 3))
    x[1, 2, 1] = -30
    values = {name: rc.MEASURES[name](x)[1] for name in rc.MEASURES if name.startswith("spike_")}
    spike, total = 902, 911
    want = {
        "spike_entry": 30,
        "spike_norm": np.sqrt(spike / 3),
        "spike_share": spike / total,
        "spike_token": 2,
        "spike_feature": 1,
    }
    assert values == pytest.approx(want, rel=1e-12)
    # of tokens a, a, a, a + r the residual is −r/4 three times and 3r/4
    assert float(rc.measures.residual_spike(x)[1]) == pytest.approx(9 / 12, rel=1e-12)
    mask = [True, True, False, True]
    assert float(rc.measures.spike_share(x, mask=mask)[1]) == pytest.approx(1 / 3)
    assert (
        float(rc.measures.spike_entry(x, mask=mask)[1])
        == float(rc.measures.spike_norm(x, mask=mask)[1])
        == 1
    )
    none = [rc.MEASURES[name](x, mask=np.zeros(4, bool)) for name in values]
    assert np.isnan(none).all() and np.isnan(rc.measures.residual_spike(x[:, :2])).all()


def leave_out_far(x):
    """The ratio of the bulk by its definition, one token after another."""
    distances = np.linalg.norm(x - np.median(x, axis=0), axis=1)
    most = max(1, len(x) // 8)
    kept = [
        x[i]
        for i, distance in enumerate(distances)
        if distance <= 5 * np.median(distances) or (distances >= distance).sum() > most
    ]
    return float(rc.residual_ratio(np.array(kept)))


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 20])
def test_the_bulk_is_what_is_left_without_a_few_far_tokens(framework, count):
    """Whether they are long or of the same length; more than an eighth of 48 stay."""
    rng = np.random.default_rng(count)
    x = rng.normal(size=16) + 0.002 * rng.normal(size=(48, 16))
    x[:count] = rng.normal(size=(count, 16)) * rng.choice([1, 300], size=(count, 1))
    expected = leave_out_far(x)
    assert expected < 0.01 if count <= 6 else expected > 0.05
    assert rc.residual_ratio(x) > 0.1 or count == 0
    array = x.astype(np.float32)
    if framework == "jax":
        array = jnp.asarray(array)
    elif framework == "torch":
        array = pytest.importorskip("torch").from_numpy(array)
    np.testing.assert_allclose(float(rc.measures.bulk_ratio(array)), expected, rtol=1e-3)
    padded = np.concatenate([x, rng.normal(size=(5, 16))])
    mask = np.arange(53) < 48
    assert_close(rc.measures.bulk_ratio(padded, mask=mask), expected, rtol=1e-12)
    for scale in (1e-30, 1e30):
        assert_close(rc.measures.bulk_ratio(scale * x), expected, rtol=1e-9)
    order = rng.permutation(48)
    assert_close(rc.measures.bulk_ratio(x[order]), expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_of_fewer_than_eight_tokens_one_may_be_far(count):
    rng = np.random.default_rng(count)
    x = 1 + 0.002 * rng.normal(size=(20, 4))
    x[:count] = [[300, 0, 0, 0], [0, 400, 0, 0]][:count]
    expected = leave_out_far(x[:5])
    assert (expected < 0.01) == (count == 1)
    assert_close(rc.measures.bulk_ratio(x[:5]), expected, rtol=1e-12)
    assert_close(rc.measures.bulk_ratio(x, mask=np.arange(20) < 5), expected, rtol=1e-12)
    for size in (8, 9, 15):  # two of sixteen
        expected = leave_out_far(x[:size])
        assert (expected < 0.01) == (count == 1)
        assert_close(rc.measures.bulk_ratio(x[:size]), expected, rtol=1e-12)
    assert rc.measures.bulk_ratio(x[:16]) < 0.01


def test_the_bulk_of_equal_and_of_few_tokens():
    x = np.ones((9, 4))
    assert rc.measures.bulk_ratio(x) == 0 and rc.measures.bulk_ratio(0 * x) == 0
    x[3:] = np.eye(4)[[0, 1, 2, 3, 0, 1]]
    for part in (x, x[:2], x[2:5]):  # in which none is far
        assert rc.measures.bulk_ratio(part) == rc.residual_ratio(part)
    assert np.isnan(rc.measures.bulk_ratio(x, mask=np.zeros(9, bool)))
    same = np.ones((48, 4))
    same[:7] = 5  # as far as each other: all stay, though six might go
    assert rc.measures.bulk_ratio(same) == rc.residual_ratio(same)


def test_a_verdict_rests_on_the_bulk_where_a_few_tokens_make_more_than_half():
    ratio, bulk = np.array([1.4, 1.4, 0.01, np.nan, 0.5]), np.array([0.1, 0.8, np.nan, 0.1, 0.25])
    np.testing.assert_array_equal(choose_ratio(ratio, bulk), [0.1, 1.4, 0.01, np.nan, 0.5])


@parametrize_refusals(
    [
        (measure, options, message)
        for measure in (rc.profile, rc.monitor)
        for options, message in (
            ({"tokens": "rows"}, "tokens='rows' is not one of"),
            ({"exclude": "large"}, "exclude='large' is not 'spikes' or None"),
            ({"exclude": "spikes", "threshold": np.nan}, "threshold=nan"),
            ({"tokens": "read"}, "tokens='read' needs norm="),
            ({"norm": lambda x: x}, "norm= needs tokens='read', not 'raw'"),
        )
    ]
)
def test_choices_that_are_not_known_are_refused(arguments, message):
    measure, options = arguments
    is_refused(message, lambda: measure(np.ones((2, 4, 3)), **options))


def main():
    print(f"{'measure':22}" + "".join(f"{way + ' ' + str(s):>22}" for way in WAYS for s in SPIKES))
    for name in COLLAPSE:
        row = []
        for way in WAYS:
            for spike in SPIKES:
                both = [measure_tokens(spike, kind, way) for kind in (True, False)]
                flags = "".join("*" if bool(profile.spiked[0]) else " " for profile in both)
                a, b = (float(profile[name][0]) for profile in both)
                row.append(f"{a:9.4f} {b:9.4f} {flags}")
        print(f"{name:22}" + "".join(f"{cell:>22}" for cell in row))


def test_two_tokens_are_as_far_from_their_mean():
    """One of two is no spike: NaN, while three have a largest share."""
    x = np.random.default_rng(0).normal(size=(3, 4))
    assert np.isnan(rc.measures.residual_spike(x[:2]))
    assert np.isnan(rc.measures.residual_spike(x, mask=[True, True, False]))
    squares = ((x - x.mean(axis=0)) ** 2).sum(axis=1)
    assert_close(rc.measures.residual_spike(x), squares.max() / squares.sum())


if __name__ == "__main__":
    main()


RNG = np.random.default_rng(11)


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
    exists = np.array([False, True, True])
    assert rc.measures.spike_token(np.zeros((3, 2)), mask=exists) == 1  # the first that exists
    most_zero = np.array([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert np.isnan(rc.measures.spike_entry(most_zero))
    assert np.isnan(rc.measures.spike_norm(most_zero))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite_have_no_largest_place(bad):
    torch = pytest.importorskip("torch")  # NumPy's are refused
    x = torch.tensor([[1.0, bad], [2.0, 3.0]])
    assert rc.measures.spike_token(x).isnan() and rc.measures.spike_feature(x).isnan()
    assert rc.measures.spike_token(x, mask=[False, True]) == 1


@pytest.mark.full
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_compiled_measures_of_tokens_that_are_not_finite_are_nan(bad):
    """Also those that leave out the tokens far from the others."""
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    broken = x.copy()
    broken[2, 3] = bad
    assert np.isnan(jax.jit(rc.measures.bulk_ratio)(broken))
    names = tuple(name for name, measure in rc.MEASURES.items() if measure.needs == "tokens")
    measure = jax.jit(lambda x, mask: rc.profile(x, measures=names, mask=mask).measures)
    layers, exists = np.stack([x, broken]), np.arange(8) != 2
    for name, values in measure(layers, None).items():
        assert np.isfinite(values[0]) and np.isnan(values[1]), name
    for name, values in measure(layers, exists).items():
        assert values[0] == values[1], name
    assert np.isnan(jax.jit(rc.monitor)(layers)["bulk_ratio"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_is_no_spike_to_leave_out(bad):
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    x[1] *= 1000
    x = np.stack([x, x])
    x[1, 2, 3] = bad
    profile = jax.jit(lambda x, mask: rc.profile(x, exclude="spikes", mask=mask))
    ratios = profile(x, None)["residual_ratio"]
    assert np.isfinite(ratios[0]) and np.isnan(ratios[1])
    others = profile(x, np.arange(8) != 2)
    assert others["residual_ratio"][0] == others["residual_ratio"][1]
    assert others.left_out.tolist() == [1, 1]


def test_a_median_is_of_what_exists_in_each_column():
    x = RNG.normal(size=(2, 5, 3))
    count = np.array([[4], [3]])
    x[0, [1]] = x[1, [0, 4]] = np.inf
    medians = masked_median(x, count)
    assert medians.shape == (2, 1, 3)
    for values, median in zip(x, medians, strict=True):
        assert_close(median[0], np.median(values[np.isfinite(values[:, 0])], axis=0))


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
        is_refused(f"not '{tokens}'", choose_tokens, x, read=x, tokens=tokens)
    is_refused("needs norm=", choose_tokens, x, tokens="read")
