"""Attention of kernels of tokens: written out, against drawn weights and scores, and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory import token_kernel
from rank_collapse.theory.score_overlap import overlap_ratios
from tests.oracles import draws
from tests.oracles.draws import parameters, tokens
from tests.support.closeness import assert_close
from tests.theory.test_token_kernel import NONE, make_tokens

score_noise = jax.jit(token_kernel.score_noise)
attention_kernel = jax.jit(token_kernel.attention_kernel)
compute_ratios = jax.jit(overlap_ratios)


def test_scores_have_the_size_of_queries_and_keys_over_the_temperature():
    """√k, the temperature and norms of queries and keys are other sizes of W_Q."""
    config = rc.TransformerConfig(1, 2, 8, d_qk=3, d_v=5)
    params = jax.tree.map(lambda a: a[0], parameters(config).layers.attention)
    queries, keys = (token_kernel.measure_kernel(tokens(n, 8, n)) for n in (3, 4))
    weights = jax.nn.softmax(draws.normal(2, 3, 4))

    def compute(config, temperature=1.0, factor=1.0, **changes):
        changed = params.replace(w_q=params.w_q * np.float32(factor), **changes)
        kernel = attention_kernel(changed, queries, keys, weights, config, temperature, NONE)
        return np.append(kernel.variance, kernel.distance[np.triu_indices(3, 1)])

    near = compute(config, temperature=2.0)
    assert np.abs(near / compute(config, temperature=1e6) - 1).max() > 0.05
    np.testing.assert_allclose(near, compute(config, factor=0.5), rtol=1e-5)
    unscaled = compute(config.replace(scale_scores=False), 2.0, 3**-0.5)
    np.testing.assert_allclose(unscaled, near, rtol=1e-5)
    # queries of mean square 7/3 and keys of 13/3, over the tokens' mean squares
    norms = {"q_norm": np.float32([2, 1, 2**0.5]), "k_norm": np.float32([3, 2, 0])}
    normed = compute(config.replace(qk_norm="head"), 2.0, **norms)
    lengths = np.mean(queries.variance), np.mean(keys.variance)
    size = np.sqrt(7 / 3 * 13 / 3 / lengths[0] / lengths[1])
    size = size / np.sqrt(64 * np.mean(params.w_q**2) * np.mean(params.w_k**2))
    np.testing.assert_allclose(normed, compute(config, 2.0, size), rtol=1e-4)


def test_updates_of_attention_written_out():
    """At equal weights W_V and W_O move tokens by their own size and by what keys move."""
    config = rc.TransformerConfig(1, 2, 8, d_qk=3, d_v=5)
    params = jax.tree.map(lambda a: a[0], parameters(config).layers.attention)
    queries = token_kernel.measure_kernel(tokens(3, 8))
    x, moved = np.asarray(tokens(4, 8, 2)), 0.1 * np.asarray(draws.normal(4, 8, seed=3))
    keys = token_kernel.measure_kernel(x).replace(change=jnp.asarray(moved @ moved.T / 8))
    weights = np.asarray(jax.nn.softmax(draws.normal(2, 3, 4)))

    def change(temperature, keys, **sizes):
        call = params, queries, keys, weights, config, temperature, NONE | sizes
        return np.asarray(attention_kernel(*call).change)

    gain = 8 * np.mean(params.w_v**2) * 10 * np.mean(params.w_o**2)
    kernel, change_kernel = (
        np.mean([p @ a @ p.T for p in weights], axis=0) for a in (x @ x.T / 8, moved @ moved.T / 8)
    )
    ours = change(1e9, keys, w_v=0.03, w_o=0.01)
    np.testing.assert_allclose(ours, gain * (change_kernel + 0.04 * kernel), rtol=1e-4)
    still = keys.replace(change=jnp.zeros((4, 4)))
    by_query, by_key, twice = (
        change(2.0, still, **sizes) for sizes in ({"w_q": 0.1}, {"w_k": 0.1}, {"w_k": 0.2})
    )
    assert np.diag(by_query).min() > 1e-5
    np.testing.assert_allclose(by_key, by_query, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(twice, 2 * by_key, rtol=1e-5, atol=1e-9)


def test_scores_and_their_updates_written_out_for_unequal_weights():
    """Every sum of `attention_kernel`'s formulas in loops, for two heads of three rows."""
    config = rc.TransformerConfig(1, 2, 8, d_qk=3, d_v=5)
    params = jax.tree.map(lambda a: np.asarray(a[0]), parameters(config).layers.attention)
    x, y = (np.asarray(tokens(n, 8, n), float) for n in (3, 4))
    moved_x, moved_y = (0.3 * np.asarray(draws.normal(n, 8, seed=9)) for n in (3, 4))
    changes = moved_x @ moved_x.T / 8, moved_y @ moved_y.T / 8
    queries, keys = (
        token_kernel.measure_kernel(tokens(n, 8, n)).replace(change=jnp.asarray(d, jnp.float32))
        for n, d in zip((3, 4), changes, strict=True)
    )
    weights, temperature = np.asarray(jax.nn.softmax(draws.normal(2, 3, 4)), float), 1.5
    sizes = {"w_q": 0.1, "w_k": 0.2, "w_v": 0.03, "w_o": 0.01}
    ours = attention_kernel(params, queries, keys, weights, config, temperature, NONE | sizes)
    b = 64 * np.mean(params.w_q**2) * np.mean(params.w_k**2) / temperature**2
    q, k, (q_change, k_change) = x @ x.T / 8, y @ y.T / 8, changes
    change, covariance = np.zeros((2, 3, 3))
    variance, distance = np.zeros(3), np.zeros((3, 3))
    for p in weights:

        def centre(a, i, j, p=p):
            """Ã, for which keys are read around the means of rows i and j."""
            return (np.eye(4) - p[i]) @ a @ (np.eye(4) - p[j]).T

        spreads = np.array([np.diag(centre(k, i, i)) for i in range(3)])
        drift = 0.5 * b * np.diag(q)[:, None] * p
        drift = drift * (spreads - (p * spreads).sum(axis=1, keepdims=True))
        second, drifted = np.zeros((3, 3)), drift @ k @ p.T + p @ k @ drift.T
        for i, j in np.ndindex(3, 3):
            pairs, both = np.outer(p[i], p[j]), p[i] * p[j]
            same_key, same_change = (np.diag(centre(a, i, j)) for a in (k, k_change))
            spread = np.sum(pairs * centre(k, i, j) * k)
            spread_of_update = spread + b * q[i, j] * np.sum(both * same_key**3)
            response = np.sum(pairs * centre(k_change, i, j) * k)
            response += b * q[i, j] * np.sum(both * same_key**2 * same_change)
            second[i, j] = b * q[i, j] * spread
            change[i, j] += b * (q_change[i, j] + 0.3 * q[i, j]) * spread_of_update
            change[i, j] += 2 * b * q[i, j] * response
        moved = p @ k_change @ p.T + drift @ k_change @ p.T + p @ k_change @ drift.T
        size = np.sqrt(np.diag(q))
        cosines = ((q / np.outer(size, size)).sum(axis=1) - 1) / 2
        count = 1 / (p**2).sum(axis=1)
        level = b * np.diag(q) * (p * spreads).sum(axis=1) / (1 - 1 / count)
        row_ratios, pair_ratios = np.transpose(
            [compute_ratios(*map(float, row)) for row in zip(count, level, cosines, strict=True)]
        )
        change += moved
        fixed, noise = p @ k @ p.T, second + drifted
        head_variance = np.diag(fixed) + row_ratios * np.diag(noise)
        head_distance = distances(fixed)
        head_distance = head_distance + np.sqrt(np.outer(pair_ratios, pair_ratios)) * distances(
            noise
        )
        variance, distance = variance + head_variance, distance + head_distance
        covariance += 0.5 * np.add.outer(head_variance, head_variance) - head_distance
    assert np.ptp(pair_ratios) > 0.01  # rows differ in what their scores add
    gain = 8 * np.mean(params.w_v**2) * 10 * np.mean(params.w_o**2) / 2
    bias = np.einsum("hv,hvd->d", params.b_v, params.w_o) + params.b_o
    assert_close(ours.change, gain * (change + 0.04 * covariance), rtol=1e-4, atol=1e-5)
    assert_close(ours.variance, gain * variance + np.mean(bias**2), rtol=1e-4)
    assert_close(ours.distance, gain * distance, rtol=1e-4, atol=1e-5)


