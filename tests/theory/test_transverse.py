"""Transverse exponents: derivatives of networks, spectra, and small residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory.transverse import subtract_first_row, transverse_growth
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def network(depth, **fields):
    config = rc.TransformerConfig(depth, 2, 6, **fields)
    return draws.parameters(config), draws.tokens(5, 6), config


CASES = (
    {"mask": "causal"},
    {
        "mask": "local",
        "mlp": "gelu",
        "d_ff": 7,
        "attention_skip": True,
        "mlp_skip": True,
        "norm_placement": "post",
    },
    pytest.param(
        {"attention_skip": True, "skip_gain": 0.8, "norm_placement": "pre", "norm": "rms"},
        marks=pytest.mark.full,
    ),
    pytest.param({"position": "relative_bias", "branch_gain": 0.6}, marks=pytest.mark.full),
    {
        "windows": (1, 0, 2),
        "norm_placement": "pre",
        "first_norm": False,
        "attention_skip": True,
        "mlp": "swiglu",
        "d_ff": 8,
        "num_experts": 4,
        "experts_per_token": 2,
        "parallel": True,
        "score_cap": 0.5,
        "position": "relative_bias",
        "norm": "rms",
        "skip_gain": 0.8,
        "branch_gain": 0.6,
        "mixing": rc.network.Mixing(0.3, 0.8, -0.5),
    },
    # the last also has all that the slow cases have
)


@pytest.mark.parametrize("fields", CASES)
def test_growth_is_the_networks_own_derivative(fields, x64):
    """With a bias, and a mask that leaves out the first of the tokens."""
    params, x, config = network(3, **fields)
    x, keep = np.asarray(x), np.arange(5) > 0
    inputs = {"mask": keep, "bias": draws.normal(2, 5, 5, seed=3)}
    mean = np.tile(x[keep].mean(axis=0), (5, 1))

    @jax.jit
    def differentiate(mean, difference):
        def compute_states(x):
            return rc.apply(params, x, config, **inputs).hidden

        return jax.jvp(compute_states, (mean,), (difference,))[1]

    change = np.asarray(differentiate(mean, x - mean))[:, keep]
    change = change - change.mean(axis=1, keepdims=True)
    size = np.log10(np.linalg.norm(change, axis=(1, 2)))
    growth = transverse_growth(params, x, config, count=2, **inputs)
    assert_close(growth[:, 0], np.diff(size), atol=1e-9)
    exponents = rc.transverse_exponents(params, x, config, count=2, **inputs)
    assert_close(exponents, growth.mean(axis=0))


@pytest.mark.full
def test_the_spectrum_of_one_mask_and_one_matrix(x64):
    """Of one layer over and over, exponents are log|λ_i(Q) μ_j(W)|, without λ(Q) = 1."""
    params, x, config = network(300, mask="causal", layer_map=(0,) * 300)
    rng = np.random.default_rng(0)
    base = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    w = base @ np.diag([1.0, 0.8, 0.3, 0.2, 0.1, 0.05]) @ base.T  # Σ_h W_h, symmetric
    w_v = jnp.asarray(base.reshape(1, 6, 2, 3).transpose(0, 2, 1, 3))
    w_o = jnp.asarray((base.T @ w).reshape(1, 2, 3, 6))
    weights = {"w_v": w_v, "w_o": w_o, "b_v": None, "b_o": None}
    params = draws.changed(params, attention=weights)
    q = np.tril(np.ones((5, 5)))
    q = q / q.sum(1, keepdims=True)
    assert_close(sorted(np.linalg.eigvals(q).real)[-2], 0.5)
    values = np.outer(sorted(np.linalg.eigvals(q).real)[:-1], np.linalg.eigvalsh(w)).ravel()
    wanted = np.log10(sorted(values)[::-1][:3])
    exponents = transverse_growth(params, x, config, count=3)[200:].mean(axis=0)
    assert_close(exponents, wanted, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("fields", CASES[:2])
def test_profiles_fall_at_the_exponent(fields, x64):
    """Two norms of one residual differ by at most a factor of (n d)^½ either way, in all layers."""
    depth = 60
    params, x, config = network(depth, **fields)
    x = jnp.mean(x, axis=0, keepdims=True) + 1e-5 * x
    profile = rc.log_residual_profile(params, x, config)
    rate = float(profile[-1] - profile[0]) / depth
    exponent = float(rc.transverse_exponents(params, x, config)[0])
    assert exponent < -0.02
    assert abs(exponent - rate) < np.log10(30) / depth


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {"mixing": rc.network.Mixing(0.0, 1.37, -0.37)},  # attention-scale
        {
            "mixing": rc.network.Mixing(0.0, 5**0.5, -(5**0.5)),
            "mask": "causal",
        },  # A⊥: equal tokens have 0
        {"mask": "local", "window": 9},
        {"windows": (9, 9)},
    ],
)
def test_rows_that_are_the_same_or_cancel_move_no_difference(fields, optimized):
    """Q_h R is the same in all rows or 0 by algebra: −inf, not what rounding leaves of it."""
    assert np.isneginf(rc.transverse_exponents(*network(2, **fields)))


def test_rows_are_compared_with_the_first_token_that_exists():
    weights, keep = draws.normal(2, 3, 3), np.array([False, True, True])
    np.testing.assert_array_equal(subtract_first_row(weights, keep), weights - weights[:, 1:2])


@pytest.mark.full
def test_the_cubic_regime_and_a_skip_alone():
    params, x, config = network(3)
    exponents = rc.transverse_exponents(params, x, config)
    assert exponents.shape == (1,) and np.isneginf(exponents)
    with_skip = config.replace(attention_skip=True, skip_gain=0.0)
    assert np.isneginf(rc.transverse_exponents(params, x, with_skip))
    with_skip = with_skip.replace(skip_gain=0.25)
    # directions are those of the tokens that exist, from the start
    growth = transverse_growth(params, x, with_skip, count=2, mask=np.arange(5) != 2)
    np.testing.assert_allclose(growth, np.log10(0.25), rtol=1e-5)


@pytest.mark.full
def test_a_mask_of_tokens_is_as_if_the_others_were_not_there():
    params, x, config = network(4, position="relative_bias")
    keep = jnp.array([True, True, True, True, False])
    padded = transverse_growth(params, x, config, mask=keep)
    removed = transverse_growth(params, x[:4], config)
    assert_close(padded, removed, atol=1e-4)


@parametrize_refusals([({"count": 25}, "count=25")])
def test_wrong_arguments_are_named(arguments, message):
    (options,) = arguments
    is_refused(message, lambda: rc.transverse_exponents(*network(2, mask="causal"), **options))
