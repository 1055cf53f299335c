"""Bounds that need no condition: by hand for two tokens, written out, and on random networks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.residual import LayerGains
from rank_collapse.theory import mean_bounds
from tests.oracles import draws
from tests.support.closeness import assert_close

SIDES = ("mean_head", "mean_layer", "diameter_layer", "diameter")


@pytest.fixture(scope="module")
def networks():
    """300 networks of two layers with MLPs: weights, biases and tokens of random size."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        config = rc.san_mlp(2, 2, 6, mlp="tanh", d_ff=7, temperature=-1.3)
        sizes = 10 ** rng.uniform(-1.5, 0.6, (2, 300))
        drawn = [draws.parameters(config, seed, a) for seed, a in enumerate(sizes[0])]
        params = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
        x = sizes[1][:, None, None] * rng.standard_normal((300, 5, 6))
        x = x + rng.standard_normal((300, 1, 6))
        return config, (
            params,
            x,
            jax.jit(jax.vmap(rc.bound_report, (0, 0, None)))(params, x, config),
        )


@pytest.mark.full
def test_two_tokens_by_hand(x64):
    """±r in one dimension: P_1 − P_2 = tanh(a r²) (1, −1), and the diameter meets its bound."""
    config = rc.san(1, 1, 1)
    one = jnp.ones((1, 1, 1, 1))
    params = draws.parameters(config, bias_scale=0.0)
    w_q, w_k, w_v, w_o = 2.0, -0.7, 1.3, 0.4
    weights = {"w_q": w_q * one, "w_k": w_k * one, "w_v": w_v * one, "w_o": w_o * one}
    params = draws.changed(params, attention=weights)
    r, x = 0.8, jnp.array([[0.8], [-0.8]])
    report = rc.bound_report(params, x, config)
    a, w = abs(w_q * w_k), w_v * w_o
    diameter = 2 * r * w * math.tanh(a * r * r)
    for sides in (report.diameter_layer, report.diameter):
        assert_close(sides.log10_lhs[-1], math.log10(diameter), rtol=1e-12)
        assert_close(sides.log10_rhs[-1], math.log10(diameter), rtol=1e-12)
        assert_close(sides.log10_rhs_cubic[-1], math.log10(2 * r * w * a * r * r), rtol=1e-12)
    # D_ii = 2 a r², ‖R‖_{1,∞} = √2 r
    bound = 2 * a * r * r * math.sqrt(2) * math.sqrt(2) * r * w / math.sqrt(2) / 2  # 1 − 1/n = ½
    assert_close(report.mean_head.log10_rhs[0, 0], math.log10(bound), rtol=1e-12)
    assert_close(report.mean_layer.log10_rhs[0], math.log10(bound), rtol=1e-12)


