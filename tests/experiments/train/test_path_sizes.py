"""Chained attention, the skip's share, predicted sizes, padded texts: against brute force."""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.train import path_sizes as pp
from rank_collapse.measures.norms import composite_norm
from tests.oracles import draws
from tests.oracles.path_examples import chain_effects, over_batch, profile_in_memory
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused


def test_elementary_shares_are_sums_over_subsets():
    alpha = np.array([0.2, 0.9, 0.55, 0.7])
    expected = np.zeros(5)
    for taken in itertools.product([False, True], repeat=4):
        expected[sum(taken)] += np.prod(np.where(taken, 1 - alpha, alpha))
    ours = np.exp(pp.log_elementary_shares(jnp.asarray(alpha)))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_one_alpha_gives_the_published_formula(alpha):
    depth, heads, initial, c = 4, 3, 2.5, 1.1
    expected = [
        math.comb(depth, k)
        * heads**k
        * alpha ** (depth - k)
        * (1 - alpha) ** k
        * initial
        / c ** (3**k - 1)
        for k in range(depth + 1)
    ]
    ours = pp.predicted_sizes(alpha, depth, heads, initial, c)
    assert_close(ours, np.log10(expected), atol=1e-5)
    by_layer = pp.predicted_sizes(jnp.full(depth, alpha), depth, heads, initial, c)
    assert_close(by_layer, ours, atol=1e-5)


@pytest.mark.parametrize("by_layer", [False, True])
def test_predictions_in_double_precision_are_finite_where_single_precision_is_not(x64, by_layer):
    """3^90 is above the largest float32."""
    alpha, depth, heads, initial, c = mpmath.mpf("0.25"), 90, 3, mpmath.mpf(2), mpmath.mpf("1.5")
    expected = [
        mpmath.log10(mpmath.binomial(depth, k) * heads**k * initial)
        + mpmath.log10(alpha) * (depth - k)
        + mpmath.log10(1 - alpha) * k
        - mpmath.log10(c) * (mpmath.mpf(3) ** k - 1)
        for k in range(depth + 1)
    ]
    shares = np.full(depth, 0.25) if by_layer else 0.25
    measured = np.asarray(pp.predicted_sizes(shares, depth, heads, 2.0, 1.5))
    assert measured.dtype == np.float64 and measured[-1] < -1e41
    assert_close(measured, np.array(expected, float), rtol=1e-10)


def test_predictions_stay_in_range_at_any_depth():
    sizes = np.asarray(pp.predicted_sizes(0.5, 30, 12, 1.0, 1.3))
    assert np.isfinite(sizes).all() and sizes[-1] < -1e12
    assert np.isfinite(pp.predicted_sizes(0.5, 100, 12, 1.0, 1.0)).all()
    is_refused(
        r"\(2,\) is neither one value nor \[3\]", pp.predicted_sizes, jnp.array([0.1, 0.2]), 3, 2
    )


def test_skip_share_from_the_branches():
    config = rc.san_skip(2, 2, 4)

    params = draws.parameters(config, bias_scale=0.0)

    @jax.jit
    @jax.vmap
    def sizes(x):
        trace = rc.apply(params, x, config)
        return trace, pp.branch_sizes(params, trace, config)

    traces, (skip, branch) = sizes(draws.normal(3, 5, 4))

    def norm(a):
        a = np.abs(a)
        return np.sqrt(a.sum(axis=-2).max(axis=-1) * a.sum(axis=-1).max(axis=-1))

    n_x, n_sa = norm(traces.hidden[:, :-1]).sum(axis=0), norm(traces.attention_branch).sum(axis=0)
    np.testing.assert_allclose(pp.skip_share(skip, branch), n_x / (n_x + n_sa), rtol=1e-5)
    one = pp.skip_share(skip[0], branch[0])
    np.testing.assert_allclose(one, skip[0] / (skip[0] + branch[0]), rtol=1e-6)
    several = pp.skip_share(*(jnp.stack([sizes, 2 * sizes]) for sizes in (skip, branch)))
    np.testing.assert_allclose(several, n_x / (n_x + n_sa), rtol=1e-5)


