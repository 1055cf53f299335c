"""The constant of the 3^L law: by hand, and beside small residuals of networks."""

import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.collapse import cubic_law
from rank_collapse.network.passes import replay
from rank_collapse.network.residual import lone_norm, normalise_tokens
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused


def closed_constant(*network, **inputs):
    return cubic_law.measured_constant(cubic_law.closed_profile(*network, **inputs)[0])


def test_measured_constant_is_the_sum_of_kappas(x64):
    profile = np.array([0.5, -0.1, -1.0, -3.2, -9.5])
    constant = cubic_law.measured_constant(profile)
    kappa = profile[1:] - 3 * profile[:-1]
    total = profile[0] + sum(k / 3 ** (l + 1) for l, k in enumerate(kappa))
    np.testing.assert_allclose(constant.log10_lambda, total, rtol=1e-5)
    np.testing.assert_allclose(constant.log10_c_eff, 2 * (total - 0.5), rtol=1e-5)
    # layers that left float range are left out, in each profile its own
    pair = np.stack([profile, [0.5, -0.1, -1.0, -np.inf, -np.inf]])
    constant = cubic_law.measured_constant(pair)
    np.testing.assert_allclose(constant.log10_lambda, [total, -1 / 9], rtol=1e-5)
    assert np.isnan(cubic_law.measured_constant(np.full(3, np.nan)).log10_lambda)
    constant = cubic_law.measured_constant(np.array([0.5, np.nan, -3.2]))  # of the input alone
    np.testing.assert_array_equal(constant, [0.5, 0.0])
    # numbers after a layer without one do not count
    constant = cubic_law.measured_constant(np.array([0.5, -0.1, np.nan, -3.2]))
    np.testing.assert_allclose(constant, [-0.1 / 3, 2 * (-0.1 / 3 - 0.5)], rtol=1e-6)


def test_two_tokens_by_hand(x64):
    """±r in one dimension: C = r², so that r' = w_q w_k w_v w_o r³ and c_eff is that product."""
    config = rc.san(6, 1, 1, layer_map=(0,) * 6)
    params = draws.parameters(config, bias_scale=0.0)
    one = np.ones((1, 1, 1, 1))
    weights = {"w_q": 2.0 * one, "w_k": one, "w_v": 0.3 * one, "w_o": one}
    params, x = draws.changed(params, attention=weights), np.array([[3.1], [2.9]])
    profile = cubic_law.cubic_profile(params, x, config)
    log10_r = [-1.0]
    for _ in range(6):
        log10_r.append(math.log10(0.6) + 3 * log10_r[-1])
    assert_close(profile, np.array(log10_r) + math.log10(2) / 2, rtol=1e-9)
    # ‖R‖ = √2 r: c_eff = 0.6/2 in that norm, up to the layers left out, κ/3^L of them
    constant = closed_constant(params, x, config)
    assert abs(float(constant.log10_c_eff) - math.log10(0.3)) <= abs(math.log10(0.3)) / 3**6 * 1.001


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
    cubic = cubic_law.cubic_profile(params, x, config, mask=keep)
    assert float(profile[-1]) < -300
    assert_close(cubic[0], profile[0], atol=1e-9)
    assert_close(np.diff(cubic)[0], np.diff(profile)[0], atol=1e-3)
    if config.mlp != "none":
        with pytest.raises(ValueError, match="MLPs are not certified"):
            closed_constant(params, x, config, mask=keep)
        return
    measured = cubic_law.measured_constant(profile)
    closed = closed_constant(params, x, config, mask=keep)
    assert_close(closed.log10_lambda, measured.log10_lambda, atol=2e-4)


