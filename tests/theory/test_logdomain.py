"""The log-domain pass against thousands of digits, against float64, and under transformations."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.passes import WalkResult
from rank_collapse.theory import logdomain, noise
from rank_collapse.theory.log_operations import LogState
from rank_collapse.theory.logdomain import REPLICAS, LogPass, LogScaled
from tests.oracles import draws, mp_network
from tests.oracles.small_residuals import CASES, config_of, network as small_network
from tests.support.closeness import assert_close
from tests.support.compiling import AS_USERS
from tests.support.marks import full_but

N, D, H = 6, 16, 4
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def mp_profile(params, x, config, digits):
    """log10 ‖res(X^l)‖_{1,∞} by the plain forward pass in `digits` decimal digits."""
    return np.array(mp_network.profile(params, x, config, digits), float)


def network(config, weight_scale=1.0, bias_scale=0.1, n=N, seed=0):
    params = draws.parameters(config, seed, weight_scale, bias_scale, 0.0)
    return params, draws.tokens(n, config.d_model, seed + 1)


@functools.cache
def compile_plain_profile(options=()):
    """Compiles the profile without other inputs once, so that equal shapes are traced once."""
    options = QUICK | dict(options)
    return jax.jit(
        lambda p, x, c: rc.log_residual_profile(p, x, c, replicas=0), compiler_options=options
    )


def compile_as_users():
    """Compiles the profile as users' programs are: at the end of float range that matters."""
    return compile_plain_profile(tuple(AS_USERS.items()))


def compile_profile(config, **inputs):
    # compiled to slower code, and without noisy copies (test_noise.py has those): these tests
    # compile a hundred small programs
    if not inputs:
        return compile_plain_profile()
    return jax.jit(
        lambda p, x, c: rc.log_residual_profile(p, x, c, replicas=0, **inputs),
        compiler_options=QUICK,
    )


def to_float64(*arrays):
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a, np.float64)), arrays)


def assert_promised(got, want):
    """1e-3 in log10, or 1e-6 relative: what the log scale promises in float32."""
    assert got.dtype == jnp.float32
    np.testing.assert_array_less(np.abs(np.asarray(got) - want), np.maximum(1e-3, 1e-6 * -want))


MP_CASES = {
    "one head": ({"num_heads": 1}, {}, 500),
    "four heads, biases": ({"num_heads": 4}, {"bias_scale": 0.5}, 500),
    "gelu MLP": ({"num_heads": 2, "mlp": "gelu", "d_ff": 16}, {}, 500),
    "post-LN": ({"num_heads": 2, "norm_placement": "post"}, {}, 500),
    "causal": ({"num_heads": 2, "mask": "causal"}, {}, 200),
    "AttnScale": ({"num_heads": 2, "mixing": rc.network.Mixing(0.0, 1.5, -0.5)}, {}, 500),
    "identity 1e-30": (
        {"num_heads": 2, "mixing": rc.network.Mixing(1e-30, -0.8, 0.3), "num_kv_heads": 1},
        {"bias_scale": 0.5},
        300,
    ),
    "skip 1e-30": ({"num_heads": 2, "attention_skip": True, "skip_gain": 1e-30}, {}, 300),
}


@pytest.mark.full
@pytest.mark.parametrize("case", full_but(MP_CASES, "gelu MLP"))
def test_equals_thousands_of_digits(case):
    fields, scales, digits = MP_CASES[case]
    config = rc.TransformerConfig(**({"depth": 5, "d_model": 8} | fields))
    params, x = network(config, **scales)
    want = mp_profile(params, x, config, digits)
    assert want.min() > -0.8 * digits  # the oracle itself has digits left
    assert_promised(compile_as_users()(params, x, config), want)


@pytest.mark.full
def test_saturated_attention_is_below_float_range_and_right():
    """All weight on one key: the residual is e^(-score gap), which no softmax output holds.

    A gap of 1200 nats is a difference of sums of float32 numbers. The result is as good as these:
    it lies within the spread that other roundings of the weights give.
    """
    config = rc.TransformerConfig(depth=4, num_heads=2, d_model=D)
    params, x = network(config, weight_scale=2.5, seed=20)
    want = mp_profile(params, x, config, 1500)
    assert want[-1] < want[-2] - 500  # in one layer
    ours = compile_profile(config)
    profile = ours(params, x, config)
    with jax.enable_x64(True):
        assert_close(ours(*to_float64(params, x), config), want, rtol=1e-10)
        profiles = [ours(*to_float64(perturb_params(params, seed), x), config) for seed in range(8)]
    spread = np.abs(np.asarray(profiles) - want).max(axis=0)
    assert spread[-1] < 1e-3 * -want[-1]
    np.testing.assert_array_less(np.abs(profile - want), 3 * spread + 1e-5)


