"""Lemma, theorems, γ* and reports: on random draws in float64 and on formulas written out."""

import itertools
import math

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import near
from marks import full_but

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.theory import bounds, reports
from rank_collapse.theory.logdomain import log_trace


def make_report(params, x, config, mask=None):
    return jax.jit(rc.bound_report)(params, x, config, mask=mask)


GAINS = {1: 0.8, 3: 1.0}  # of the attention of each network


@pytest.fixture(scope="module")
def of_heads():
    """{heads: (parameters, tokens, configuration, report)} in float64."""
    made = {}
    with jax.enable_x64(True):
        for heads, gain in GAINS.items():
            config = rc.san(3, heads, 6, d_qk=4, d_v=2, branch_gain=rc.Gains(attention=gain))
            params, x = draws.parameters(config, 0, 0.7, 0.5), 0.2 * draws.tokens(5, 6, shift=0.0)
            made[heads] = params, x, config, make_report(params, x, config)
    return made


def test_the_report_of_a_log_is_that_of_its_network(of_heads, x64):
    params, x, config, expected = of_heads[3]
    report = reports.report_of_log(params, x, config, log_trace(params, x, config))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), report, expected)


def test_threshold_is_the_root():
    x = bounds.LEMMA_THRESHOLD
    assert x > 0.5  # 0 is a root too
    np.testing.assert_allclose(math.exp(x), 1 + 2 * x, rtol=1e-14)


def test_the_lemmas_excess_is_written_out(of_heads, x64):
    params, x, *_ = of_heads[3]
    layer = jax.tree.map(lambda a: np.asarray(a[0]), params.layers.attention)
    x = np.asarray(x)
    tokens_apart, expected = x - x.mean(axis=0), []
    for w_q, b_q, w_k, b_k in zip(layer.w_q, layer.b_q, layer.w_k, layer.b_k, strict=True):
        scores = (x @ w_q + b_q) @ (x @ w_k + b_k).T / 2  # √d_qk
        deviation = tokens_apart @ w_q @ w_k.T @ tokens_apart.T / 2
        p, common = (
            np.exp(s) / np.exp(s).sum(1, keepdims=True) for s in (scores, scores - deviation)
        )
        np.testing.assert_allclose(common, common[:1].repeat(len(x), axis=0), rtol=1e-9)
        spread = np.ptp(deviation, axis=1)[:, None]
        below, above = (1 - spread) * common - p, p - (1 + 2 * spread) * common
        expected.append(max(below.max(), above.max()))
    excess = jax.jit(bounds.lemma_excess)(layer, x)
    np.testing.assert_allclose(excess, expected, rtol=1e-9)
    assert np.all(excess < 0)  # as the lemma says of nearly equal tokens


def test_of_one_head_both_forms_are_the_heads_bound_and_of_several_2_sqrt_2_above_the_means(
    of_heads, x64
):
    for heads, (*_, report) in of_heads.items():
        if heads == 1:
            for sides in (report.layer, report.published_layer):
                np.testing.assert_allclose(sides.log10_rhs, report.head.log10_rhs[:, 0], rtol=1e-9)
        gain = report.layer.log10_rhs - report.mean_layer.log10_rhs
        assert np.all(gain >= math.log10(2 * math.sqrt(2)) - 1e-12)
        # the stack's bound is that of the largest c, a layer's that of its own without the gain
        c = report.layer.log10_rhs - 3 * report.log10_input + math.log10(GAINS[heads])
        np.testing.assert_allclose(report.log10_c, c, rtol=1e-9)
        start = report.log10_residual[0]
        for _ in range(3):
            start = np.max(c) + 3 * start
        np.testing.assert_allclose(report.stack.log10_rhs, start, rtol=1e-9)


def test_the_conditions_of_the_lemma_and_of_a_bound_that_falls(of_heads, x64):
    """√c ‖res(X)‖ < 1, not c ‖res(X)‖ < 1, and max_i D_ii at most the root of e^x − 1 = 2x."""
    params, x, config, _ = of_heads[1]
    compute_report, conditions = jax.jit(rc.bound_report), []
    for scale in (1, 2, 5):
        report = compute_report(params, scale * x, config)
        shrinks = np.max(report.log10_c) / 2 + report.log10_residual[0] < 0
        largest = np.max(10**report.log10_spread, axis=-1)
        np.testing.assert_array_equal(report.admissible, largest <= bounds.LEMMA_THRESHOLD)
        assert bool(report.shrinks) == shrinks
        conditions.append((bool(shrinks), bool(report.admissible[0, 0])))
    assert conditions == [(True, True), (False, True), (False, False)]


