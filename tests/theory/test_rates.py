"""The constant of the 3^L law and transverse exponents: by hand, spectra, and small residuals."""

import math
from functools import partial

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import full_but
from refusals import refused

import rank_collapse as rc
from rank_collapse import theory
from rank_collapse.network.passes import replay
from rank_collapse.network.residual import lone_norm, token_norm
from rank_collapse.theory import cubic_regime


def test_measured_constant_is_the_sum_of_kappas(x64):
    profile = np.array([0.5, -0.1, -1.0, -3.2, -9.5])
    found = rc.theory.measured_constant(profile)
    kappa = profile[1:] - 3 * profile[:-1]
    np.testing.assert_allclose(found.kappa, kappa, rtol=1e-5)
    total = profile[0] + sum(k / 3 ** (l + 1) for l, k in enumerate(kappa))
    np.testing.assert_allclose(found.log10_lambda, total, rtol=1e-5)
    np.testing.assert_allclose(found.log10_c_eff, 2 * (total - 0.5), rtol=1e-5)
    np.testing.assert_allclose(found.error, max(abs(kappa)) / (2 * 81), rtol=1e-5)
    # layers that left float range are left out, in each profile its own
    pair = np.stack([profile, [0.5, -0.1, -1.0, -np.inf, -np.inf]])
    found = rc.theory.measured_constant(pair)
    np.testing.assert_allclose(found.log10_lambda, [total, -1 / 9], rtol=1e-5)
    assert np.isnan(found.kappa[1, 2:]).all() and np.isfinite(found.kappa[1, :2]).all()
    assert np.isinf(rc.theory.measured_constant(profile[:1]).error)
    assert np.isnan(rc.theory.measured_constant(np.full(3, np.nan)).log10_lambda)


def test_a_constant_kappa_lies_within_its_error():
    """log R_{l+1} = 3 log R_l + κ has Λ = log R_0 + κ/2; L layers are off by κ/(2·3^L)."""
    profile = [0.3]
    for _ in range(4):
        profile.append(3 * profile[-1] - 0.8)
    found = rc.theory.measured_constant(np.array(profile))
    np.testing.assert_allclose(found.log10_lambda - (0.3 - 0.4), found.error, rtol=1e-4)


def test_two_tokens_by_hand(x64):
    """±r in one dimension: C = r², so that r' = w_q w_k w_v w_o r³ and c_eff is that product."""
    config = rc.san(6, 1, 1, layer_map=(0,) * 6)
    params = draws.parameters(config, bias_scale=0.0)
    one = jnp.ones((1, 1, 1, 1))
    weights = {"w_q": 2.0 * one, "w_k": one, "w_v": 0.3 * one, "w_o": one}
    params = draws.changed(params, attention=weights)
    profile = theory.cubic_profile(params, jnp.array([[3.1], [2.9]]), config)
    log10_r = [-1.0]
    for _ in range(6):
        log10_r.append(math.log10(0.6) + 3 * log10_r[-1])
    np.testing.assert_allclose(profile, np.array(log10_r) + math.log10(2) / 2, rtol=1e-9)
    # ‖R‖ = √2 r: c_eff = 0.6/2 in that norm, up to the layers left out
    found = rc.theory.closed_constant(params, jnp.array([[3.1], [2.9]]), config)
    assert abs(float(found.log10_c_eff) - math.log10(0.3)) <= 2 * float(found.error) * (1 + 1e-9)


FIELDS = (
    {},
    pytest.param(
        {"mlp": "gelu", "mlp_skip": True, "norm_placement": "post", "branch_gain": 0.7},
        marks=pytest.mark.full,
    ),
    {"mlp": "swiglu", "norm_placement": "pre", "norm": "rms", "temperature": 1.4},
)


@pytest.mark.parametrize("fields", FIELDS)
def test_small_residuals_fall_as_the_closed_recursion_has_it(fields, x64):
    """With biases, padding and a mean token; corrections are of the order of the residual."""
    config = rc.san(4, 2, 6, d_ff=5, **fields)
    params = draws.parameters(config, 0, 1.0, 0.4)
    keep = jnp.array([True, True, False, True, True])
    x = 1e-5 * draws.tokens(5, 6) + draws.tokens(1, 6, seed=2)
    profile = rc.log_residual_profile(params, x, config, mask=keep)
    cubic = theory.cubic_profile(params, x, config, mask=keep)
    assert float(profile[-1]) < -300
    np.testing.assert_allclose(cubic[0], profile[0], atol=1e-9)
    np.testing.assert_allclose(jnp.diff(cubic)[0], jnp.diff(profile)[0], atol=1e-3)
    measured = rc.theory.measured_constant(profile)
    closed = rc.theory.closed_constant(params, x, config, mask=keep)
    np.testing.assert_allclose(closed.log10_lambda, measured.log10_lambda, atol=2e-4)