def test_report_equals_the_written_out_formulas(networks):
    config, (params, x, report) = networks
    scale = config.temperature * math.sqrt(config.qk_width)
    for seed in range(4):
        p = jax.tree.map(lambda a, s=seed: np.asarray(a[s, 0]), params.layers.attention)
        tokens = np.asarray(x[seed])
        r = tokens - tokens.mean(0)
        one = lambda a: np.abs(a).sum(0).max()  # noqa: E731
        inf = lambda a: np.abs(a).sum(1).max()  # noqa: E731
        delta = max(np.linalg.norm(a - b) for a in tokens for b in tokens)
        columns = rows = tanh = cubic = 0.0
        for h in range(config.num_heads):
            w_qk, w = p.w_q[h] @ p.w_k[h].T / scale, p.w_v[h] @ p.w_o[h]
            e = r @ w_qk @ r.T
            spread = e.max(1) - e.min(1)
            n = len(tokens)
            column, row = (1 - 1 / n) * spread.sum(), (1 - 2 / n) * spread.max() + spread.mean()
            columns += column / 2 * one(w)
            rows += row / 2 * inf(w)
            size_w = np.linalg.norm(w, 2)
            u = np.linalg.norm(w_qk, 2) * delta**2 / 4
            tanh, cubic = tanh + math.tanh(u) * size_w * delta, cubic + u * size_w * delta
            head = math.sqrt(column / 2 * one(w) * row / 2) * math.sqrt(inf(w) * one(r) * inf(r))
            assert_close(report.mean_head.log10_rhs[seed, 0, h], math.log10(head))
        layer = math.sqrt(columns * rows * one(r) * inf(r))
        assert_close(report.mean_layer.log10_rhs[seed, 0], math.log10(layer))
        sides = report.diameter_layer
        assert_close(sides.log10_rhs[seed, 0], math.log10(tanh))
        assert_close(sides.log10_rhs_cubic[seed, 0], math.log10(cubic))
        assert_close(report.diameter.log10_lhs[seed, 0], math.log10(delta))
        m = jax.tree.map(lambda a, s=seed: np.asarray(a[s, 0]), params.layers.mlp)
        slope = np.linalg.norm(m.w_in, 2) * np.linalg.norm(m.w_out, 2)  # |tanh'| ≤ 1
        np.testing.assert_allclose(
            report.diameter.log10_rhs[seed, 1], math.log10(tanh * slope), rtol=1e-5
        )


def test_no_draw_is_above_any_of_them_inside_the_condition_or_not(networks, x64):
    _, (_, _, report) = networks
    assert 0.2 < float(jnp.mean(report.admissible)) < 0.9
    for name in SIDES:
        sides = getattr(report, name)
        # the residual itself is NaN where tokens fell into clusters
        assert np.isfinite(sides.tightness).mean() > 0.9
        assert float(np.nanmin(sides.tightness)) > -1e-13, name
    for sides in (report.diameter_layer, report.diameter):
        assert float(np.nanmin(sides.tightness_cubic - sides.tightness)) > -1e-13
    # 2√2 n/(n − 1) or more below the paper's, n = 5
    gain = report.head.log10_rhs - report.mean_head.log10_rhs
    assert float(np.nanmin(gain)) > math.log10(2 * math.sqrt(2) * 5 / 4) - 1e-9


def head_ratio(r, w_qk, w, bias):
    """Computes the residual of one head over the bound around the mean, written out.

    Args:
        r: Residual of the tokens [n, d].
        w_qk, w: [d, d].
        bias: Of all rows [n].
    """
    r = rc.residual(r)
    scores = r @ w_qk @ r.T
    p = jax.nn.softmax(scores + bias[None], axis=-1)
    spread = scores.max(axis=1) - scores.min(axis=1)
    y = p @ r @ w
    column, row = mean_bounds.attention_deviation(spread[None], jnp.ones(len(r), bool))
    bound = jnp.sqrt(column[0] * row[0]) * rc.composite_norm(r) * rc.composite_norm(w)
    return rc.composite_norm(rc.residual(y)) / bound


@pytest.mark.full
@pytest.mark.parametrize(("n", "least"), [(2, 0.999), (3, 0.8), (4, 0.7), (8, 0.6)])
def test_ascent_attains_the_bound_with_two_tokens_and_never_exceeds_it(n, least, x64):
    """Adam on the logarithm of the ratio from 32 starts, and 20,000 random heads."""
    import optax

    def draw(key, count):
        shapes = {"r": (count, n, n), "w_qk": (count, n, n), "w": (count, n, n), "bias": (count, n)}
        keys = jax.random.split(key, len(shapes))
        return {m: jax.random.normal(k, s) for k, (m, s) in zip(keys, shapes.items(), strict=True)}

    ratios = jax.jit(jax.vmap(lambda a: head_ratio(**a)))
    optimiser, start = optax.adam(0.03), draw(jax.random.key(0), 32)

    @jax.jit
    def climb(state, _):
        heads, moments = state
        slopes = jax.grad(lambda a: -jnp.log(ratios(a)).sum())(heads)
        updates, moments = optimiser.update(slopes, moments)
        return (optax.apply_updates(heads, updates), moments), ratios(heads).max()

    _, best = jax.lax.scan(climb, (start, optimiser.init(start)), length=1200)
    assert least < float(best.max()) <= 1 + 1e-9
    for scale in (0.1, 1.0, 10.0):
        heads = draw(jax.random.key(1), 20_000)
        heads = heads | {"r": scale * heads["r"]}
        assert float(ratios(heads).max()) <= 1 + 1e-9


