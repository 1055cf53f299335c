"""Constants of the bounds: γ*, power laws, Lipschitz constants, spreads of scores."""

import itertools
import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.network.residual import LayerGains
from rank_collapse.theory import bound_constants, bounds, mean_bounds
from rank_collapse.theory.log_operations import LogState
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but


def test_threshold_is_the_root():
    x = bounds.LEMMA_THRESHOLD
    assert x > 0.5  # 0 is a root too
    assert_close(math.exp(x), 1 + 2 * x, rtol=1e-14)


def test_a_power_law_of_a_constant_of_0_and_beyond_float_range():
    for c, depth, expected in ((-np.inf, 3, -np.inf), (-1.0, 90, -np.inf), (0.5, 2, 9 * 0.2 + 2.0)):
        law = bounds.log10_power_law(np.float32(0.2), np.float32(c), depth)
        np.testing.assert_allclose(law, expected, rtol=1e-6)  # c^{(3^L − 1)/2} r^{3^L}


@pytest.mark.parametrize("log10_input", [0.0, 0.25, -1.5])
def test_the_theorem_where_c_r_squared_is_1_is_r_at_every_depth(log10_input):
    """c^{(3^L − 1)/2} r^{3^L} with digits for the power of 3: r is the fixed point of r ↦ c r³."""
    log10_c = np.float32(-2 * log10_input)
    for depth in (1, 80, 81, 90, 200):
        with mpmath.workdps(150):
            power = mpmath.mpf(3) ** depth
            exponent = (power - 1) / 2 * mpmath.mpf(float(log10_c)) + power * log10_input
        assert exponent == log10_input
        law = jax.jit(bounds.log10_power_law)(np.float32(log10_input), log10_c, depth)
        assert float(law) == log10_input
    off = bounds.log10_power_law(np.float32(log10_input), np.float32(log10_c + 1e-6), 200)
    assert float(off) == np.inf  # the fixed point repels
    theorem = bounds.log10_theorem(np.float32(0), np.float32(1), np.float32(0.25), 1, 1, 90)
    assert float(theorem) == 0


@pytest.mark.parametrize(
    "kind", full_but(["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"], "gelu")
)
def test_lipschitz_constant_bounds_every_residual(kind, x64):
    config = rc.san_mlp(1, 1, 6, mlp=kind, d_ff=9)
    params = draws.parameters(config, 0, 2.0, 1.0).layers.mlp
    params = jax.tree.map(lambda a: a[0], params)
    one, inf = jax.jit(bound_constants.lipschitz_constants, static_argnums=1)(params, kind)
    rng = np.random.default_rng(0)
    center = rng.standard_normal((30, 1, 6))
    noise = 10 ** rng.uniform(-3, 1, (30, 1, 1)) * rng.standard_normal((30, 4, 6))
    noise *= np.arange(4)[:, None] < rng.integers(1, 5, (30, 1, 1))  # of one to four tokens

    @jax.jit
    @jax.vmap
    def measure_shares(center, noise):
        at_center, at_x = (layers.apply_mlp(params, a, kind) for a in (center, center + noise))
        residual = at_x - at_center
        norms = (bound_constants.norm_1, one), (bound_constants.norm_inf, inf)
        return jnp.array([norm(residual) / (constant * norm(noise)) for norm, constant in norms])

    shares = measure_shares(np.tile(center, (1, 4, 1)), noise)
    assert np.all(shares <= 1 + 1e-9) and shares.max() > 0.05
    slope = float(
        one / (bound_constants.norm_1(params.w_in) * bound_constants.norm_1(params.w_out))
    )
    grid = jnp.linspace(-5, 5, 400_001)  # finer: between two points the slope changes by 1e-10
    phi = layers.get_activation(kind).fn
    sup = float(jax.jit(jax.vmap(jax.grad(phi)))(grid).max())
    assert sup <= slope <= sup * (1 + 3e-6)
    expected_slope = {"gelu": 1.128904, "gelu_tanh": 1.129, "silu": 1.099839}.get(kind, 1.0)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4)