REFUSED = {
    "a mask by row": ({}, {"mask": np.tri(5, dtype=bool)}, "rows see different keys"),
    "a mask by head and row": ({}, {"mask": np.ones((2, 5, 5), bool)}, "rows see different keys"),
    "a bias": ({}, {"bias": np.zeros((5, 5), np.float32)}, "rows have different biases"),
    "a causal mask": ({"mask": "causal"}, {}, "mask='causal'"),
    "a window": ({"mask": "local", "window": 2}, {}, "mask='local'"),
    "mixing": ({"mixing": rc.network.Mixing(0.5, 0.5, 0.0)}, {}, "mixing="),
    "a skip": ({"attention_skip": True}, {}, "attention_skip=True"),
    "positions": ({"position": "rotary"}, {}, "position='rotary'"),
    "capped scores": ({"score_cap": 2.0}, {}, "score_cap=2.0"),
    "additive scores": ({"score": "additive"}, {}, "score='additive'"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("compute", [cubic_law.cubic_profile, cubic_law.closed_profile])
def test_rows_that_differ_are_refused(case, compute):
    fields, inputs, message = REFUSED[case]
    config = rc.san(2, 2, 8).replace(**fields)
    params = draws.parameters(config)
    x = draws.normal(5, 8)
    is_refused(f"the cubic law does not cover .*{message}", compute, params, x, config, **inputs)


def measure_from_start(params, x, config):
    return cubic_law.measured_constant(cubic_law.cubic_profile(params, x, config))


@pytest.mark.full
def test_float32_is_float64_in_deep_layers_and_the_mean_token_does_not_matter():
    config = rc.san(14, 2, 8)
    params, x = draws.parameters(config, bias_scale=0.0), draws.normal(6, 8)
    single, certified = measure_from_start(params, x, config), closed_constant(params, x, config)
    with jax.enable_x64(True):
        params, x = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x))
        double, shifted, scaled = jax.device_get(
            [measure_from_start(params, tokens, config) for tokens in (x, x + 2.0, 10 * x)]
        )
        expected = jax.device_get(closed_constant(params, x, config))
    np.testing.assert_allclose(certified.log10_lambda, expected.log10_lambda, rtol=1e-4)
    np.testing.assert_allclose(single.log10_lambda, double.log10_lambda, rtol=1e-5)
    assert_close(shifted.log10_lambda, double.log10_lambda, rtol=1e-9)
    assert_close(scaled.log10_lambda, double.log10_lambda + 1, rtol=1e-9)
    assert_close(scaled.log10_c_eff, double.log10_c_eff, rtol=1e-7, atol=1e-9)


def test_the_closed_form_starts_where_the_diameter_bound_certifies_it(x64):
    """Pre-norm at scale 1, where the constant from layer 0 on has the wrong sign in every seed."""
    config = rc.san(8, 4, 64, norm_placement="pre")
    params = draws.parameters(config, 3, bias_scale=0.0, gain_scale=0.0)
    x = draws.normal(32, 64, seed=7)
    profile = rc.log_residual_profile(params, x, config)
    closed, start, growth = cubic_law.closed_profile(params, x, config)
    constant = cubic_law.measured_constant(closed)
    assert float(cubic_law.measured_constant(profile).log10_lambda) < -0.05
    assert float(measure_from_start(params, x, config).log10_lambda) > 0.1
    np.testing.assert_allclose(constant.log10_lambda, profile[-1] / 3**8, rtol=1e-3)
    assert 0 < int(start) < 8
    last = int(start) + 1  # up to the input of the first certified layer it is measured
    assert_close(closed[:last], profile[:last], rtol=1e-9)
    np.testing.assert_array_equal(growth < 0, np.arange(8) >= start)
    # a layer whose input has no logarithm is not certified, and the other ones are as before
    log = cubic_law.log_trace(params, x, config)
    log = log.replace(profile=draws.with_value(log.profile, 6, -np.inf))
    cut_growth = cubic_law.closed_profile(params, x, config, log=log)[2]
    assert_close(cut_growth, np.where(np.arange(8) == 6, np.nan, growth), rtol=1e-12)
    # no layer of large scores: tokens stay apart, and there is nothing that could be certified
    sharp_params = jax.tree.map(lambda a: 4 * np.asarray(a), params)
    closed, start, growth = cubic_law.closed_profile(sharp_params, x, config)
    assert np.isnan(closed).all() and start == 8 and np.nanmin(growth) > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "placement", full_but(["none", "pre", "post", "sandwich", "branch"], "post")
)
def test_no_layer_grows_more_than_its_bound(placement, x64):
    """The bound is above the distance after the layer, for tokens of very different lengths."""
    config = rc.san(1, 2, 6, norm_placement=placement, branch_gain=0.7)

    def compute_margin(key):
        keys = jax.random.split(key, 4)
        params = rc.init(keys[0], config, 10 ** jax.random.uniform(keys[1], minval=-1), 0.3)
        x = jax.random.normal(keys[2], (4, 6)) * jnp.exp(jax.random.normal(keys[3], (4, 1)))
        trace = rc.apply(params, x, config)
        growth = partial(cubic_law.layer_growth, keep=jnp.ones(4, bool))
        bound = jax.tree.map(lambda a: a[0], replay(growth, params, trace, config))
        before, after = (log_diameter(a) for a in (x, trace.hidden[-1]))
        return bound.cubic + bound.after + 3 * (bound.before + before) - after

    def log_diameter(a):
        return jnp.log(jnp.max(jnp.sum((a[:, None] - a[None]) ** 2, axis=-1))) / 2

    margin = jax.jit(jax.vmap(compute_margin))(jax.random.split(jax.random.key(0), 400))
    assert float(margin.min()) > -1e-12  # infinite where sharp scores make all outputs equal
    assert np.isfinite(margin).mean() > 0.99


