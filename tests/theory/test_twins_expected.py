"""Closed laws of phases and of masks against `expected_pass`, where both hold.

Critical scaling and the sphere have the identity for weights, the spectral gap no tokens: no
expectation over weights is theirs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory import expected_pass, phases, update_sizes


def equal_sizes(params, **sizes):
    """Every weight of a matrix at the root of its mean square: the kernels read nothing else."""
    layers = params.layers
    for part in ("attention", "mlp"):
        own = getattr(layers, part)
        if own is None:
            continue
        ones = {n: jnp.full_like(getattr(own, n), v) for n, v in sizes.items() if hasattr(own, n)}
        layers = layers.replace(**{part: own.replace(**ones)})
    return params.replace(layers=layers)


def at_one_angle(n, d, rho):
    """[n, d], every mean square 1 and every mean product ρ."""
    root = np.linalg.cholesky((1 - rho) * np.eye(n) + rho)
    return jnp.asarray(np.sqrt(d) * np.pad(root, ((0, 0), (0, d - n))))


@pytest.mark.parametrize(("beta", "rho"), [(0.6, 0.0), (1.2, 0.4)])
def test_attention_step_is_the_expected_pass(beta, rho):
    for n in (5, 48):
        d, skip = 64, 0.7
        config = rc.san_skip(1, 1, d, norm="rms", skip_gain=skip)
        w_q = beta * np.sqrt(np.log(n) / d)
        params = equal_sizes(
            rc.init(jax.random.key(0), config), w_q=w_q, w_k=d**-0.5, w_v=d**-0.5, w_o=d**-0.5
        )
        found = expected_pass(params, at_one_angle(n, d, rho), config).hidden
        q, p = phases.attention_step(1.0, rho, beta, skip, "pre", n)
        np.testing.assert_allclose(found.variance[-1], float(q), rtol=1e-5)
        product = found.variance[-1][0] - found.distance[-1][0, 1]
        np.testing.assert_allclose(product, float(p), atol=2e-6)


@pytest.mark.parametrize(("rho", "weight", "bias"), [(0.0, 2.0, 0.0), (0.6, 1.3, 0.2)])
def test_mlp_step_is_the_expected_pass(rho, weight, bias):
    """Behind an attention whose values are 0."""
    n, d, skip = 4, 16, 0.8
    config = rc.transformer(1, 1, d, d_ff=d, mlp="relu", norm_placement="none", skip_gain=skip)
    w, b = np.sqrt(weight / d), np.sqrt(bias)
    params = equal_sizes(
        rc.init(jax.random.key(0), config), w_v=0.0, w_in=w, w_out=w, b_in=b, b_out=b
    )
    found = expected_pass(params, at_one_angle(n, d, rho) / skip, config).hidden
    q, p = phases.mlp_step(1.0, rho, skip, weight, bias, "pre")
    np.testing.assert_allclose(found.variance[-1], float(q), rtol=1e-5)
    product = found.variance[-1][0] - found.distance[-1][0, 1]
    np.testing.assert_allclose(product, float(p), atol=2e-6)


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
        rc.init(jax.random.key(0), config),
        w_v=d**-0.5,
        w_o=d**-0.5,
        w_in=w * d**-0.5,
        w_out=config.ff_width**-0.5,
    )
    draws = np.random.default_rng(6).normal(size=10**6)
    square = phases.stream_square(a, m, np.mean(np.tanh(w * draws) ** 2))
    x = np.sqrt(square) * at_one_angle(n, d, 1 - 1e-5)
    sizes = update_sizes(config, 0.0)
    sizes["mlp"]["w_out"] = sizes["mlp"]["w_out"].at[0].set(1.0)
    found = expected_pass(params, x, config, sizes=sizes)
    grown = np.diff(found.log_one_minus_cosine)
    np.testing.assert_allclose(grown[2:], float(phases.angle_exponent(a, m, w)), atol=2e-3)
    change = np.log(found.hidden.change[2:, 0, 0])
    before_mlp = (1 - a**2) * square + a**2
    slope = w**2 * np.mean(np.cosh(w * draws) ** -4.0)
    law = np.log(1 - a**2 + a**2 / square) + np.log(1 - m**2 + m**2 * slope / before_mlp)
    np.testing.assert_allclose(np.diff(change), law, atol=2e-3)


def test_the_bound_of_masks_holds_of_the_expected_pass():
    """Uniform weights on what the mask allows, values of unit gain: the largest distance."""
    n, d, depth = 9, 16, 6
    i, j = np.mgrid[:n, :n]
    mask = abs(i - j) <= 2
    config = rc.san(depth, 1, d)
    params = equal_sizes(rc.init(jax.random.key(0), config), w_q=0.0, w_v=d**-0.5, w_o=d**-0.5)
    x = jnp.asarray(np.random.default_rng(13).normal(size=(n, d)))
    found = expected_pass(params, x, config, mask=jnp.asarray(mask)).hidden
    largest = np.sqrt(np.max(np.asarray(found.distance), axis=(1, 2)))
    # One token reaches all in two steps (Wu et al. 2024, theorem 1): (1 − ε²)^⌊t/2⌋.
    bounds = (1 - 5.0**-2) ** (np.arange(depth + 1) // 2)
    assert np.all(largest / largest[0] <= bounds + 1e-6)
    assert largest[-1] < 0.5 * largest[0]