def test_scores_that_are_not_divided_are_those_of_smaller_queries(of_heads, x64):
    """W_Q/√k without 1/√k is the same network, with the same bounds; only γ has another scale."""
    params, x, config, expected = of_heads[3]
    smaller = {name: getattr(params.layers.attention, name) / 2 for name in ("w_q", "b_q")}
    undivided = config.replace(scale_scores=False)
    report = make_report(draws.changed(params, attention=smaller), x, undivided)
    for name in ("log10_spread", "log10_c"):
        np.testing.assert_allclose(getattr(report, name), getattr(expected, name), rtol=1e-9)
    np.testing.assert_allclose(report.head.log10_rhs, expected.head.log10_rhs, rtol=1e-9)


@pytest.mark.parametrize(
    "kind", full_but(["relu", "gelu", "gelu_tanh", "silu", "tanh", "identity"], "gelu")
)
def test_lipschitz_constant_bounds_every_residual(kind, x64):
    config = rc.san_mlp(1, 1, 6, mlp=kind, d_ff=9)
    params = draws.parameters(config, 0, 2.0, 1.0).layers.mlp
    params = jax.tree.map(lambda a: a[0], params)
    one, inf = jax.jit(bounds.lipschitz_constants, static_argnums=1)(params, kind)
    rng = np.random.default_rng(0)
    center = rng.standard_normal((30, 1, 6))
    noise = 10 ** rng.uniform(-3, 1, (30, 1, 1)) * rng.standard_normal((30, 4, 6))
    noise *= np.arange(4)[:, None] < rng.integers(1, 5, (30, 1, 1))  # of one to four tokens

    @jax.jit
    @jax.vmap
    def measure_shares(center, noise):
        at_center, at_x = (layers.apply_mlp(params, a, kind) for a in (center, center + noise))
        residual = at_x - at_center
        norms = (bounds.norm_1, one), (bounds.norm_inf, inf)
        return jnp.array([norm(residual) / (constant * norm(noise)) for norm, constant in norms])

    shares = measure_shares(np.tile(center, (1, 4, 1)), noise)
    assert np.all(shares <= 1 + 1e-9) and shares.max() > 0.05
    slope = float(one / (bounds.norm_1(params.w_in) * bounds.norm_1(params.w_out)))
    expected_slope = {"gelu": 1.128904, "gelu_tanh": 1.129, "silu": 1.099839}.get(kind, 1.0)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4)


@pytest.mark.full
def test_corollary_multiplies_beta_by_the_lipschitz_constant():
    config = rc.san_mlp(3, 2, 8)
    params, x = draws.parameters(config, 0, 0.3, 0.0), 0.3 * draws.normal(5, 8)
    report = make_report(params, x, config)
    worst = jnp.max(report.beta * report.lipschitz[:, None])
    np.testing.assert_allclose(report.stack_beta, worst, rtol=1e-5)
    want = bounds.log10_theorem(
        report.log10_residual[0], worst, jnp.max(report.gamma), 2, config.qk_width, 3
    )
    np.testing.assert_allclose(report.published_stack.log10_rhs, want, rtol=1e-5)
    # λ and a branch gain multiply the c of each layer too
    c = report.layer.log10_rhs - 3 * report.log10_input + jnp.log10(report.lipschitz)
    np.testing.assert_allclose(report.log10_c, c, rtol=1e-5)
    gains = rc.Gains(attention=3.0, mlp=2.0)
    tripled = make_report(params, x, config.replace(branch_gain=gains))
    gain = tripled.log10_c[0] - report.log10_c[0]
    ratio = jnp.log10(3 * tripled.lipschitz[0] / report.lipschitz[0])
    np.testing.assert_allclose(gain, ratio, rtol=1e-4)
    assert report.not_covered == () and bool(report.stack_admissible)
    assert float(report.stack.tightness) > 0
    gated = config.replace(mlp="swiglu")
    report = make_report(draws.parameters(gated), x, gated)
    assert np.isposinf(report.stack.log10_rhs) and "gated" in report.not_covered[0]