def test_the_factor_of_a_norm_is_met_by_tokens_of_one_length(x64):
    """|LN x − LN y| = |x − y|/√(σ_x σ_y) where σ_x = σ_y, less where they differ."""
    spec = lone_norm(None, "layer", 0.01)
    for lengths, least, most in (([1.3, 1.3], 1 - 1e-12, 1 + 1e-12), ([1.0, 3.0], 0.7, 0.95)):
        x = jnp.array(lengths)[:, None] * jnp.array([[1.0, -1, 0], [0, 1, -1]])
        masks = (jnp.array([True, False]), jnp.array([False, True]))
        logs = [cubic_law._norm_factor(spec, x, keep) for keep in masks]
        normed = normalise_tokens(spec, x)
        ratio = jnp.linalg.norm(normed[0] - normed[1]) / jnp.linalg.norm(x[0] - x[1])
        assert least <= float(ratio / jnp.exp((logs[0] + logs[1]) / 2)) <= most
        # of both tokens together it is the larger factor
        both = cubic_law._norm_factor(spec, x, jnp.ones(2, bool))
        assert_close(both, max(logs))
    gains = SimpleNamespace(gain=jnp.array([0.5, -3.0, 1.0]))
    fields = {"norm": gains, "norm_kind": "rms", "eps": 0.01}
    factor = cubic_law._norm_factor(SimpleNamespace(**fields), x, jnp.array([True, False]))
    root = np.sqrt(np.mean(np.square(x[0])) + 0.01)
    assert_close(factor, np.log(3.0 / root))  # the largest gain without its sign


