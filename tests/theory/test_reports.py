"""Reports of bounds: their formulas written out, and which parts the theorems lack."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory import bounds, reports
from rank_collapse.theory.logdomain import log_trace
from tests.oracles import draws
from tests.oracles.bound_reports import TEMPERATURE, make_report
from tests.support.closeness import assert_close, near


def test_the_report_of_a_log_is_that_of_its_network(head_cases, x64):
    params, x, config, expected = head_cases[3]
    report = reports.report_from_log(params, x, config, log_trace(params, x, config))
    jax.tree.map(lambda a, b: assert_close(a, b, rtol=1e-9), report, expected)


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


def test_the_report_is_the_formulas_written_out(head_cases, x64):
    """Of three unequal heads, gains by layer and feature, a temperature and MLPs."""
    params, x, config, report = head_cases[3]
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