def perturb_params(params, seed):
    """Moves the parameters by about half a unit in the last place of float32."""
    rng, half = np.random.default_rng(seed), 2.0**-24
    return jax.tree.map(lambda a: np.float64(a) * (1 + half * rng.standard_normal(a.shape)), params)


def test_distances_lost_within_clusters_give_nan_not_a_wrong_number():
    """Tokens 1e-11 of the largest distance apart, and a layer that reads only these."""
    config = rc.TransformerConfig(depth=4, num_heads=2, d_model=D)
    params, x = network(config, weight_scale=2.2, seed=23)
    want = mp_profile(params, x, config, 100)
    ours = compile_profile(config)
    got = np.asarray(ours(params, x, config))
    assert_close(got[:-1], want[:-1], atol=1e-3)
    assert np.isnan(got[-1])
    with jax.enable_x64(True):  # whose 16 digits are enough
        assert_close(ours(*to_float64(params, x), config), want, atol=1e-3)


def test_the_local_rate_of_laws_in_closed_form():
    layers = np.arange(7.0)
    for unit in (-40, 0.5, 2):  # logarithms that pass 0 among them
        np.testing.assert_allclose(rc.local_rate(unit - 0.2 * 3**layers), 3, rtol=1e-4)
        np.testing.assert_allclose(rc.local_rate(unit - 0.7 * layers), 1, rtol=1e-4)
    assert np.isnan(rc.local_rate(np.zeros(4))).all()


def test_the_copies_that_are_asked_for_run(monkeypatch):
    passes, profile = [], jnp.zeros(3)

    def record_pass(network_pass, *network):
        passes.append(network_pass)
        return logdomain.LogTrace(profile, *[None] * 6)

    monkeypatch.setattr(logdomain, "run_pass", record_pass)
    config = rc.san(2, 1, 4)
    call = draws.parameters(config), draws.tokens(3, 4), config
    assert rc.log_residual_profile(*call) is profile
    rc.log_residual_profile(*call, replicas=0)
    logdomain.log_trace(*call)
    logdomain.log_trace(*call, replicas=2)
    assert passes == [LogPass(n) for n in (4, 0, 4, 2)] and LogPass() == LogPass(4)
    words, ulps = noise.make_copies(2)
    np.testing.assert_array_equal([words, ulps], [[0, 1, 2], [0, 2, 2]])


@pytest.mark.full
def test_the_profile_ends_where_copies_of_the_pass_disagree():
    config = rc.san(2, 1, 4)
    params, prepared = prepare_inputs(draws.parameters(config), draws.tokens(3, 4), config)
    x = np.asarray(prepared.x)
    profiles = np.float32([[-1, -1.001], [-3, -3.2]])  # [L, copies]
    fields = [np.full(2, i, np.float32) for i in range(6)]
    fields[0] = LogState(*(np.full(2, 7 + i, np.float32) for i in range(3)))
    result = WalkResult(params, None, None, (profiles, fields), prepared, config)
    trace = LogPass(1).build_result(result)
    start = np.log10(rc.composite_norm(x - x.mean(axis=0)))
    np.testing.assert_allclose(trace.profile, [start, -1, np.nan], rtol=1e-5)
    farthest = max(np.linalg.norm(a - b) for a in x for b in x)
    np.testing.assert_allclose(trace.diameters, [np.log10(farthest), 3, 3], rtol=1e-5)
    names = ("heads", "branches", "input_diameters", "branch_diameters")
    values = [getattr(trace, name) for name in names]
    np.testing.assert_array_equal(values, [fields[i] for i in (1, 2, 4, 5)])
    np.testing.assert_array_equal(jax.tree.leaves(trace.inputs), jax.tree.leaves(fields[0]))
    alone = result._replace(layer_results=(profiles[:, :1], fields))
    np.testing.assert_allclose(LogPass(0).build_result(alone).profile, [start, -1, -3], rtol=1e-5)