@pytest.mark.parametrize("placement", ["none", "pre", "post", "sandwich", "branch", "both"])
def test_the_growth_of_a_layer_is_that_of_its_heads_gains_and_norms(placement, monkeypatch):
    """Heads add up; the size of a gain counts, and each norm has its own gain and tokens."""
    sizes, asked = jnp.array([[0.3, 2.0], [1.5, 0.8]]), []

    def attention_norms(*arguments):
        asked.append(arguments)
        return jnp.log(sizes)

    monkeypatch.setattr(cubic_law.mean_bounds, "attention_norms", attention_norms)
    spec = lone_norm(SimpleNamespace(gain=jnp.array([0.5, -3.0])), "layer", 0.01)
    branch_norm = SimpleNamespace(gain=jnp.array([-2.0, 1.5]))
    spec = spec.replace(placement=placement, branch_gain=jnp.array(-0.7), branch_norm=branch_norm)
    summed, branch = draws.normal(5, 6, seed=1), draws.normal(5, 6, seed=2)
    has_norm = spec.norms_input or spec.norms_sum
    fields = {"norm_input": summed if has_norm else None, "branch_output": branch}
    passages = {"attention": SimpleNamespace(spec=spec, **fields)}
    layer = SimpleNamespace(
        params=SimpleNamespace(attention="weights"),
        gains=SimpleNamespace(temperature=1.4),
        config="network",
    )
    keep = jnp.array([True, False, True, True, False])
    growth = cubic_law.layer_growth(layer, passages, keep)
    assert asked == [("weights", 1.4, "network")]

    def largest_factor(tokens, gain):
        return math.log(gain / np.sqrt(np.var(tokens, axis=1) + 0.01)[np.asarray(keep)].min())

    assert_close(growth.cubic, math.log(0.3 * 1.5 + 2.0 * 0.8))
    assert_close(growth.before, largest_factor(summed, 3.0) if spec.norms_input else 0.0)
    after = math.log(0.7) + (largest_factor(branch, 2.0) if spec.norms_branch else 0.0)
    assert_close(growth.after, after + (largest_factor(summed, 3.0) if spec.norms_sum else 0.0))


@pytest.mark.parametrize("scale_scores", [False, True])
def test_the_leading_order_of_attention_is_a_sum_over_heads(scale_scores):
    """R Σ_h W_QK,h C W_h/(τ√k) with C = RᵀR/n of the tokens that exist, beside NumPy."""
    config = rc.san(1, 2, 8).replace(scale_scores=scale_scores)
    weights = jax.tree.map(lambda a: a[0], draws.parameters(config).layers.attention)
    existing = np.array([True, True, False, True, True])
    residual = np.where(existing[:, None], draws.normal(5, 8), 0)
    layer = SimpleNamespace(
        params=SimpleNamespace(attention=weights),
        extra=None,
        config=config,
        gains=SimpleNamespace(temperature=1.4),
        inputs=SimpleNamespace(existing_tokens=existing),
    )
    state = cubic_law.LogState(jnp.zeros(8), jnp.asarray(residual), jnp.asarray(-2.0))
    output, _ = cubic_law.CubicAttention().apply_attention(layer, state)
    w_q, w_k, w_v, w_o = map(np.asarray, (weights.w_q, weights.w_k, weights.w_v, weights.w_o))
    covariance = residual.T @ residual / 4
    scale = 1.4 * (2.0 if scale_scores else 1.0)
    expected = sum(
        residual @ w_q[h] @ w_k[h].T @ covariance @ w_v[h] @ w_o[h] / scale for h in range(2)
    )
    assert_close(output.residual, expected, rtol=1e-4, atol=1e-5)
    assert output.log_scale == -6


@pytest.mark.parametrize("is_known", [False, True])
def test_the_closed_form_is_of_passes_with_all_inputs(is_known, monkeypatch):
    """A trace in logarithms that is known is not computed again."""
    inputs = {"mask": "mask", "segments": "segments"}
    asked = []

    def note(name):
        return lambda *arguments, **options: asked.append((name, arguments, options)) or name

    config = rc.san(1, 1, 2)
    monkeypatch.setattr(cubic_law, "_prepared", lambda params, x, *_: ("float32", "prepared"))
    monkeypatch.setattr(cubic_law, "log_trace", note("log"))
    monkeypatch.setattr(cubic_law.rc, "apply", note("trace"))
    monkeypatch.setattr(cubic_law, "_closed_pass", lambda *arguments: arguments)
    log = "known" if is_known else None
    arguments = cubic_law.closed_profile("params", "x", config, log=log, **inputs)
    assert arguments == ("float32", "prepared", config, log or "log", "trace")
    passes = [(name, ("float32", "x", config), inputs) for name in ("log", "trace")]
    assert asked == passes[is_known:]


