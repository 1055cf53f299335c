"""The pass in logarithms is right or NaN at any weights, and how it knows where it is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory import noise
from tests.oracles import draws

N, D, H, DEPTH = 6, 16, 4, 5
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SKIPS = {"attention_skip": True, "mlp_skip": True, "d_ff": 2 * D}
ANY_MASK = np.tril(np.ones((N, N), bool)) | np.eye(N, k=2, dtype=bool)
BIAS = np.random.default_rng(3).standard_normal((H, N, N)).astype(np.float32)
SEGMENTS = np.array([0, 0, 1, 1, 0, 1])
# fields, inputs, weight scales (one draw each), skip gains
CASES = {
    "SAN": ({}, {}, (0.4, 0.8, 1.4, 2, 2.5, 3, 3.5, 4), (0,)),
    "post-LN, skips, GELU": (
        {"norm_placement": "post", "mlp": "gelu"} | SKIPS,
        {},
        (0.5, 1, 2, 3, 4),
        (1, 0, 1e-30, 0.3),
    ),
    "pre-RMS, skips, GeGLU, local": (
        {"norm_placement": "pre", "norm": "rms", "mlp": "geglu", "mask": "local", "window": 1}
        | SKIPS,
        {},
        (0.5, 1, 2, 3),
        (0.7,),
    ),
    "rotary, causal, skip": (
        {"position": "rotary", "mask": "causal", "attention_skip": True},
        {},
        (0.5, 1, 2, 3),
        (0, 1e-30, 1),
    ),
    "relative, segments, bias, a mask": (
        {"position": "relative_key"},
        {"segments": SEGMENTS, "bias": BIAS, "mask": ANY_MASK},
        (0.5, 1, 2, 3),
        (0,),
    ),
    "normalised queries, rotary": (
        {"qk_norm": "head", "position": "rotary"},
        {},
        (0.5, 1, 2, 3),
        (0,),
    ),
    "queries normalised together, causal": (
        {"qk_norm": "width", "mask": "causal"},
        {},
        (0.5, 1, 2, 3),
        (0,),
    ),
    "tanh MLP": (
        {"mlp": "tanh", "d_ff": D},
        {},
        (0.5, 1, 2),
        (0,),
    ),
}


def draw_case(case):
    """Draws parameters, tokens and configs of a case, one per weight scale; also its inputs."""
    fields, inputs, scales, gains = CASES[case]
    config = rc.TransformerConfig(depth=DEPTH, num_heads=H, d_model=D, **fields)
    keys = jax.random.split(jax.random.key(len(case)), len(scales))

    def draw_network(key, scale, gain):
        x = jax.random.normal(jax.random.fold_in(key, 1), (N, D)) + 0.3
        return rc.init(key, config, scale, 0.1), x, config.replace(skip_gain=gain)

    scales = jnp.asarray(scales, jnp.float32)
    gains = jnp.resize(jnp.asarray(gains, jnp.float32), len(scales))
    compiled = jax.jit(jax.vmap(draw_network), compiler_options=QUICK)
    return *jax.tree.map(np.asarray, compiled(keys, scales, gains)), inputs


def prove_profiles(params, x, config, **inputs):
    cases = [jax.tree.map(lambda a, s=s: a[s], (params, x, config)) for s in range(len(x))]
    profiles = np.stack([rc.theory.exact_profile(*case, **inputs).profile for case in cases])
    assert not np.isnan(profiles).any()
    return profiles


def tolerance(want):
    return np.maximum(noise.ABSOLUTE, noise.RELATIVE * np.abs(want))


def check_right_or_nan(got, want):
    """Asserts that no number is wrong; returns which values are not NaN."""
    valid = ~np.isnan(got)
    assert (
        np.abs(got - want)[valid & (got != want)] < tolerance(want)[valid & (got != want)]
    ).all()
    return valid


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_right_or_refused_at_any_weights(case):
    params, x, config, inputs = draw_case(case)
    compute_profile = jax.vmap(lambda p, x, c: rc.log_residual_profile(p, x, c, **inputs))
    got = np.asarray(jax.jit(compute_profile, compiler_options=QUICK)(params, x, config))
    valid = check_right_or_nan(got, prove_profiles(params, x, config, **inputs))
    assert got.dtype == np.float32 and valid.mean() > 0.6


@functools.cache
def make_hard_cases():
    """Makes five of 150 draws of one head at weight scales from 0.3 to 6.

    Two are easy; the other three one scale gets wrong without noticing, if it has no noisy copies.
    """
    config = rc.TransformerConfig(depth=6, num_heads=1, d_model=D)

    def draw_network(key):
        key_scale, _, _, key_params, key_tokens = jax.random.split(key, 5)
        low, high = np.log10((0.3, 6.0))
        scale = 10 ** jax.random.uniform(key_scale, minval=low, maxval=high)
        x = 0.3 + jax.random.normal(key_tokens, (N, D))
        return rc.init(key_params, config, scale, 0.1), x

    keys = jax.random.split(jax.random.key(21), 150)[np.array([16, 24, 38, 82, 142])]
    compiled = jax.jit(jax.vmap(draw_network), compiler_options=QUICK)
    params, x = jax.tree.map(np.asarray, compiled(keys))
    cases = [jax.tree.map(lambda a, s=s: a[s], (params, x)) for s in range(5)]
    return (
        params,
        x,
        config,
        np.stack([rc.theory.exact_profile(*case, config).profile for case in cases]),
    )


@pytest.mark.full
def test_one_scale_refuses_what_its_noisy_copies_contradict():
    params, x, config, want = make_hard_cases()

    def compute_profiles(replicas):
        single = functools.partial(rc.log_residual_profile, config=config, replicas=replicas)
        return np.asarray(jax.jit(jax.vmap(single), compiler_options=QUICK)(params, x))

    silent = compute_profiles(0)
    wrong = (np.abs(silent - want) > tolerance(want)).any(axis=1)
    assert wrong[2:].any() and not wrong[:2].any()
    got = compute_profiles(2)
    check_right_or_nan(got, want)
    assert np.isnan(got[wrong, -1]).all()
    assert not np.isnan(got[:2]).any() and not np.isnan(got[:, :3]).any()


def test_copies_that_differ_end_the_profile():
    copies = np.tile(np.float32([1.0, -50.0, -3e4, -np.inf]), (4, 1))
    np.testing.assert_array_equal(noise.mask_uncertain(copies), copies[0])
    copies[1] += [0.0045, 0.02, 14, 0]  # half of 0.01 decades, or of a thousandth of the logarithm
    np.testing.assert_array_equal(noise.mask_uncertain(copies), copies[0])
    copies[2, 1] -= 0.01
    np.testing.assert_array_equal(np.isnan(noise.mask_uncertain(copies)), [0, 1, 1, 1])
    copies[2, 1] += 0.01
    copies[3, 2] = np.nan
    np.testing.assert_array_equal(np.isnan(noise.mask_uncertain(copies)), [0, 0, 1, 1])
    copies[3, 2] = copies[0, 2]
    for place, value in (((1, 3), -9e4), ((0, 3), -9e4), ((2, 1), -np.inf), ((0, 1), -np.inf)):
        differs = copies.copy()  # tokens are equal in some copies alone
        differs[place] = value
        from_there = np.arange(4) >= place[1]
        np.testing.assert_array_equal(np.isnan(noise.mask_uncertain(differs)), from_there)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_moves_by_at_most_two_units_in_the_last_place(dtype):
    with jax.enable_x64(dtype == np.float64):
        a = jnp.asarray(np.random.default_rng(0).standard_normal(4000) * 1e3, dtype)
        a = a.at[:4].set(jnp.array([0.0, -jnp.inf, jnp.inf, jnp.nan]))
        move = noise.Noise(jnp.uint32(5), jnp.uint32(2))
        moved, again = np.asarray(move(a)), np.asarray(move(a))
        ulps = (moved[4:] - np.asarray(a)[4:]) / np.spacing(np.asarray(np.abs(a))[4:])
        assert set(np.abs(ulps)) <= {0, 0.5, 1, 2, 3, 4}  # units change at powers of two
        assert np.abs(ulps).max() >= 2 and abs(ulps.mean()) < 0.1 and (moved != again).mean() > 0.5
        np.testing.assert_array_equal(moved[:4], a[:4])
        turns = [noise.Noise(jnp.uint32(5), jnp.uint32(2)).at(jnp.uint32(l))(a) for l in (0, 1)]
        assert np.mean(turns[0] != turns[1]) > 0.5  # every turn of a loop has noise of its own
        still = noise.Noise(jnp.uint32(5), jnp.uint32(0))
        np.testing.assert_array_equal(still.at(jnp.uint32(3))(a), a)


@pytest.mark.full
def test_features_below_float_range_are_refused():
    """SiLU is so far below 0 that float32 has 0 for all features, but the residual is not 0."""
    config = rc.TransformerConfig(2, 2, D, mlp="silu", d_ff=D)
    params = draws.parameters(config, bias_scale=0.0)
    params = draws.changed(params, mlp={"b_in": params.layers.mlp.b_in - 300})
    x = draws.normal(4, D)
    got = np.asarray(rc.log_residual_profile(params, x, config, replicas=0))
    assert np.isfinite(got[0]) and np.isnan(got[1:]).all()