@pytest.mark.full
def test_masks_skips_and_norms_are_named():
    config, x = rc.san(2, 2, 8), draws.tokens(6, 8)
    causal = config.replace(mask="causal", attention_skip=True, norm_placement="post")
    params = draws.parameters(causal, 0, 0.5, 0.3)
    report = make_report(params, x, causal)
    branches = rc.apply(params, x, causal).attention_branch
    log10_norms = [np.log10(rc.composite_norm(rc.residual(b))) for b in branches]
    np.testing.assert_allclose(report.layer.log10_lhs, log10_norms, atol=1e-4)
    assert np.isfinite(report.layer.tightness).all()


L, H, D, K = 2, 3, 6, 4
TEMPERATURE = 1.7


def composite_norm(a):
    """‖A‖_{1,∞} = √(largest column sum · largest row sum) of absolute values."""
    return math.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max())


PER_HEAD = ("beta", "gamma", "log10_spread", "head_tightness", "head_rhs")


def collect_effects(report):
    """Collects fields of a report by name; of log10_spread the maximum over tokens."""
    names = ("beta", "gamma", "admissible", "log10_input")
    return {name: getattr(report, name) for name in names} | {
        "log10_spread": jnp.max(report.log10_spread, axis=-1),
        "head_tightness": report.head.tightness,
        "layer_tightness": report.layer.tightness,
        "layer_log10_lhs": report.layer.log10_lhs,
        "layer_log10_rhs": report.layer.log10_rhs,
        "stack_log10_lhs": report.stack.log10_lhs,
        "stack_log10_rhs": report.stack.log10_rhs,
    }


def compute_by_hand(params, x):
    """Computes what `collect_effects` has for the tokens x, by layer and by head."""
    effects = {
        name: [] for name in (*PER_HEAD, "log10_input", "layer_log10_lhs", "layer_log10_rhs")
    }
    start = math.log10(composite_norm(x - x.mean(0)))
    for l in range(L):
        p = jax.tree.map(lambda a, l=l: np.asarray(a[l], np.float64), params.layers.attention)
        r = x - x.mean(0)
        size = math.log10(composite_norm(r))
        heads = {name: [] for name in PER_HEAD}
        out = columns = rows = 0
        for h in range(H):
            w_qk, w = p.w_q[h] @ p.w_k[h].T / TEMPERATURE, p.w_v[h] @ p.w_o[h]
            e = r @ w_qk @ r.T / math.sqrt(K)
            spread = np.array([max(a - b for a, b in itertools.product(row, row)) for row in e])
            one = np.abs(w_qk).sum(0).max()
            beta = one * composite_norm(w)
            gamma = math.sqrt(K * spread.sum() * spread.max()) / (2 * one * composite_norm(r) ** 2)
            q, k = x @ p.w_q[h] + p.b_q[h], x @ p.w_k[h] + p.b_k[h]
            weights = np.exp(q @ k.T / math.sqrt(K) / TEMPERATURE)
            branch = weights / weights.sum(1, keepdims=True) @ x @ w
            log10_rhs = math.log10(4 * gamma * beta / math.sqrt(K)) + 3 * size
            log10_lhs = math.log10(composite_norm(branch - branch.mean(0)))
            values = (beta, gamma, math.log10(spread.max()), log10_rhs - log10_lhs, log10_rhs)
            for name, value in zip(PER_HEAD, values, strict=True):
                heads[name].append(value)
            columns += spread.sum() * np.abs(w).sum(0).max()
            rows += spread.max() * np.abs(w).sum(1).max()
            out = out + branch
        for name, values in heads.items():
            effects[name].append(values)
        effects["log10_input"].append(size)
        effects["layer_log10_lhs"].append(math.log10(composite_norm(out - out.mean(0))))
        effects["layer_log10_rhs"].append(math.log10(2 * math.sqrt(columns * rows)) + size)
        x = out + (p.b_v[:, None, :] @ p.w_o).sum((0, 1)) + p.b_o
    effects = {name: np.array(values) for name, values in effects.items()}
    c = np.max(effects["layer_log10_rhs"] - 3 * effects["log10_input"])
    # theorem 2.3 has one γ and one β: each is the largest, of whichever head
    gamma, beta = effects["gamma"].max(), effects["beta"].max()
    published = 4 * H / math.sqrt(K) * effects["gamma"].max(1) * effects["beta"].max(1)
    return effects | {
        "published": np.log10(published) + 3 * effects["log10_input"],
        "published_stack": (3**L - 1) / 2 * math.log10(4 * H / math.sqrt(K) * gamma * beta)
        + 3**L * start,
        "admissible": effects["log10_spread"] <= math.log10(1.2564312086261697),
        "layer_tightness": effects["layer_log10_rhs"] - effects["layer_log10_lhs"],
        "stack_log10_lhs": math.log10(composite_norm(x - x.mean(0))),
        "stack_log10_rhs": (3**L - 1) / 2 * c + 3**L * start,
    }