def test_half_precision_is_computed_in_float32():
    config = rc.san(1, 1, 2)
    params, x = jax.tree.map(
        lambda a: jnp.asarray(a, jnp.bfloat16), (draws.parameters(config), draws.normal(3, 2))
    )
    params, prepared = cubic_law._prepared(params, x, config, {})
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((params, prepared.x))}
    assert dtypes == {np.dtype(np.float32)}


def test_growth_from_a_layer_on_is_that_of_a_loop(monkeypatch):
    """Δ_m² times the constant of a layer, its norms after it and the norm before the next one; the
    first layer has the measured diameter, the others have what the bound makes of it."""
    rng = np.random.default_rng(0)
    before, cubic, after, measured = rng.normal(size=(4, 5))
    growths, asked = cubic_law.LayerGrowth(*map(jnp.asarray, (before, cubic, after))), []

    def replay_layers(function, *network):
        asked.append((function.func, function.keywords, network))
        return growths

    monkeypatch.setattr(cubic_law, "replay", replay_layers)
    growth = cubic_law.log10_growth("params", "trace", jnp.asarray(measured), "config", "keep")
    network = "params", "trace", "config"
    assert asked == [(cubic_law.layer_growth, {"keep": "keep"}, network)]
    expected = []
    for first in range(5):
        diameter, largest = measured[first] * math.log(10), -math.inf
        for layer in range(first, 5):
            step = cubic[layer] + after[layer] + (before[layer + 1] if layer < 4 else 0)
            largest = max(largest, step + 2 * diameter)
            diameter = 3 * diameter + step
        expected.append(largest / math.log(10))
    np.testing.assert_allclose(growth, expected, rtol=1e-4)


@pytest.mark.parametrize("growth", [[0.5, -0.5, 0.0], [0.5, 0.25, 0.0], [-1.0, -1.0, -1.0]])
def test_the_law_begins_at_the_first_layer_whose_measured_diameter_certifies_it(
    growth, monkeypatch
):
    """Diameters are of residuals times e^s; a growth of 1 is not certified, nor is one without a
    residual. Up to its layer the profile is the measured one."""
    asked = []

    def log10_growth(*arguments):
        asked.append(arguments)
        return jnp.array(growth)

    def cubic_pass(params, prepared, config, measured):
        asked.append((params, prepared, config, measured))
        return -100.0 - jnp.arange(4)

    monkeypatch.setattr(cubic_law, "log10_growth", log10_growth)
    monkeypatch.setattr(cubic_law, "_cubic_pass", cubic_pass)
    states = SimpleNamespace(log_scale=jnp.array([0.0, -2.0, -9.0]))
    measured = np.array([0.5, -1.0, -4.0, -13.0])
    log = SimpleNamespace(
        input_diameters=jnp.array([0.25, 0.5, 0.75]), inputs=states, profile=jnp.asarray(measured)
    )
    prepared, config = SimpleNamespace(existing_tokens="tokens"), SimpleNamespace(depth=3)
    compute = cubic_law._closed_pass.__wrapped__
    profile, start, listed = compute("params", prepared, config, log, "trace")
    (*first, diameters, network, keep), (*passed, (layer, inputs)) = asked
    assert first == ["params", "trace"] and (network, keep) == (config, "tokens")
    decimal = [0.0, -2.0 / math.log(10), -9.0 / math.log(10)]
    assert_close(diameters, np.add([0.25, 0.5, 0.75], decimal), rtol=1e-6)
    assert passed == ["params", prepared, config] and inputs is states
    first = {0.5: 1, 0.25: 3, -1.0: 0}[growth[1] if growth[1] > 0 else growth[0]]
    assert start == layer == first and listed.tolist() == growth
    law = np.where(np.arange(4) <= first, measured, -100.0 - np.arange(4))
    assert_close(profile, law if first < 3 else np.full(4, np.nan))
