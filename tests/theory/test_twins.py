"""Closed laws of phases and masks against Monte Carlo and exact cases."""

import functools

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from scipy.integrate import quad

import rank_collapse as rc
from rank_collapse.network import AttentionContext, variant_heads
from rank_collapse.theory import expected_pass, phases, update_sizes


@functools.cache
def rng(seed):
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def from_the_start():
    """The same draws whichever tests run before."""
    rng.cache_clear()


def agree(found, expected, more=0.0):
    """Means of draws within 5 standard errors, and what the law leaves out."""
    found = np.asarray(found, np.float64)
    error = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - expected) < 5 * error + more), (found, expected)


def roots(n, cosine):
    """n unit vectors at one angle."""
    return np.linalg.cholesky((1 - cosine) * np.eye(n) + cosine)


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def tokens(seed, draws, n, d, rho):
    """[draws, n, d] of mean square 1 and mean product ρ per feature."""
    common = rng(seed).normal(size=(draws, 1, d))
    return np.sqrt(rho) * common + np.sqrt(1 - rho) * rng(seed).normal(size=(draws, n, d))


@pytest.mark.parametrize(
    ("n", "beta", "rho"), [(48, 0.6, 0.0), (48, 2.0, 0.0), (48, 2.0, 0.4), (5, 1.2, 0.4)]
)
def test_attention_of_drawn_weights(n, beta, rho):
    """One head of W_Q, W_K with standard deviation √β (ln n)^¼/√d, values as they are."""
    draws, d = 40 if n > 9 else 200, 256
    x = tokens(1, draws, n, d, rho)
    std = np.sqrt(beta) * np.log(n) ** 0.25 / np.sqrt(d)
    q, k = (x @ (std * rng(2).normal(size=(draws, d, d))) for _ in "qk")
    p = softmax(q @ k.swapaxes(1, 2) / np.sqrt(d))
    for placement, values in (("pre", x), ("gain_pre", x - x.mean(axis=1, keepdims=True))):
        out = p @ values
        product = out @ out.swapaxes(1, 2) / d
        own = np.trace(product, axis1=1, axis2=2) / n
        across = (product.sum(axis=(1, 2)) - n * own) / (n * (n - 1))
        new_q, new_p = phases.attention_step(1.0, rho, beta, 0.0, placement, n)
        agree(own, float(new_q), 0.005)
        agree(across, float(new_p), 0.005)


@pytest.mark.parametrize("n", [1, 5, 64])
def test_uniform_attention_makes_tokens_equal(n):
    """Every row is the same mean of n tokens."""
    q, p = phases.attention_step(1.0, 0.3, 0.0, 0.0, "pre", n)
    np.testing.assert_allclose([q, p], 0.3 + 0.7 / n, rtol=1e-6)
    _, rho = phases.phase_profile(0.0, 2, attention_skip=0.0, start=(1.0, 0.3), num_tokens=n)
    np.testing.assert_allclose(rho[1:], 1, rtol=1e-6)


@pytest.mark.parametrize(("rho", "weight", "bias"), [(0.0, 2.0, 0.0), (0.6, 1.3, 0.2)])
def test_mlp_of_drawn_weights(rho, weight, bias):
    draws, d = 300, 200
    x = tokens(3, draws, 2, d, rho)
    w1, w2 = (np.sqrt(weight / d) * rng(4).normal(size=(draws, d, d)) for _ in range(2))
    b1, b2 = (np.sqrt(bias) * rng(5).normal(size=(draws, 1, d)) for _ in range(2))
    out = np.maximum(x @ w1 + b1, 0) @ w2 + b2
    q, p = phases.mlp_step(1.0, rho, 0.0, weight, bias, "pre")
    agree(np.mean(np.square(out), axis=(1, 2)), float(q), 0.01)
    agree(np.mean(out[:, 0] * out[:, 1], axis=1), float(p), 0.01)