@pytest.mark.full
def test_a_small_gain_leaves_nearly_all_to_the_skip():
    """α beside the sizes of paths by length, which fall by about γ with every layer."""
    config = rc.san_skip(2, 2, 4).replace(branch_gain=0.01)
    params, x = draws.parameters(config, bias_scale=0.0), draws.normal(5, 4)
    alpha = pp.skip_share(*pp.branch_sizes(params, rc.apply(params, x, config), config))
    sums = rc.path_contributions(params, x, config)
    size = jnp.linalg.norm(sums.by_length[1]) / jnp.linalg.norm(sums.output)
    assert np.all(alpha > 0.98) and size < 0.02 * config.depth
    plain = rc.apply(params, x, config.replace(branch_gain=1.0))
    skip, branch = pp.branch_sizes(params, plain, config.replace(branch_gain=1.0))
    assert pp.skip_share(skip, branch)[0] < 0.9


def test_chains_of_uniform_attention_are_rank_one_and_skips_are_not():
    uniform = jnp.full((3, 2, 4, 4), 0.25)
    to_mean, to_rank_one = pp.chained_residual(uniform, np.array([0, 2, 1]))
    assert to_mean < 1e-6 and to_rank_one < 1e-6
    # The identity: ‖I − 11ᵀ/4‖ has rows and columns of absolute sum 6/4; all singular values are 1.
    to_mean, to_rank_one = pp.chained_residual(uniform, np.array([2, 2, 2]))
    assert float(to_mean) == pytest.approx(1.5)
    assert float(to_rank_one) > 0.9


def test_chains_that_vanish():
    """Sinks that take nearly all, the same share in every row: the square of p underflows in
    float32. The second attention is zero.
    """
    sinks = jnp.full((6, 1, 4, 4), 0.25e-5, jnp.float32)
    for attention in (sinks, 0 * sinks):
        ratios = pp.chained_residual(attention, np.zeros(6, int))
        assert_close(ratios, 0, atol=1e-6)


def exact_ratios(attention, path, keep):
    """Both ratios of the product at 60 digits; the best rank one by power iteration."""
    with mpmath.workdps(60):
        n = len(keep)
        product = mpmath.eye(n)
        for heads, choice in zip(attention, path, strict=True):
            if choice < len(heads):
                product = mpmath.matrix(heads[choice].tolist()) * product
        rows = np.array(product.tolist(), object)[keep]
        v = rows.sum(axis=0)
        for _ in range(60):
            v = rows.T @ (rows @ v)
            v = v / mpmath.sqrt((v**2).sum())

        def size(a):
            a = np.vectorize(abs)(a)
            return mpmath.sqrt(a.sum(axis=0).max() * a.sum(axis=1).max())

        residuals = rows - rows.mean(axis=0), rows - np.outer(rows @ v, v)
        return [float(size(residual) / size(rows)) for residual in residuals]


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_any_length_keep_their_digits(dtype, share):
    """If rows sum to 1, the ratios lose a factor with every matrix. If not, as with a sink,
    products stay away from 1pᵀ and approach another matrix of rank one.
    """
    rng, keep = np.random.default_rng(0), np.arange(6) < 5
    scores = np.where(keep, rng.normal(size=(24, 2, 6, 6)) * 0.3, -np.inf)
    attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = attention.sum(axis=-1, keepdims=True)
    if share == 1:  # what is exact in the oracle is rounded here
        attention = attention / sums
    else:
        attention = share * attention / sums * rng.uniform(0.5, 1, size=sums.shape)
    path = rng.integers(0, 3, size=24)
    path[[0, 7, 23]] = 2
    with jax.enable_x64(dtype == np.float64):
        ours = jax.jit(pp.chained_residual)(attention.astype(dtype), path, mask=keep)
    if share == 1:  # the oracle's rows sum to 1 to all of its digits
        with mpmath.workdps(60):
            exact = np.vectorize(mpmath.mpf)(attention.astype(object))
            attention = exact / exact.sum(axis=-1, keepdims=True)
    expected = exact_ratios(attention, path, keep)
    assert (max(expected) < 1e-10) == (share == 1)
    rounding = np.finfo(dtype).eps
    atol = 0 if share == 1 else 10 * rounding
    assert_close(ours, expected, rtol=4 * np.sqrt(rounding), atol=atol)


def test_measured_sizes_are_norms_of_each_length():
    c = np.asarray(draws.normal(3, 5, 4)) + 2
    norm, residual = jax.jit(pp.measured_sizes)(c)
    assert float(norm[1]) == pytest.approx(np.log10(rc.composite_norm(c[1])), abs=1e-5)
    expected = np.log10(rc.composite_norm(rc.residual(c[1])))
    assert float(residual[1]) == pytest.approx(float(expected), abs=1e-5)