def test_branches_read_their_input_with_noise(monkeypatch):
    """The noise of an algebra moves what the attention and the MLP read, and is handed on."""
    state = LogState(np.ones(2), np.full((3, 2), 2.0), np.float64(3))
    noisy = LogState(2 * state.mean, 2 * state.residual, 2 * state.log_scale)
    layer = types.SimpleNamespace(
        params=types.SimpleNamespace(attention="a", mlp="m"),
        config=types.SimpleNamespace(mlp="relu"),
        context="c",
        gains="g",
    )
    monkeypatch.setattr(logdomain, "attention_parts", lambda *arguments: (arguments, "heads"))
    monkeypatch.setattr(logdomain.ops, "mlp_parts", lambda *arguments: arguments)
    for noise_of, read in ((None, state), (lambda a: 2 * a, noisy)):
        algebra = LogScaled("keep", noise_of)
        part, (branch_input, heads, branch) = algebra.apply_attention(layer, state)
        assert (part[0], part[2:], heads) == ("a", (layer.config, "c", "g", "keep"), "heads")
        assert branch is part and branch_input is part[1]
        mlp, _ = algebra.apply_mlp(layer, state)
        assert (mlp[0], mlp[2]) == ("m", "relu")
        for argument in (part[1], mlp[1]):
            jax.tree.map(np.testing.assert_array_equal, argument, read)


def test_each_copy_and_each_layer_have_noise_of_their_own_and_the_trace_has_none(monkeypatch):
    def walk_layer(algebra, layer, state):
        state = state.replace(mean=algebra.noise(state.mean))
        return state, {"attention": state}

    monkeypatch.setattr(logdomain, "walk_layer", walk_layer)
    monkeypatch.setattr(
        logdomain, "_attention_residuals", lambda state, keep: (state, state.mean[:2], state)
    )
    keep, x = np.arange(3) != 1, np.asarray(draws.tokens(3, 40))
    prepared = types.SimpleNamespace(x=x, existing_tokens=keep)
    network_pass, moved = LogPass(2), []
    carry = network_pass.init_carry(prepared, None)
    measure = jax.jit(
        lambda index, carry: network_pass.measure_layer(
            types.SimpleNamespace(inputs=prepared, index=index), None, None, carry
        )
    )
    for index in (0, 1):
        after, (profiles, (attention_input, heads, *_)) = measure(jnp.uint32(index), carry)
        np.testing.assert_array_equal(after.mean[0], carry.mean[0])
        np.testing.assert_array_equal(attention_input.mean, carry.mean[0])
        np.testing.assert_array_equal(heads, carry.mean[0, :2])
        assert profiles.shape == (3,)
        moved += [tuple(mean) for mean in (after.mean - carry.mean)[1:].tolist()]
    assert len({*moved}) == 4
    still = LogPass(0)
    (state, _) = still.measure_layer(
        types.SimpleNamespace(inputs=prepared, index=0),
        None,
        None,
        still.init_carry(prepared, None),
    )
    np.testing.assert_array_equal(state.mean[0], carry.mean[0])


def test_arithmetic_is_at_least_that_of_float32():
    config = rc.san_skip(1, 1, 4)
    call = draws.parameters(config), draws.tokens(3, 4)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), call)
    for measure in (
        lambda p, x: logdomain.log_trace(p, x, config, replicas=0),
        lambda p, x: rc.bound_report(p, x, config),
        lambda p, x: rc.transverse_exponents(p, x, config),
    ):
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(measure, *narrow))}
        assert dtypes - {jnp.dtype(bool)} == {jnp.dtype(jnp.float32)}


@pytest.mark.full
def test_zero_residual_and_depth_beyond_float_range_give_minus_infinity():
    config = rc.san(5, 4, 32)
    params, _ = network(config, n=16)
    got = compile_as_users()(params, jnp.ones((16, 32)), config)
    np.testing.assert_array_equal(got, -np.inf)
    config = rc.san(90, 2, 8, layer_map=(0,) * 90)
    params, x = network(config)
    got = np.asarray(compile_as_users()(params, x, config))
    assert np.isfinite(got[:70]).all() and got[-1] == -np.inf and not np.isnan(got).any()


KEEP = np.array([0, 1, 1, 0, 1, 0], bool)
COVERED = [c for c in CASES if c != "embedding" and not LogScaled.covers.refusal(config_of(c))]