@pytest.mark.parametrize("placement", phases.PLACEMENTS)
def test_phase_profile_where_nothing_is_left_and_beyond_float32(placement):
    """Branches of 0 without skips leave what their limit does; a cosine has no size."""
    limit = 0.0 if placement.startswith("gain") else 1.0
    _, rho = phases.phase_profile(0.5, 3, attention_skip=0.0, placement=placement)
    np.testing.assert_array_equal(rho, [0, limit, limit, limit])
    log_q, rho = phases.phase_profile(
        3.0,
        100,
        attention_skip=3.0,
        mlp_skip=3.0,
        start=(1.0, 0.2),
        placement=placement,
        num_tokens=64,
    )
    assert np.all(np.isfinite(log_q)) and np.all((rho >= 0) & (rho <= 1))
    if placement.endswith("pre"):  # e^{400 ln 3} is beyond float32
        np.testing.assert_allclose(np.diff(log_q)[-1], 4 * np.log(3), rtol=1e-4)
        np.testing.assert_allclose(rho[-1], rho[-2], rtol=1e-6)


def test_phase_profile_walks_its_steps():
    state = (1.0, 0.2)
    for _ in range(3):
        state = phases.attention_step(*state, 2.0, 0.5, "pre")
        state = phases.mlp_step(*state, 0.9, 1.4, 0.1, "pre")
    found = phases.phase_profile(
        2.0,
        3,
        attention_skip=0.5,
        mlp_skip=0.9,
        weight=1.4,
        bias=0.1,
        start=(1.0, 0.2),
        placement="pre",
    )
    expected = np.log(state[0]), state[1] / state[0]
    np.testing.assert_allclose([a[-1] for a in found], expected, rtol=1e-5)
    collapsed = phases.phase_profile(0.5, 40, start=(1.0, 0.2), attention_skip=0.5)[1][-1]
    apart = phases.phase_profile(4.0, 40, start=(1.0, 0.2), attention_skip=0.5, placement="gain")
    assert collapsed > 0.999 and apart[1][-1] < 1e-6


test_other_placements_are_refused = refused(
    [
        (lambda: phases.attention_step(1.0, 0.0, 1.0, 1.0, "none"), "placement='none'"),
    ]
)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 4.0])
def test_critical_scaling_is_the_networks(gamma):
    """Tokens that are all at one angle: the cosine after it (arXiv 2510.05554, theorem 1)."""
    n, rho = 6, 0.4
    with jax.enable_x64(True):
        x = roots(n, rho) * np.sqrt(n)
        config = rc.variant(rc.san(1, 1, n), "critical", gamma=gamma)
        params = rc.init_variant(jax.random.key(0), config, "critical")
        out = np.asarray(rc.apply(params, jnp.asarray(x), config).output)
        cosines = (out @ out.T) / np.outer(*2 * [np.linalg.norm(out, axis=1)])
    w = 1 / (1 + (n - 1) * n ** (-gamma * (1 - rho)))  # the weight of a token itself
    u = (1 - w) / (n - 1)
    between = rho + (1 - rho) * (2 * w * u + (n - 2) * u**2)
    expected = between / (rho + (1 - rho) * (w**2 + (n - 1) * u**2))
    np.testing.assert_allclose(cosines[~np.eye(n, dtype=bool)], expected, rtol=1e-10)


@pytest.mark.parametrize(("a", "m", "w"), [(0.3, 0.6, 1.0), (0.3, 0.6, 3.0)])
def test_angle_exponent_of_drawn_networks(a, m, w):
    """Layers of x ← √(1 − α²) x + α f(N(x)) on nearly equal tokens, from the square that stays."""
    draws, n, d = 60, 32, 200
    square = float(phases.stream_square(a, m, np.mean(np.tanh(w * rng(6).normal(size=10**6)) ** 2)))
    x = tokens(6, draws, 1, d, 0.0)
    x = np.sqrt(square) * unit(x + 0.01 * rng(6).normal(size=(draws, n, d)))
    grown = [angle(x)]
    for _ in range(2):
        values = rng(7).normal(size=(draws, d, d)) / np.sqrt(d)
        mean = unit(x).mean(axis=1, keepdims=True) @ values
        x = np.sqrt(1 - a**2) * x + a * mean
        w1, w2 = (rng(8).normal(size=(draws, d, d)) / np.sqrt(d) for _ in range(2))
        x = np.sqrt(1 - m**2) * x + m * np.tanh(w * unit(x) @ w1) @ w2
        grown.append(angle(x))
    agree(np.mean(np.square(x), axis=(1, 2)), square, 0.01)
    expected = float(phases.angle_exponent(a, m, w))
    agree((grown[-1] - grown[0]) / 2, expected, 0.01)
    assert (expected > 0) == (w > 2)