CONFIG = rc.transformer(3, 2, 8, d_ff=12)
LENGTHS = (6, 4, 5)


@pytest.fixture(scope="module")
def batch():
    params, x = draws.parameters(CONFIG), np.array(draws.normal(3, 6, 8))
    mask = np.arange(6)[None, :] < np.array(LENGTHS)[:, None]
    return params, {"x": x, "mask": mask}


@pytest.mark.full
def test_profiles_of_padded_texts_are_those_of_the_texts_alone(batch):
    params, inputs = batch
    measures = ("residual_ratio", "token_cosine", "effective_rank")
    profiles = over_batch(profile_in_memory, params, CONFIG, inputs, measures=measures)
    for i, n in enumerate(LENGTHS):
        hidden = rc.apply(params, inputs["x"][i, :n], CONFIG).hidden
        for measure in measures:
            expected = [float(getattr(rc, measure)(h)) for h in hidden]
            np.testing.assert_allclose(profiles[measure][i], expected, rtol=2e-5)
    unpadded = profile_in_memory(params, inputs["x"][0], CONFIG)["residual_ratio"]
    np.testing.assert_allclose(profiles["residual_ratio"][0], unpadded, rtol=1e-5)


def plain_composite(a):
    return np.sqrt(np.abs(a).sum(axis=0).max() * np.abs(a).sum(axis=1).max())


@pytest.mark.full
def test_chain_effects(batch):
    params, inputs = batch
    effects = over_batch(chain_effects, params, CONFIG, inputs, num_paths=4)
    assert effects.shape == (3, 3, 4)
    n = LENGTHS[1]
    x = jnp.asarray(inputs["x"])
    unpadded = chain_effects(params, x[1, :n], CONFIG, num_paths=4)
    near(jax.tree.map(lambda a: a[1], effects), unpadded, rtol=1e-4, atol=1e-6)
    # The first text is not padded: its chains, multiplied out.
    attention = np.asarray(rc.apply(params, inputs["x"][0], CONFIG).attention, np.float64)
    paths = rc.paths.sample_path_sets(jax.random.key(0), range(1, 4), 1, 4, 3, 2)[:, 0]
    for k, p in np.ndindex(3, 4):
        product = np.eye(6)
        for weights, head in zip(attention, paths[k, p], strict=True):
            product = (weights[head] if head < 2 else np.eye(6)) @ product
        u, s, v = np.linalg.svd(product)
        to_mean, to_rank_one = pp.chained_residual(jnp.asarray(attention, x.dtype), paths[k, p])
        for residual, ratios in (
            (product - product.mean(axis=0), (effects[0, k, p], to_mean)),
            (product - s[0] * np.outer(u[:, 0], v[0]), (to_rank_one,)),
        ):
            expected = plain_composite(residual) / plain_composite(product)
            np.testing.assert_allclose(ratios, expected, rtol=1e-4)


@pytest.mark.parametrize(("excess", "is_rounding"), [(6, True), (-6, True), (20, False)])
def test_a_row_that_sums_to_one_up_to_rounding_counts_as_one_that_does(excess, is_rounding):
    """Of n = 8 tokens a sum may be off by n of the last digits; a sink is another sum."""
    n = 8
    attention = np.full((1, n, n), 1 / n, np.float32)
    attention[0, 0, 0] += excess * np.finfo(np.float32).eps
    token_mask = jnp.ones(n, bool)
    mean = jnp.arange(1.0, n + 1)
    chain = pp.Chain(mean, jnp.zeros((n, n)))
    longer = pp.extend_chain(jnp.asarray(attention), 0, chain, token_mask)
    drift = np.where(np.arange(n) == 0, float(attention[0, 0].sum(dtype=float)) - 1, 0)
    change = np.outer(np.zeros(n) if is_rounding else drift, mean)
    np.testing.assert_allclose(longer.residual, change - change.mean(axis=0), rtol=0.2)
    assert is_rounding or np.abs(longer.residual).max() > 0
    skipped = pp.extend_chain(jnp.asarray(attention), 1, chain, token_mask)
    np.testing.assert_array_equal(skipped.mean, mean)