def compile_ordinary_profile(config, **inputs):
    """Compiles log10 of the ordinary pass's residuals, and where they are above its rounding."""
    mask = inputs.get("mask")
    mask = mask if mask is not None and mask.ndim == 1 else None

    def profile(params, x, config):
        hidden = rc.apply(params, x, config, **inputs).hidden
        size = jax.vmap(lambda h: rc.composite_norm(rc.residual(h, mask=mask)))(hidden)
        total = jax.vmap(lambda h: rc.composite_norm(h, mask=mask))(hidden)
        return jnp.log10(size), size > 1e-11 * total

    return jax.jit(profile, compiler_options=QUICK)


@pytest.mark.full
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("case", COVERED)
def test_equals_the_ordinary_pass_where_float64_still_sees_it(case, single):
    """Float32 at the usual scale; float64 also where attention is saturated (larger weights)."""
    params, x, config, inputs = small_network(case)
    reference, ours = compile_ordinary_profile(config, **inputs), compile_profile(config, **inputs)
    narrow = np.asarray(ours(params, x, config)) if single else None
    with jax.enable_x64(True):
        for scale in (1, 2):
            large, wide = to_float64(jax.tree.map(lambda a, s=scale: s * np.asarray(a), params), x)
            want, resolved = reference(large, wide, config)
            assert resolved.sum() >= 2 or scale == 2
            got = narrow if single else ours(large, wide, config)
            assert_close(got[resolved], want[resolved], atol=1e-4)
            if single:
                return


@pytest.mark.full
def test_norms_of_branches_mixed_weights_and_a_gated_mlp():
    fields = {"norm_placement": "sandwich", "norm": "layer", "mlp": "geglu_tanh", "d_ff": 12}
    fields["mixing"] = rc.network.Mixing(0.3, 0.9, -0.5)  # rows that do not sum to 1
    config = rc.TransformerConfig(2, 2, D, attention_skip=True, mlp_skip=True, **fields)
    params, x = network(config, weight_scale=2.0)
    with jax.enable_x64(True):
        wide = to_float64(params, x)
        want, resolved = compile_ordinary_profile(config)(*wide, config)
        assert resolved.all()
        assert_close(compile_profile(config)(*wide, config), want, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mask", "replicas"), [("causal", 0), pytest.param("none", REPLICAS, marks=pytest.mark.full)]
)
def test_masked_tokens_are_as_if_removed(mask, replicas):
    config = rc.TransformerConfig(depth=6, num_heads=H, d_model=D, mask=mask)
    params, x = network(config)
    padded = jax.jit(
        lambda m: rc.log_residual_profile(params, x, config, mask=m, replicas=replicas),
        compiler_options=QUICK,
    )(jnp.asarray(KEEP))
    np.testing.assert_allclose(
        padded, compile_profile(config)(params, x[KEEP], config), rtol=1e-5, atol=1e-4
    )


@pytest.mark.full
def test_float64_gives_more_digits_and_bfloat16_gives_float32():
    config = rc.san(4, 2, 8)
    params, x = network(config, seed=10)  # each layer multiplies rounding by about three
    want = mp_profile(params, x, config, 500)
    with jax.enable_x64(True):
        params64, x64 = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x))
        got = compile_as_users()(params64, x64, config)
        assert_close(got, want, rtol=1e-12, atol=1e-12)
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    got = compile_as_users()(params, x, config)
    params, x = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    assert_promised(got, np.asarray(compile_as_users()(params, x, config)))


@pytest.mark.full
def test_ten_tokens_of_width_16_fall_like_3_to_the_depth():
    config = rc.san(5, 4, 16)
    params, x = network(config, bias_scale=0.0, n=10)
    got = compile_as_users()(params, x, config)
    assert_promised(got, mp_profile(params, x, config, 700))
    rate = np.asarray(rc.local_rate(got))
    assert rate.shape == (4,) and abs(rate[-1] - 3) < abs(rate[-2] - 3)
    np.testing.assert_allclose(rc.local_rate(2.3 * got + 5), rate, rtol=1e-4)  # base and unit


@pytest.mark.full
@pytest.mark.parametrize("depth", [12, 32])
def test_twelve_and_thirty_two_layers_are_finite(depth):
    config = rc.san(depth, 4, 32)
    params, x = network(config, n=16)
    got = np.asarray(compile_as_users()(params, x, config))
    assert np.isfinite(got).all()
    assert_close(rc.local_rate(got)[-1], 3, atol=1e-3)