@pytest.mark.parametrize("w", [0.5, 4.0, 30.0])
def test_slopes_of_steep_activations(w):
    """λ_a of the MLP alone, e^{λ_a} = σ_w² E φ'²/E φ², by adaptive quadrature."""

    def mean(f):
        ends = {"points": (-1 / w, 1 / w), "limit": 200}
        return quad(lambda z: f(w * z) * np.exp(-0.5 * z**2), -9, 9, **ends)[0]

    expected = w**2 * mean(lambda z: np.cosh(z) ** -4.0) / mean(lambda z: np.tanh(z) ** 2)
    found = np.exp(float(phases.angle_exponent(0.0, 1.0, w)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def unit(x):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


def angle(x):
    """ln of the mean of 1 − cosine between tokens, by draw."""
    return np.log(np.mean(np.var(unit(x), axis=1), axis=1))


@pytest.mark.full
@pytest.mark.parametrize(("rho", "decay"), [(0.3, 0.5), (0.8, 0.9)])
def test_ssm_mixing_of_drawn_weights(rho, decay):
    """The heads of `variant` "ssd" with steps of one size, tokens far from the first."""
    draws, n, d, k = 400, 60, 64, 32
    x = np.pad(roots(n, rho), ((0, 0), (0, d - n)))
    b, c = (x @ rng(14).normal(size=(draws, d, k)) for _ in "bc")
    step = 0.5  # softplus of it, times the rate, is −ln of the decay
    rate = -np.log(decay) / np.log1p(np.exp(step))
    one, causal = np.full((draws, n, 1), step), AttentionContext(jnp.tril(jnp.ones((n, n), bool)))
    m = jax.vmap(lambda q, k: variant_heads.ssd(rate, 0.0, q, k, None, causal)[0])
    q, k = (jnp.asarray(np.concatenate([a, one], axis=2))[:, None] for a in (c, b))
    mixed = np.tril(np.asarray(m(q, k)[:, 0])) @ x
    products = np.einsum("snd,smd->snm", mixed, mixed)[:, -1]
    square = products[:, -1].mean()
    same, other = (rho / (1 - decay)) ** 2, (1 - rho**2) / (1 - decay**2)
    for distance in (1, 5):
        cosine = rho * (same + other * decay**distance) / (same + other)
        agree(products[:, -1 - distance] / square, cosine, 0.02)


# Closed laws of phases and of masks against `expected_pass`, where both hold.
#
# Critical scaling has the identity for weights: no expectation over weights is its own.


def equal_sizes(params, **sizes):
    """Every weight of a matrix at the root of its mean square: the kernels read nothing else."""
    parts = {name: getattr(params.layers, name) for name in ("attention", "mlp")}
    equal = {
        name: {n: jnp.full_like(getattr(own, n), v) for n, v in sizes.items() if hasattr(own, n)}
        for name, own in parts.items()
        if own is not None
    }
    return draws.changed(params, **equal)


def at_one_angle(n, d, rho):
    """[n, d], every mean square 1 and every mean product ρ."""
    return jnp.asarray(np.sqrt(d) * np.pad(roots(n, rho), ((0, 0), (0, d - n))))


def is_the_expected_pass(of_law, *network):
    """Mean squares and products after one layer."""
    found, (q, p) = expected_pass(*network).hidden, of_law
    np.testing.assert_allclose(found.variance[-1], float(q), rtol=1e-5)
    product = found.variance[-1][0] - found.distance[-1][0, 1]
    np.testing.assert_allclose(product, float(p), atol=2e-6)


@pytest.mark.parametrize(("beta", "rho"), [(0.6, 0.0), (1.2, 0.4)])
def test_attention_step_is_the_expected_pass(beta, rho):
    for n in (5, 48):
        d, skip = 64, 0.7
        config = rc.san_skip(1, 1, d, norm="rms", skip_gain=skip)
        w_q = beta * np.sqrt(np.log(n) / d)
        params = equal_sizes(
            draws.parameters(config, bias_scale=0.0, gain_scale=0.0),
            w_q=w_q,
            w_k=d**-0.5,
            w_v=d**-0.5,
            w_o=d**-0.5,
        )
        of_law = phases.attention_step(1.0, rho, beta, skip, "pre", n)
        is_the_expected_pass(of_law, params, at_one_angle(n, d, rho), config)


@pytest.mark.parametrize(("rho", "weight", "bias"), [(0.0, 2.0, 0.0), (0.6, 1.3, 0.2)])
def test_mlp_step_is_the_expected_pass(rho, weight, bias):
    """Behind an attention whose values are 0."""
    n, d, skip = 4, 16, 0.8
    config = rc.transformer(1, 1, d, d_ff=d, mlp="relu", norm_placement="none", skip_gain=skip)
    w, b = np.sqrt(weight / d), np.sqrt(bias)
    params = equal_sizes(
        draws.parameters(config, bias_scale=0.0, gain_scale=0.0),
        w_v=0.0,
        w_in=w,
        w_out=w,
        b_in=b,
        b_out=b,
    )
    of_law = phases.mlp_step(1.0, rho, skip, weight, bias, "pre")
    is_the_expected_pass(of_law, params, at_one_angle(n, d, rho) / skip, config)


@pytest.mark.full
@pytest.mark.parametrize(("a", "m", "w"), [(0.3, 0.6, 1.0), (0.5, 0.7, 1.5)])
def test_exponents_are_those_of_the_expected_pass(a, m, w):
    """Of nearly equal tokens in the network of Cowsik et al., after layers that forget the start;
    backwards: how an update of the first layer's output grows in the others. At σ_w = 3 the 40
    degrees of the expected pass are too few: λ_a is .0524 there and not .0600."""
    n, d, depth = 6, 32, 8
    gains = {
        f"{which}_gain": rc.Gains(f(a), 1.0, f(m))
        for which, f in (("branch", lambda g: g), ("skip", lambda g: np.sqrt(1 - g**2)))
    }
    config = rc.transformer(depth, 1, d, mlp="tanh", norm="rms", norm_placement="pre", **gains)
    params = equal_sizes(
        draws.parameters(config, bias_scale=0.0, gain_scale=0.0),
        w_v=d**-0.5,
        w_o=d**-0.5,
        w_in=w * d**-0.5,
        w_out=config.ff_width**-0.5,
    )
    z = np.random.default_rng(6).normal(size=10**6)
    square = phases.stream_square(a, m, np.mean(np.tanh(w * z) ** 2))
    x = np.sqrt(square) * at_one_angle(n, d, 1 - 1e-5)
    sizes = update_sizes(config, 0.0)
    sizes["mlp"]["w_out"] = sizes["mlp"]["w_out"].at[0].set(1.0)
    found = expected_pass(params, x, config, sizes=sizes)
    grown = np.diff(found.log_one_minus_cosine)
    np.testing.assert_allclose(grown[2:], float(phases.angle_exponent(a, m, w)), atol=2e-3)
    change = np.log(found.hidden.change[2:, 0, 0])
    before_mlp = (1 - a**2) * square + a**2
    slope = w**2 * np.mean(np.cosh(w * z) ** -4.0)
    law = np.log(1 - a**2 + a**2 / square) + np.log(1 - m**2 + m**2 * slope / before_mlp)
    np.testing.assert_allclose(np.diff(change), law, atol=2e-3)


@pytest.mark.full
def test_the_bound_of_masks_holds_of_the_expected_pass():
    """Uniform weights on what the mask allows, values of unit gain: the largest distance."""
    n, d, depth = 9, 16, 6
    i, j = np.mgrid[:n, :n]
    mask = abs(i - j) <= 2
    config = rc.san(depth, 1, d)
    params = equal_sizes(
        draws.parameters(config, bias_scale=0.0, gain_scale=0.0), w_q=0.0, w_v=d**-0.5, w_o=d**-0.5
    )
    x = jnp.asarray(np.random.default_rng(13).normal(size=(n, d)))
    found = expected_pass(params, x, config, mask=jnp.asarray(mask)).hidden
    largest = np.sqrt(np.max(np.asarray(found.distance), axis=(1, 2)))
    # One token reaches all in two steps (Wu et al. 2024, theorem 1): (1 − ε²)^⌊t/2⌋.
    bounds = (1 - 5.0**-2) ** (np.arange(depth + 1) // 2)
    assert np.all(largest / largest[0] <= bounds + 1e-6)
    assert largest[-1] < 0.5 * largest[0]