def test_updates_of_keys_move_scores_and_what_scores_read():
    """At equal weights, with K = 1 + 2·11ᵀ of the keys and an update around a still mean key.

    T_ik(K, D) = tr((1 − 11ᵀ/m) D)/m², once for scores that move, once for the keys that they read.
    """
    config = rc.TransformerConfig(1, 2, 8, d_qk=3, d_v=5)
    params = jax.tree.map(lambda a: a[0], parameters(config).layers.attention)
    queries = token_kernel.measure_kernel(tokens(3, 8))
    identity = np.eye(4, dtype=np.float32)
    moved = 0.3 * (identity - np.float32(0.25))
    keys = token_kernel.from_covariance(identity + 2, moved)
    weights = np.full((2, 3, 4), 0.25, np.float32)
    ours = attention_kernel(params, queries, keys, weights, config, 30.0, NONE).change
    b = 64 * np.mean(params.w_q**2) * np.mean(params.w_k**2) / 30**2
    gain = 8 * np.mean(params.w_v**2) * 10 * np.mean(params.w_o**2)
    expected = 2 * gain * b * queries.covariance * 0.3 * 3 / 16
    np.testing.assert_allclose(ours, expected, rtol=1e-3)


def test_rows_of_large_or_uneven_scores_are_refused():
    """36 is the largest variance in the mean of a row's keys, 1 its standard deviation."""
    p, tau = np.full((4, 4), 0.25), np.array([1, -1, 1, -1])
    spread = np.array([35.9 + 0 * tau, 36.1 + 0 * tau, 4 + 0.99 * tau, 4 + 1.01 * tau])
    covariance = 0.1 + 0.9 * np.eye(4)
    keys = token_kernel.measure_kernel(tokens(4, 8))
    arguments = jax.tree.map(np.float32, (p, covariance, np.ones((4, 4)), spread))
    noise = score_noise(*arguments, keys)
    np.testing.assert_array_equal(np.isnan(noise.variance), [False, True, False, True])