def from_the_start(params, x, config):
    return rc.theory.measured_constant(theory.cubic_profile(params, x, config))


@pytest.mark.full
def test_float32_is_float64_in_deep_layers_and_the_mean_token_does_not_matter():
    config = rc.san(14, 2, 8)
    params, x = draws.parameters(config, bias_scale=0.0), draws.normal(6, 8)
    single, certified = (
        from_the_start(params, x, config),
        rc.theory.closed_constant(params, x, config),
    )
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x))
        double, shifted, scaled = jax.device_get(
            [from_the_start(params, tokens, config) for tokens in (x, x + 2.0, 10 * x)]
        )
        wanted = jax.device_get(rc.theory.closed_constant(params, x, config))
    np.testing.assert_allclose(certified.log10_lambda, wanted.log10_lambda, rtol=1e-4)
    assert 0 < certified.start == wanted.start and certified.reason == ""
    np.testing.assert_allclose(single.log10_lambda, double.log10_lambda, rtol=1e-5)
    np.testing.assert_allclose(shifted.log10_lambda, double.log10_lambda, rtol=1e-9)
    np.testing.assert_allclose(scaled.log10_lambda, double.log10_lambda + 1, rtol=1e-9)
    np.testing.assert_allclose(scaled.log10_c_eff, double.log10_c_eff, rtol=1e-7, atol=1e-9)


def test_the_theorems_constant_is_that_of_its_bound():
    config = rc.san(3, 2, 8)
    params = draws.parameters(config, 0, 0.3, 0.0)
    report = rc.bound_report(params, 0.3 * draws.tokens(5, 8, shift=0.0), config)
    c = theory.theorem_constant(report)
    bound = c * (27 - 1) / 2 + 27 * report.log10_residual[0]
    np.testing.assert_allclose(report.stack.log10_rhs, bound, rtol=1e-5)
    assert bool(report.stack_admissible)
    assert float(rc.theory.measured_constant(report.log10_residual).log10_c_eff) < float(c)


def test_the_closed_form_starts_where_the_diameter_bound_certifies_it(x64):
    """Pre-norm at scale 1: from layer 0 on its sign is wrong in every seed, as it once was here."""
    config = rc.san(8, 4, 64, norm_placement="pre")
    params = rc.init(jax.random.key(3), config)
    x = jax.random.normal(jax.random.key(7), (32, 64))
    profile = rc.log_residual_profile(params, x, config)
    found = rc.theory.closed_constant(params, x, config)
    assert float(rc.theory.measured_constant(profile).log10_lambda) < -0.05
    assert float(from_the_start(params, x, config).log10_lambda) > 0.1
    np.testing.assert_allclose(found.log10_lambda, profile[-1] / 3**8, rtol=1e-3)
    start = int(found.start)
    assert 0 < start < 8 and found.reason == ""
    np.testing.assert_array_equal(found.log10_growth < 0, np.arange(8) >= start)
    # no layer of large scores: tokens stay apart, and there is nothing that could be certified
    sharp = jax.tree.map(lambda a: 4 * a, params)
    none = rc.theory.closed_constant(sharp, x, config)
    assert np.isnan(none.log10_lambda) and np.isnan(none.kappa).all() and none.start == 8
    assert "no layer is certified by the diameter bound: it grows by 10^" in none.reason


@pytest.mark.full
@pytest.mark.parametrize(
    "placement", full_but(["none", "pre", "post", "sandwich", "branch"], "post")
)
@pytest.mark.parametrize("kind", full_but(["gelu", "swiglu"], "gelu"))
def test_no_layer_grows_more_than_its_bound(placement, kind, x64):
    """Tokens of very different lengths; the largest distance after the layer over the bound."""
    config = rc.san_mlp(
        1, 2, 6, mlp=kind, d_ff=7, norm_placement=placement, mlp_skip=True, branch_gain=0.7
    )

    def single(key):
        keys = jax.random.split(key, 4)
        params = rc.init(keys[0], config, 10 ** jax.random.uniform(keys[1], minval=-1), 0.3)
        x = jax.random.normal(keys[2], (4, 6)) * jnp.exp(jax.random.normal(keys[3], (4, 1)))
        trace = rc.apply(params, x, config)
        growth = partial(cubic_regime.layer_growth, keep=jnp.ones(4, bool))
        bound = jax.tree.map(lambda a: a[0], replay(growth, params, trace, config))
        before, after = (log_diameter(a) for a in (x, trace.hidden[-1]))
        return bound.cubic + bound.after + 3 * (bound.before + before) - after

    def log_diameter(a):
        return jnp.log(jnp.max(jnp.sum((a[:, None] - a[None]) ** 2, axis=-1))) / 2

    margin = jax.jit(jax.vmap(single))(jax.random.split(jax.random.key(0), 400))
    assert float(margin.min()) > -1e-12  # infinite where sharp scores make all outputs equal
    assert np.isfinite(margin).mean() > 0.99