@pytest.mark.full
def test_bound_effects_are_the_formulas_of_layers_with_unequal_heads(x64):
    """A mask leaves four of five tokens."""
    config = rc.san(L, H, D, d_qk=K, d_v=2, temperature=TEMPERATURE)
    mask = jnp.array([True, True, False, True, True])

    def draw(key):
        params = rc.init(key, config, 1.1, 0.5)
        w_v = params.layers.attention.w_v * jnp.array([1, 0.2, 3])[None, :, None, None]
        params = draws.changed(params, attention={"w_v": w_v})
        return params, jax.random.normal(jax.random.fold_in(key, 1), (5, D)) + 1

    networks = jax.vmap(draw)(jax.random.split(jax.random.key(0), 6))
    reports = jax.jit(jax.vmap(lambda p, x: rc.bound_report(p, x, config, mask=mask)))(*networks)
    # Both cases occur: the condition holds or not; one head has the largest γ* and β or not.
    assert len(np.unique(reports.admissible)) == 2
    assert len(np.unique(reports.gamma.argmax(2) == reports.beta.argmax(2))) == 2
    for i in range(6):
        params, x, report = jax.tree.map(lambda a, i=i: a[i], (*networks, reports))
        sides = {
            "published": report.published_layer.log10_rhs,
            "head_rhs": report.head.log10_rhs,
            "published_stack": report.published_stack.log10_rhs,
        }
        effects = collect_effects(report) | sides
        expected = compute_by_hand(params, np.asarray(x)[np.asarray(mask)])
        assert effects.keys() == expected.keys()
        near(effects, expected, rtol=1e-8)
        first = report.head.log10_rhs - report.head.log10_rhs_first  # γ enters linearly
        np.testing.assert_allclose(first, np.log10(expected["gamma"]), rtol=1e-8)


SKIP = {"attention_skip": True}


@pytest.mark.parametrize(
    ("fields", "inputs", "reasons"),
    [
        ({}, {"mask": np.ones(3, bool)}, []),
        ({"mlp": "gelu"}, {}, []),
        ({"mask": "causal"}, {}, ["different keys"]),
        ({"windows": (1,)}, {}, ["different keys"]),
        ({}, {"mask": np.ones((3, 3), bool)}, ["different keys"]),
        ({"mixing": rc.network.Mixing(0.5, 0.5, 0.0)}, {}, ["mixed with the identity"]),
        ({"position": "rotary"}, {}, ["different biases"]),
        ({}, {"bias": np.zeros((3, 3))}, ["different biases"]),
        (SKIP, {}, ["skips"]),
        ({"mlp": "gelu", "mlp_skip": True}, {}, ["skips"]),
        (SKIP | {"norm_placement": "post"}, {}, ["skips", "norms"]),
        ({"mlp": "swiglu"}, {}, ["gated"]),
    ],
)
def test_each_part_that_the_theorems_lack_is_named(fields, inputs, reasons):
    config = rc.TransformerConfig(1, 2, 8, **fields)
    sentences = bounds.not_covered(config, **inputs)
    assert len(sentences) == len(reasons)
    assert all(reason in sentence for reason, sentence in zip(reasons, sentences, strict=True))