def test_the_noise_of_equally_correlated_scores_of_equal_spread():
    """T_ik(K, K) cov_ik, times the ratios of the correlation that every row has to the others."""
    v, c, n = 0.5, 0.6, 4
    keys, spread = token_kernel.measure_kernel(tokens(4, 8)), 0.3 + 0.1 * np.eye(n)
    covariance = v * (c + (1 - c) * np.eye(n))
    arguments = np.full((n, n), 1 / n), covariance, spread, np.full((n, n), 2.0)
    noise = score_noise(*jax.tree.map(np.float32, arguments), keys)
    ratio, distance_ratio = compute_ratios(float(n), v * 2 / (1 - 1 / n), c)
    assert_close(noise.variance, ratio * v * np.diag(spread), rtol=1e-5)
    apart = distance_ratio * v * (0.4 - 0.3 * c) * (1 - np.eye(n))
    assert_close(noise.distance, apart, atol=1e-5)


def test_attention_of_tokens_of_zeros_adds_its_biases():
    config = rc.TransformerConfig(1, 2, 8)
    params = parameters(config, 1, bias_scale=0.5).layers.attention
    params, x = jax.tree.map(lambda a: a[0], params), jnp.zeros((3, 8))
    weights = jnp.full((2, 3, 3), 1 / 3)

    @jax.jit
    def compute_both(params, x):
        state = token_kernel.measure_kernel(x)
        kernel = token_kernel.attention_kernel(params, state, state, weights, config, 1.0, NONE)
        return kernel, rc.network.multi_head_attention(params, x, x)[0]

    kernel, added = compute_both(params, x)
    np.testing.assert_allclose(kernel.covariance, added @ added.T / 8, rtol=1e-5)


