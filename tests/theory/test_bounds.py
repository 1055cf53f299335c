"""Lemma, theorems, γ* and reports: on random draws in float64 and on formulas written out."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.network.residual import LayerGains
from rank_collapse.theory import bound_constants, bounds, reports
from rank_collapse.theory.log_operations import LogState
from rank_collapse.theory.logdomain import log_trace
from tests.oracles import draws
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but

make_report = jax.jit(rc.bound_report)
TEMPERATURE, GAIN = 1.7, 0.8
# of three heads: by layer and feature of the attention, by layer of the MLP
GAINS = rc.Gains(attention=np.linspace(-1.2, 0.9, 12).reshape(2, 6), mlp=np.array([0.7, -1.3]))


@pytest.fixture(scope="module")
def of_heads():
    """{heads: (parameters, tokens, configuration, report)} in float64."""
    with jax.enable_x64(True):
        sizes = {"d_qk": 4, "d_v": 2}
        one = rc.san(3, 1, 6, branch_gain=rc.Gains(attention=GAIN), **sizes)
        three = rc.san_mlp(2, 3, 6, mlp="tanh", d_ff=7, branch_gain=GAINS, **sizes)
        made = {}
        for config in (one, three.replace(temperature=TEMPERATURE)):
            params, x = draws.parameters(config, 0, 0.7, 0.5), 0.2 * draws.tokens(5, 6, shift=0.0)
            x = x * config.num_heads
            of_head = np.array([1, 0.3, 3])[None, : config.num_heads, None, None]  # unequal
            params = draws.changed(params, attention={"w_v": params.layers.attention.w_v * of_head})
            made[config.num_heads] = params, x, config, make_report(params, x, config)
    return made


def test_the_report_of_a_log_is_that_of_its_network(of_heads, x64):
    params, x, config, expected = of_heads[3]
    report = reports.report_of_log(params, x, config, log_trace(params, x, config))
    jax.tree.map(lambda a, b: assert_close(a, b, rtol=1e-9), report, expected)


def test_threshold_is_the_root():
    x = bounds.LEMMA_THRESHOLD
    assert x > 0.5  # 0 is a root too
    assert_close(math.exp(x), 1 + 2 * x, rtol=1e-14)


def test_a_power_law_of_a_constant_of_0_and_beyond_float_range():
    for c, depth, expected in ((-np.inf, 3, -np.inf), (-1.0, 90, -np.inf), (0.5, 2, 9 * 0.2 + 2.0)):
        law = bounds.log10_power_law(np.float32(0.2), np.float32(c), depth)
        np.testing.assert_allclose(law, expected, rtol=1e-6)  # c^{(3^L − 1)/2} r^{3^L}


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
        assert_close(common, common[:1].repeat(len(x), axis=0), rtol=1e-9)
        spread = np.ptp(deviation, axis=1)[:, None]
        below, above = (1 - spread) * common - p, p - (1 + 2 * spread) * common
        expected.append(max(below.max(), above.max()))
    excess = jax.jit(bounds.lemma_excess)(layer, x)
    assert_close(excess, expected, rtol=1e-9)
    assert np.all(excess < 0)  # as the lemma says of nearly equal tokens


def test_of_one_head_both_forms_are_the_heads_bound_and_of_several_2_sqrt_2_above_the_means(
    of_heads, x64
):
    for heads, (*_, report) in of_heads.items():
        if heads == 1:
            for sides in (report.layer, report.published_layer):
                assert_close(sides.log10_rhs, report.head.log10_rhs[:, 0], rtol=1e-9)
            # the stack's bound is that of the largest c, a layer's that of its own without the gain
            c = report.layer.log10_rhs - 3 * report.log10_input + math.log10(GAIN)
            assert_close(report.log10_c, c, rtol=1e-9)
        gain = report.layer.log10_rhs - report.mean_layer.log10_rhs
        assert np.all(gain >= math.log10(2 * math.sqrt(2)) - 1e-12)


def test_every_tightness_is_the_difference_of_its_sides(of_heads, x64):
    *_, report = of_heads[3]
    names = ("head", "layer", "stack", "published_layer", "published_stack")
    for name in (*names, "mean_head", "mean_layer", "diameter_layer", "diameter"):
        sides = getattr(report, name)
        for kind in ("", "_cubic") if "diameter" in name else ("",):
            difference = getattr(sides, f"log10_rhs{kind}") - sides.log10_lhs
            tightness = getattr(sides, f"tightness{kind}")
            assert_close(tightness, difference, atol=1e-9, err_msg=name)


def test_the_conditions_of_the_lemma_and_of_a_bound_that_falls(of_heads, x64):
    """√c ‖res(X)‖ < 1, not c ‖res(X)‖ < 1, and max_i D_ii at most the root of e^x − 1 = 2x."""
    params, x, config, _ = of_heads[1]
    conditions = []
    for scale in (1, 2, 5):
        report = make_report(params, scale * x, config)
        shrinks = np.max(report.log10_c) / 2 + report.log10_residual[0] < 0
        largest = np.max(10**report.log10_spread, axis=-1)
        np.testing.assert_array_equal(report.admissible, largest <= bounds.LEMMA_THRESHOLD)
        assert bool(report.shrinks) == shrinks
        assert bool(report.stack_admissible) == np.all(report.admissible)
        conditions.append((bool(shrinks), bool(report.admissible[0, 0])))
    assert conditions == [(True, True), (False, True), (False, False)]
    assert np.any(report.admissible)  # of a later layer


def test_scores_that_are_not_divided_are_those_of_smaller_queries_and_padding_is_left_out(
    of_heads, x64
):
    """W_Q/√k without 1/√k is the same network, with the same bounds; only γ has another scale.
    Tokens that a mask leaves out, the first among them, have no part in any of them."""
    params, x, config, expected = of_heads[3]
    smaller = {name: getattr(params.layers.attention, name) / 2 for name in ("w_q", "b_q")}
    undivided, mask = config.replace(scale_scores=False), np.array([0, 1, 1, 0, 1, 1, 1], bool)
    padded = np.full((7, 6), 9.0)
    padded[mask] = x
    report = make_report(draws.changed(params, attention=smaller), padded, undivided, mask=mask)
    assert_close(report.log10_spread[..., mask], expected.log10_spread, rtol=1e-9)
    assert np.isneginf(report.log10_spread[..., ~mask]).all()
    assert report.not_covered == expected.not_covered == ()
    same = {"log10_spread": None, "gamma": None, "beta": None, "stack_gamma": None}
    report, expected = (r.replace(**same, stack_beta=None) for r in (report, expected))
    jax.tree.map(lambda a, b: assert_close(a, b, rtol=1e-8), report, expected)


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
    expected_slope = {"gelu": 1.128904, "gelu_tanh": 1.129, "silu": 1.099839}.get(kind, 1.0)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4)


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
    assert_close(report.layer.log10_lhs, log10_norms, atol=1e-4)
    assert np.isfinite(report.layer.tightness).all()


L, H, D, K = 2, 3, 6, 4


def composite_norm(a):
    """‖A‖_{1,∞} = √(largest column sum · largest row sum) of absolute values."""
    return math.sqrt(np.abs(a).sum(0).max() * np.abs(a).sum(1).max())


def log10_diameter(a):
    return math.log10(max(np.linalg.norm(b - c) for b, c in itertools.product(a, a)))


PER_HEAD = ("beta", "gamma", "log10_spread", "head_rhs", "head_rhs_first", "head_tightness")
PER_LAYER = (
    *("log10_input", "layer_lhs", "layer_rhs", "lipschitz", "log10_c", "diameter_layer_lhs"),
    *("published", "published_first"),
)


def collect_effects(report):
    """Collects fields of a report by name; of log10_spread the maximum over tokens."""
    names = ("beta", "gamma", "admissible", "log10_input", "lipschitz", "log10_c")
    return {name: getattr(report, name) for name in (*names, "stack_beta", "stack_gamma")} | {
        "log10_spread": jnp.max(report.log10_spread, axis=-1),
        "head_tightness": report.head.tightness,
        "head_rhs": report.head.log10_rhs,
        "head_rhs_first": report.head.log10_rhs_first,
        "layer_lhs": report.layer.log10_lhs,
        "layer_rhs": report.layer.log10_rhs,
        "published": report.published_layer.log10_rhs,
        "published_first": report.published_layer.log10_rhs_first,
        "stack_lhs": report.stack.log10_lhs,
        "stack_rhs": report.stack.log10_rhs,
        "published_stack": report.published_stack.log10_rhs,
        "published_stack_first": report.published_stack.log10_rhs_first,
        "log10_residual": report.log10_residual,
        "diameter_lhs": report.diameter.log10_lhs,
        "diameter_layer_lhs": report.diameter_layer.log10_lhs,
    }


def iterate_bound(c, depth, start):
    """(4γβH/√k)^{(3^L − 1)/2} r^{3^L} as a logarithm."""
    return (3**depth - 1) / 2 * math.log10(c) + 3**depth * start


def compute_by_hand(params, x, config):
    """Computes what `collect_effects` has for the tokens x, by layer and by head."""
    effects = {name: [] for name in (*PER_HEAD, *PER_LAYER)}
    gains = config.branch_gain if isinstance(config.branch_gain, rc.Gains) else rc.Gains()
    states = [x]
    for l in range(config.depth):
        x = states[-1]
        p, m = (
            jax.tree.map(lambda a, l=l: np.asarray(a[l], np.float64), part)
            for part in (params.layers.attention, params.layers.mlp)
        )
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
            first = math.log10(4 * beta / math.sqrt(K)) + 3 * size
            rhs = first + math.log10(gamma)
            lhs = math.log10(composite_norm(branch - branch.mean(0)))
            values = (beta, gamma, math.log10(spread.max()), rhs, first, rhs - lhs)
            for name, value in zip(PER_HEAD, values, strict=True):
                heads[name].append(value)
            columns += spread.sum() * np.abs(w).sum(0).max()
            rows += spread.max() * np.abs(w).sum(1).max()
            out = out + branch
        for name, values in heads.items():
            effects[name].append(values)
        # theorem 2.3 has one γ and one β: each is the largest, of whichever head
        published = 4 * H / math.sqrt(K) * max(heads["beta"]) * 10 ** (3 * size)
        rhs = math.log10(2 * math.sqrt(columns * rows)) + size
        lipschitz, gain = 1.0, np.broadcast_to(gains.attention, (config.depth, D))[l]
        branch = out + (p.b_v[:, None, :] @ p.w_o).sum((0, 1)) + p.b_o
        x = gain * branch
        if m is not None:  # the slope of tanh is at most 1
            mlp_gain = np.broadcast_to(gains.mlp, config.depth)[l]
            sizes = [np.abs(m.w_in).sum(i).max() * np.abs(m.w_out).sum(i).max() for i in (0, 1)]
            lipschitz = abs(mlp_gain) * math.sqrt(sizes[0] * sizes[1])
            x = mlp_gain * (np.tanh(x @ m.w_in + m.b_in) @ m.w_out + m.b_out)
        c = rhs - 3 * size + math.log10(lipschitz * np.abs(gain).max())
        values = (size, math.log10(composite_norm(out - out.mean(0))), rhs, lipschitz, c)
        values = *values, log10_diameter(branch)
        published = (published * max(heads["gamma"]), published)
        for name, value in zip(PER_LAYER, (*values, *np.log10(published)), strict=True):
            effects[name].append(value)
        states.append(x)
    effects = {name: np.array(values) for name, values in effects.items()}
    outer = effects["lipschitz"] * np.abs(gains.attention * np.ones((config.depth, D))).max(1)
    gamma, beta = effects["gamma"].max(), (effects["beta"] * outer[:, None]).max()
    residuals = [math.log10(composite_norm(a - a.mean(0))) for a in states]
    start, depth, c = residuals[0], config.depth, 4 * H / math.sqrt(K) * beta
    return effects | {
        "stack_beta": beta,
        "stack_gamma": gamma,
        "published_stack": iterate_bound(c * gamma, depth, start),
        "published_stack_first": iterate_bound(c, depth, start),
        "admissible": effects["log10_spread"] <= math.log10(1.2564312086261697),
        "stack_lhs": residuals[-1],
        "stack_rhs": iterate_bound(10 ** effects["log10_c"].max(), depth, start),
        "log10_residual": residuals,
        "diameter_lhs": [log10_diameter(a) for a in states],
    }


def compare_by_hand(report, params, x, config):
    effects, expected = collect_effects(report), compute_by_hand(params, np.asarray(x), config)
    assert effects.keys() == expected.keys()
    near(effects, expected, rtol=3e-6 if config.mlp == "tanh" else 1e-8)  # 1e-6 of the slope


def test_the_report_is_the_formulas_written_out(of_heads, x64):
    """Of three unequal heads, gains by layer and feature, a temperature and MLPs."""
    params, x, config, report = of_heads[3]
    # the largest γ* and β are of different layers and heads
    largest = [np.unravel_index(a.argmax(), a.shape) for a in (report.gamma, report.beta)]
    assert largest[0] != largest[1]
    compare_by_hand(report, params, x, config)


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
        compare_by_hand(report, params, np.asarray(x)[np.asarray(mask)], config)


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