def test_the_factor_of_a_norm_is_met_by_tokens_of_one_length(x64):
    """|LN x − LN y| = |x − y|/√(σ_x σ_y) where σ_x = σ_y, less where they differ."""
    spec = lone_norm(None, "layer", 0.01)
    for lengths, least, most in (([1.3, 1.3], 1 - 1e-12, 1 + 1e-12), ([1.0, 3.0], 0.7, 0.95)):
        x = jnp.array(lengths)[:, None] * jnp.array([[1.0, -1, 0], [0, 1, -1]])
        alone = (jnp.array([True, False]), jnp.array([False, True]))
        logs = [cubic_regime._norm_factor(spec, x, keep) for keep in alone]
        normed = token_norm(spec, x)
        ratio = jnp.linalg.norm(normed[0] - normed[1]) / jnp.linalg.norm(x[0] - x[1])
        assert least <= float(ratio / jnp.exp((logs[0] + logs[1]) / 2)) <= most
        # of both tokens together it is the larger factor
        both = cubic_regime._norm_factor(spec, x, jnp.ones(2, bool))
        np.testing.assert_allclose(both, max(logs))


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
    # the last also has what the slow cases have by itself
)


@pytest.mark.parametrize("fields", CASES)
def test_growth_is_the_networks_own_derivative(fields, x64):
    params, x, config = network(3, **fields)
    mean = jnp.mean(x, axis=0, keepdims=True)

    def across(x):
        hidden = rc.apply(params, x, config).hidden
        return hidden - jnp.mean(hidden, axis=1, keepdims=True)

    _, change = jax.jvp(across, (jnp.repeat(mean, 5, axis=0),), (x - mean,))
    size = np.log10(np.linalg.norm(np.asarray(change), axis=(1, 2)))
    found = theory.transverse_growth(params, x, config, count=2)
    np.testing.assert_allclose(found[:, 0], np.diff(size), atol=1e-9)


def test_the_spectrum_of_one_mask_and_one_matrix(x64):
    """The same layer over and over: exponents are log|λ_i(Q) μ_j(W)|, less the pair of Q = 1."""
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
    np.testing.assert_allclose(sorted(np.linalg.eigvals(q).real)[-2], 0.5)
    values = np.outer(sorted(np.linalg.eigvals(q).real)[:-1], np.linalg.eigvalsh(w)).ravel()
    wanted = np.log10(sorted(values)[::-1][:3])
    found = rc.transverse_exponents(params, x, config, count=3, burn_in=200)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("fields", CASES[:2])
def test_profiles_fall_at_the_exponent(fields, x64):
    """Two norms of one residual differ by at most a factor of (n d)^½ either way, in all layers."""
    depth = 60
    params, x, config = network(depth, **fields)
    x = jnp.mean(x, axis=0, keepdims=True) + 1e-5 * x
    profile = rc.log_residual_profile(params, x, config)
    rate = float(profile[-1] - profile[0]) / depth
    found = float(rc.transverse_exponents(params, x, config)[0])
    assert found < -0.02
    assert abs(found - rate) < np.log10(30) / depth


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


def test_the_cubic_regime_and_a_skip_alone():
    params, x, config = network(3)
    assert np.isneginf(rc.transverse_exponents(params, x, config))
    with_skip = config.replace(attention_skip=True, skip_gain=0.0)
    assert np.isneginf(rc.transverse_exponents(params, x, with_skip))
    with_skip = with_skip.replace(skip_gain=0.25)
    found = rc.transverse_exponents(params, x, with_skip, count=2)
    np.testing.assert_allclose(found, np.log10(0.25), rtol=1e-5)


@pytest.mark.full
def test_a_mask_of_tokens_is_as_if_the_others_were_not_there():
    params, x, config = network(4, position="relative_bias")
    keep = jnp.array([True, True, True, True, False])
    padded = theory.transverse_growth(params, x, config, mask=keep)
    alone = theory.transverse_growth(params, x[:4], config)
    np.testing.assert_allclose(padded, alone, atol=1e-4)


test_wrong_arguments_are_named = refused(
    [({"burn_in": 2}, "burn_in=2"), ({"count": 25}, "count=25")],
    lambda options: rc.transverse_exponents(*network(2, mask="causal"), **options),
)