@pytest.mark.full
def test_attention_of_given_weights_is_exact_at_any_width():
    """E over W_V and W_O, of Gaussian entries, at d = 8: means of 4000 draws within 5 errors."""
    config = rc.TransformerConfig(1, 2, 8, mask="causal")
    x, bias = jax.device_put(make_tokens()), 0.4 * draws.normal(8)
    params = parameters(config, 1, bias_scale=0.0).layers.attention
    params = jax.tree.map(lambda a: a[0], params).replace(b_o=bias)
    weights = jax.nn.softmax(draws.normal(2, 5, 5))
    fixed = {"weights": lambda *_: weights}

    def draw_kernel(key):
        keys = jax.random.split(key)
        new = {
            n: jax.random.normal(k, getattr(params, n).shape) * jnp.sqrt(0.3)
            for n, k in zip(("w_v", "w_o"), keys, strict=True)
        }
        out = rc.network.multi_head_attention(params.replace(**new), x, x, edit=fixed)[0]
        return out @ out.T / 8

    kernels = jax.jit(jax.vmap(draw_kernel))(jax.random.split(jax.random.key(3), 4000))
    # mean squares as the recursion reads them: exactly 0.3
    exact = params.replace(
        w_v=jnp.full_like(params.w_v, 0.3**0.5), w_o=jnp.full_like(params.w_o, 0.3**0.5)
    )
    no_values = exact.replace(b_v=jnp.zeros_like(exact.b_v))
    state = token_kernel.measure_kernel(x)
    # no scores: the weights are those given
    out = token_kernel.attention_kernel(no_values, state, state, weights, config, 1e9, NONE)
    error = kernels.std(axis=0) / np.sqrt(len(kernels))
    assert np.all(np.abs(out.covariance - kernels.mean(axis=0)) < 5 * error + 1e-4)