def test_both_summands_of_a_sublayer_are_measured_on_the_tokens_that_exist(monkeypatch):
    """Beside the same states without padding, in every layer."""
    config, keep = rc.san_skip(1, 2, 4), jnp.array([True, False, True, True])
    states = {name: draws.normal(4, 4, seed=i) for i, name in enumerate(("stream", "branch"))}
    values = SimpleNamespace(spec="spec", state="state", branch_output="output")
    monkeypatch.setattr(pp, "scale_summands", lambda *_: tuple(states.values()))
    monkeypatch.setattr(pp, "replay", lambda measure, *_: measure(None, {"attention": values}))
    sizes = pp.branch_sizes.__wrapped__("params", "trace", config, mask=keep)
    expected = [composite_norm(x[np.asarray(keep)]) for x in states.values()]
    assert_close(sizes, expected, rtol=1e-6)


@pytest.mark.parametrize("norm", ["inf", "max"])
def test_the_ratios_of_a_chain_are_in_the_norm_that_is_asked_for(norm):
    """Of two layers with unequal heads, and a skip; the best rank one by NumPy's SVD."""
    sizes = {
        "inf": lambda a: np.abs(a).sum(axis=1).max(),
        "max": lambda a: np.abs(a).max(),
    }
    attention = np.random.default_rng(5).dirichlet(np.ones(4), (3, 2, 4))
    product = attention[2, 0] @ attention[0, 1]
    u, s, v = np.linalg.svd(product)
    residuals = product - product.mean(axis=0), product - s[0] * np.outer(u[:, 0], v[0])
    expected = [sizes[norm](residual) / sizes[norm](product) for residual in residuals]
    ours = pp.chained_residual(jnp.asarray(attention, jnp.float32), np.array([1, 2, 0]), norm)
    assert_close(ours, expected, rtol=1e-4)


def test_small_residuals_are_in_the_norm_that_is_asked_for():
    """Beside 1pᵀ the best rank one leaves R(1 − vvᵀ), to first order."""
    rng = np.random.default_rng(6)
    mean, change = rng.uniform(1, 2, 4), 1e-6 * rng.normal(size=(4, 4))
    change -= change.mean(axis=0)
    chain = pp.Chain(jnp.asarray(mean, jnp.float32), jnp.asarray(change, jnp.float32))
    direction = mean / np.linalg.norm(mean)
    left = change - np.outer(change @ direction, direction)
    size = (mean + change).sum(axis=1).max()
    expected = [np.abs(a).sum(axis=1).max() / size for a in (change, left)]
    assert_close(pp.chain_residual_ratios(chain, jnp.ones(4, bool), "inf"), expected, rtol=1e-4)


def test_sizes_of_lengths_are_of_the_tokens_that_exist():
    c = np.asarray(draws.normal(3, 4, 4)) + 2
    c[:, 1] += 50
    keep = np.array([True, False, True, True])
    norm, residual = pp.measured_sizes(jnp.asarray(c), mask=jnp.asarray(keep))
    rows = c[:, keep]
    expected = [plain_composite(a) for a in rows]
    assert_close(norm, np.log10(expected), atol=1e-5)
    expected = [plain_composite(a - a.mean(axis=0)) for a in rows]
    assert_close(residual, np.log10(expected), atol=1e-5)


def test_the_law_of_alpha_joins_the_sizes_of_all_samples():
    """R_0 is a mean of residuals, and ln c half of the mean of −ln of single ratios."""
    rng = np.random.default_rng(4)
    skip, branch = rng.uniform(1, 3, (2, 3, 2)), rng.uniform(1, 9, (2, 3, 2))
    initial, single = np.array([[1.0, 2.0, 9.0], [1.0, 1.0, 3.0]]), rng.uniform(0.01, 1, (2, 3, 4))
    arrays = (jnp.asarray(a, jnp.float32) for a in (skip, branch, initial, single))
    alpha, predicted = pp.alpha_law(*arrays, 3)
    first, second = shares = skip.sum(axis=(0, 1)) / (skip + branch).sum(axis=(0, 1))
    assert_close(alpha, shares, rtol=1e-5)
    c = math.exp(-np.log(single).mean() / 2)
    sums = [first * second, first * (1 - second) + second * (1 - first), (1 - first) * (1 - second)]
    expected = [s * 3**k * initial.mean() / c ** (3**k - 1) for k, s in enumerate(sums)]
    assert_close(predicted, np.log10(expected), atol=1e-4)