def test_the_bound_of_a_stack_with_skips_written_out(x64):
    """Δ' = (γ Σ_h tanh(s_h Δ²) w_h Δ + λ Δ) m, layer by layer, and with s_h Δ² instead of tanh."""
    scores, values = np.array([[0.3, 0.1], [0.2, 0.7]]), np.array([[2.0, 0.5], [1.5, 0.4]])
    skip, branch, mlp = np.array([[0.8, 1.2], [0.6, -0.9], [1.1, 0.7]])
    start = 1.7
    constants = mean_bounds.MeanConstants(None, None, *map(jnp.log, (scores, values, mlp)))
    gains = LayerGains(rc.Gains(attention=skip), rc.Gains(attention=branch), 1.0)
    sides = mean_bounds.diameter_sides(
        constants, jnp.full(3, math.log10(start)), gains, rc.san_skip(2, 2, 6)
    )
    for limit, ours in ((np.tanh, sides.log10_rhs), (np.asarray, sides.log10_rhs_cubic)):
        wanted = [start]
        for s, w, keep, gain, m in zip(scores, values, skip, abs(branch), mlp, strict=True):
            heads = np.sum(limit(s * wanted[-1] ** 2) * w)
            wanted.append((gain * heads + keep) * wanted[-1] * m)
        assert_close(ours, np.log10(wanted), rtol=1e-12)


@pytest.mark.full
def test_what_happens_is_that_of_the_forward_pass(networks, x64):
    config, (params, x, report) = networks
    trace = jax.vmap(lambda p, x: rc.apply(p, x, config))(params, x)

    def diameter(a):
        return np.sqrt(np.max(np.sum((a[..., :, None, :] - a[..., None, :, :]) ** 2, -1), (-1, -2)))

    subset = slice(0, 40)
    for tokens, log10_lhs in (
        (trace.hidden, report.diameter.log10_lhs),
        (trace.attention_branch, report.diameter_layer.log10_lhs),
    ):
        plain, log = diameter(np.asarray(tokens[subset])), np.asarray(log10_lhs[subset])
        resolved = log > -6
        assert resolved.mean() > 0.5
        assert_close(np.log10(plain[resolved]), log[resolved], atol=1e-6)


@pytest.mark.full
def test_deep_layers_in_float32_are_those_of_float64():
    config = rc.san(12, 2, 8)
    params, x = draws.parameters(config, 0, 0.5, 0.0), 0.1 * draws.normal(5, 8) + 1
    report = rc.bound_report(params, x, config)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x))
        precise = jax.device_get(rc.bound_report(*double, config))
        shifted = jax.device_get(rc.bound_report(double[0], double[1] + 5.0, config))
    assert float(report.diameter.log10_lhs[-1]) < -1e5
    assert report.shrinks and report.stack.log10_lhs < report.stack.log10_rhs < -1e5
    for name in ("layer", *SIDES[:3]):
        tightness, wanted = (getattr(r, name).tightness for r in (report, precise))
        assert_close(tightness, wanted, atol=2e-2, err_msg=name)
        # the first layer's bound knows of R alone, not of the mean token
        same = getattr(shifted, name).log10_rhs[0]
        assert_close(same, getattr(precise, name).log10_rhs[0], rtol=1e-9)
    np.testing.assert_allclose(report.diameter.log10_rhs, precise.diameter.log10_rhs, rtol=1e-4)
    # c^{(3^L − 1)/2} Δ^{3^L} wherever c is the same in all layers; here c of the last alone
    before, after = precise.diameter.log10_rhs_cubic[-2:]
    c = precise.diameter_layer.log10_rhs_cubic[-1] - 3 * precise.diameter.log10_lhs[-2]
    assert_close(after, c + 3 * before, rtol=1e-9)