def sample_attention(keys, queries, weights, b, draws, seed=0):
    """Samples (E P K Pᵀ, its error) over Gaussian scores of Cov b Q_ik K_jm where weights > 0."""
    rng, groups = np.random.default_rng(seed), 40
    roots = [np.linalg.cholesky(k + 1e-10 * np.eye(len(k))) for k in (queries, keys)]
    means = []
    for _ in range(groups):
        z = rng.standard_normal((draws // groups, *weights.shape))
        score = np.sqrt(b) * roots[0] @ z @ roots[1].T
        kernel = 0
        for sign in (1, -1):
            p = np.where(weights > 0, np.exp(sign * score), 0)
            p /= p.sum(axis=-1, keepdims=True)
            kernel = kernel + np.mean(p @ keys @ p.transpose(0, 2, 1), axis=0) / 2
        means.append(kernel)
    return np.mean(means, axis=0), np.std(means, axis=0, ddof=1) / np.sqrt(groups)


@jax.jit
def compute_attention(keys, queries, weights, b):
    """Computes the same by `attention_kernel`: W_V W_O of gain 1, W_Q and W_K of b together."""
    config, d = rc.TransformerConfig(1, 1, 8), 8
    params = jax.tree.map(lambda a: a[0], parameters(config, bias_scale=0.0).layers.attention)
    sizes = {"w_q": b**0.25, "w_k": b**0.25, "w_v": 1.0, "w_o": 1.0}
    full = {n: jnp.full_like(getattr(params, n), 1) * s * d**-0.5 for n, s in sizes.items()}
    state = [token_kernel.from_covariance(k, jnp.zeros(k.shape)) for k in (queries, keys)]
    out = token_kernel.attention_kernel(
        params.replace(**full), *state, weights[None], config, 1.0, NONE
    )
    return out.variance, out.distance


def distances(k):
    return 0.5 * (np.diag(k)[:, None] + np.diag(k)[None, :]) - k


@pytest.mark.full
@pytest.mark.parametrize(
    ("n", "draws"),
    [
        pytest.param(3, 40000, marks=pytest.mark.full),
        (17, 8000),
        pytest.param(64, 800, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("rho", "b"), [pytest.param(0.0, 1.0, marks=pytest.mark.full), (0.5, 4.0)])
def test_tokens_of_equal_length_at_any_temperature(n, draws, rho, b, x64):
    """The exact law is within 4 standard errors; the second order is 7 to 60 % off."""
    k = (1 - rho) * np.eye(n) + rho
    weights = np.full((n, n), 1 / n)
    kernel, error = sample_attention(k, k, weights, b, draws)
    variance, distance = compute_attention(k, k, weights, b)
    # all pairs of a row share its error, which their mean has too
    assert abs(variance.mean() - np.diag(kernel).mean()) < 4 * np.diag(error).max()
    pairs = ~np.eye(n, dtype=bool)
    assert abs(distance[pairs].mean() - distances(kernel)[pairs].mean()) < 4 * error.max()
    second = rho + (1 - rho) / n * (1 + b * (1 - rho) * (1 - 1 / n))
    assert abs(second / np.diag(kernel).mean() - 1) > 0.005


@pytest.mark.full
@pytest.mark.parametrize(
    ("n", "longest", "b", "named"),
    [
        (3, 1.2, 1.0, True),
        (5, 1.2, 2.0, True),
        (17, 1.2, 2.0, True),
        (3, 1.5, 5.0, False),
        (5, 1.0, 60.0, False),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_unequal_length_within_the_named_range_and_beyond(n, longest, b, named, causal):
    """One layer's residual is .85 to 1.21 times that of drawn scores, or NaN."""
    lengths = np.geomspace(1 / longest, longest, n)
    k = np.eye(n) * np.outer(lengths, lengths)
    weights = np.tril(np.ones((n, n))) if causal else np.ones((n, n))
    weights = weights / weights.sum(axis=1, keepdims=True)
    _, distance = compute_attention(k, k, weights, b)
    assert np.isnan(distance).any() != named
    if named:
        kernel, _ = sample_attention(k, k, weights, b, 4000)
        assert 0.85 < np.sqrt(distance.mean() / distances(kernel).mean()) < 1.21


CAUSAL = np.tril(np.ones((7, 7)))


@pytest.mark.parametrize(
    ("name", "allowed", "lengths", "keys"),
    [
        ("causal", CAUSAL, 1.0, 7),
        ("lengths", np.ones((7, 7)), np.linspace(0.5, 1.5, 7), 7),
        ("cross", np.ones((7, 5)), np.linspace(0.5, 1.5, 7), 5),
    ],
)
def test_scores_to_second_order_where_tokens_differ(name, allowed, lengths, keys, x64):
    """At b = 0.05 the scores' part is within 8 standard errors and 4 %, their third order. Without
    the drift of the weights "lengths" and "cross" miss more; keys of "causal" are nearly alike."""
    x = 0.6 * np.eye(7, 40) + np.cumsum(np.eye(7, 40), axis=0) / np.arange(1, 8)[:, None]
    x = x / np.linalg.norm(x, axis=1, keepdims=True) * np.broadcast_to(lengths, 7)[:, None]
    k = x @ x.T
    weights, b = allowed / allowed.sum(axis=1, keepdims=True), 0.05
    kernel, error = sample_attention(k[:keys, :keys], k, weights, b, 80000)
    uniform = weights @ k[:keys, :keys] @ weights.T
    variance, distance = compute_attention(k[:keys, :keys], k, weights, b)
    for ours, extract in ((variance, np.diag), (distance, distances)):
        part = np.abs(extract(kernel) - extract(uniform))
        margin = 4 * 2 * error.max() + 0.04 * part.max()
        assert np.all(np.abs(ours - extract(kernel)) < margin)
        assert margin < 0.12 * part.max()