def test_heads_that_share_keys_and_values_have_matrices_of_their_own():
    """Each pair of four heads has one W_K and one W_V; a temperature may be negative."""
    config = rc.TransformerConfig(1, 4, 8, d_qk=3, num_kv_heads=2)
    params = jax.tree.map(lambda a: np.asarray(a[0]), draws.parameters(config).layers.attention)
    assert params.w_k.shape == (2, 8, 3)

    @jax.jit
    def compute(params):
        matrices = bound_constants.head_weights(params, 1.7)
        return *matrices, *mean_bounds.attention_norms(params, -1.7, config)

    w_qk, w, scores, values = compute(params)
    for h in range(4):
        pair = params.w_q[h] @ params.w_k[h // 2].T, params.w_v[h // 2] @ params.w_o[h]
        assert_close(w_qk[h], pair[0] / 1.7, rtol=1e-5, atol=1e-6)
        assert_close(w[h], pair[1], rtol=1e-5, atol=1e-6)
        sizes = [np.linalg.norm(a, 2) for a in pair]
        assert_close(scores[h], np.log(sizes[0] / (4 * math.sqrt(3) * 1.7)), rtol=1e-5)
        assert_close(values[h], np.log(sizes[1]), rtol=1e-5, atol=1e-5)


def test_the_spread_of_scores_is_over_the_keys_that_a_row_sees():
    rng, keep = np.random.default_rng(0), np.array([True, True, False, True])
    residual, w_qk = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (2, 3, 3))
    )
    allowed = np.stack([np.tri(4, k=-1, dtype=bool), np.tri(4, dtype=bool)])
    state, config = LogState(None, residual, 0.0), rc.san(1, 2, 8)  # d_qk = 4
    expected = np.zeros((2, 4))  # 0 in rows that do not exist or see nothing
    for h, i in itertools.product(range(2), (0, 1, 3)):
        row = residual[i] @ w_qk[h] @ residual.T / 2
        expected[h, i] = np.ptp(row[allowed[h, i]]) if allowed[h, i].any() else 0
    spread = bound_constants.score_spread(w_qk, state, config, allowed, keep)
    assert_close(spread, expected, atol=1e-6)
    undivided = config.replace(scale_scores=False)
    spread = bound_constants.score_spread(w_qk, state, undivided, allowed, keep)
    assert_close(spread, 2 * expected, atol=2e-6)


def test_the_skip_of_an_mlp_adds_its_largest_gain():
    config = rc.san_mlp(1, 1, 3, mlp="relu", d_ff=2, mlp_skip=True)
    params = jax.tree.map(lambda a: a[0], draws.parameters(config).layers)
    skip, branch = (np.float32(gains) for gains in ([0.5, -2, 1], [-3, 1, 2]))
    gains = LayerGains(rc.Gains(9.0, 9.0, skip), rc.Gains(9.0, 9.0, branch), np.float32(1))
    matrices = [np.asarray(w) for w in (params.mlp.w_in, params.mlp.w_out)]
    expected = [2 + 3 * np.prod([abs(w).sum(axis).max() for w in matrices]) for axis in (0, 1)]
    for changes, constants in (
        ({}, expected),
        ({"mlp_skip": False}, np.array(expected) - 2),
        ({"mlp": "none"}, [1, 1]),
        ({"mlp": "swiglu"}, [np.inf, np.inf]),
    ):
        network = params, gains, config.replace(**changes)
        ours = bound_constants.sublayer_lipschitz(
            *network, bound_constants.norm_1, bound_constants.norm_inf
        )
        np.testing.assert_allclose(ours, constants, rtol=3e-6)


def test_the_size_of_a_residual_scales_the_spread_alone():
    """γ* and c are the same for R e^s, and D is e^{2s} as large; γ* and c of equal rows are 0."""
    config, rows = rc.san(1, 2, 6, d_qk=4), draws.normal(3, 6)
    params = jax.tree.map(lambda a: a[0], draws.parameters(config).layers)
    gains = LayerGains(rc.Gains(1.0, 1.0, 1.0), rc.Gains(1.0, 1.0, 1.0), np.float32(1))
    w_qk, _ = bound_constants.head_weights(params.attention)
    seen, keep = np.tri(3, dtype=bool)[None], np.ones(3, bool)

    @jax.jit
    def measure(residual, log_scale):
        state = LogState(None, residual, log_scale)
        spread = bound_constants.score_spread(w_qk, state, config, seen, keep)
        return bound_constants.layer_constants(params, state, gains, config, spread)

    base, grown, scaled = measure(rows, 0.0), measure(rows * np.float32(5), 0.0), measure(rows, 400)
    for name in ("gamma", "log10_c", "beta"):
        assert_close(getattr(grown, name), getattr(base, name), rtol=1e-5)
        assert_close(getattr(scaled, name), getattr(base, name), rtol=1e-5)
    assert_close(grown.log10_spread, base.log10_spread + 2 * math.log10(5), rtol=1e-5)
    assert_close(scaled.log10_spread, base.log10_spread + 800 / math.log(10), rtol=1e-5)
    equal = measure(0 * rows, -np.inf)
    assert np.all(equal.gamma == 0) and equal.log10_c == -np.inf