BIAS = np.linspace(-1, 1, 32).reshape(2, 4, 4)


@pytest.mark.parametrize(
    ("fields", "inputs", "refused"),
    [
        ({"mask": "causal"}, {"bias": BIAS}, SIDES),
        ({"norm_placement": "post", "attention_skip": True}, {}, ("diameter",)),
        ({"mlp": "swiglu"}, {"mask": np.arange(4) != 1}, ("diameter",)),
        pytest.param(
            {"mlp": "gelu", "attention_skip": True, "mlp_skip": True},
            {},
            (),
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_is_not_covered_is_refused(fields, inputs, refused):
    config = rc.san(1, 2, 4, temperature=1.4, **fields)
    params, x = draws.parameters(config), jnp.eye(4)
    report = rc.bound_report(params, x, config, **inputs)
    for name in SIDES:
        sides = getattr(report, name)
        assert np.isfinite(sides.log10_lhs).all()
        assert bool(jnp.isnan(sides.log10_rhs).all()) == (name in refused), name
        assert bool(jnp.isnan(sides.tightness).any()) == (name in refused), name
    trace, mask = rc.apply(params, x, config, **inputs), inputs.get("mask")
    for tokens, size in (
        (trace.hidden[1], report.log10_residual[1]),
        (trace.attention_branch[0], report.layer.log10_lhs[0]),
    ):
        residual = rc.composite_norm(rc.residual(tokens, mask=mask))
        assert_close(size, np.log10(residual), atol=1e-4)


def test_the_share_that_saturation_leaves_of_a_score(x64):
    log_u = np.array([-800.0, -30, -3, 0, 2.9, 3.1, 800])
    expected = [0, 0, *np.log(np.tanh(np.exp(log_u[2:4])) / np.exp(log_u[2:4])), -2.9, -3.1, -800]
    assert_close(mean_bounds._log_tanh_over(log_u), expected, atol=1e-12)


def test_deviations_from_the_mean_row_are_of_the_tokens_that_exist():
    spread = np.float32([[0.5, 0.0, 0.25, 0.75]])  # 0 of a token that a mask leaves out
    deviations = mean_bounds.attention_deviation(spread, np.array([True, False, True, True]))
    assert_close(deviations, [[0.75 * 2 / 3], [(0.75 / 3 + 0.5) / 2]])


@pytest.mark.full
def test_norms_of_products_without_the_product():
    rng, spectral_norm = np.random.default_rng(0), jax.jit(mean_bounds.spectral_norm)
    for shape in ((7, 3), (3, 7), (5, 5)):
        a, b = rng.standard_normal((2, *shape)).astype(np.float32)
        norm = jax.jit(mean_bounds.product_norm)(a, b)
        np.testing.assert_allclose(norm, np.linalg.norm(a @ b.T, 2), rtol=1e-5)
        tiny = spectral_norm(a * np.float32(1e-30))
        np.testing.assert_allclose(tiny, 1e-30 * np.linalg.norm(a, 2), rtol=1e-5)
    assert float(spectral_norm(np.zeros((7, 3), np.float32))) == 0
    # of Frobenius norm 1, and with two largest eigenvalues that are nearly equal
    for eigenvalues in ([0.5, 0.5, 0.5, 0.5], [3.0, 3.0 - 1e-6, 1.0, 0.0]):
        radius = jax.jit(mean_bounds.spectral_radius)(np.diag(eigenvalues).astype(np.float32))
        np.testing.assert_allclose(radius, max(eigenvalues), rtol=1e-6)
