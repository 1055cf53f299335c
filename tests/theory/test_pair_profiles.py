"""Profiles from pairwise differences, against ball arithmetic, and when they must refuse."""

import functools

import ball_oracle
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from marks import slow_but
from pair_cases import CASES, EXISTS, QUICK, D, H, N, drawn, profiles, proofs, right_or_refused

import rank_collapse as rc
from experiments.checks import profiles as checks
from rank_collapse.network import layers
from rank_collapse.theory import log_operations, noise, pairs
from rank_collapse.theory import pair_operations as ops

# Each has its own program and its own proofs: a quarter of a minute.
USUAL = "SAN", "pre-RMS, skips, GeGLU, local", "rotary, causal, skip"


@pytest.mark.parametrize("case", slow_but(CASES, *USUAL))
def test_right_at_any_weights(case):
    params, x, config, inputs = drawn(case)
    got, want = profiles(params, x, config, **inputs), proofs(case)
    assert got.dtype == np.float32
    seen = right_or_refused(got, want)
    assert seen.mean() > 0.9 and np.isnan(got).mean() < 0.05


def test_float64_is_right_to_more_digits():
    params, x, config, _ = drawn("SAN")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(np.float64), (params, x, config))
        got = profiles(*wide)
    want = proofs("SAN")
    assert not np.isnan(got).any()
    seen = ~np.isnan(want)
    np.testing.assert_allclose(got[seen], want[seen], rtol=2e-6, atol=2e-6)  # the oracle's width


@functools.cache
def hard():
    """Five of 150 draws of one head: two easy ones, and the three that one scale without noisy
    copies gets wrong without noticing."""
    case = checks.CASES["SAN, 1 head, 6 tokens"]
    keys = jax.random.split(jax.random.key(21), 150)[np.array([16, 24, 38, 82, 142])]
    params, x, config, _ = checks.draw(case, keys)
    each = [jax.tree.map(lambda a, s=s: a[s], (params, x, config)) for s in range(len(x))]
    want = np.stack([ball_oracle.profile(*one, max_digits=400) for one in each])
    return params, x, each[0][2], want


def test_one_scale_refuses_what_its_noisy_copies_contradict():
    params, x, config, want = hard()

    def one_scale(replicas):
        single = functools.partial(rc.log_residual_profile, config=config, replicas=replicas)
        return np.asarray(jax.jit(jax.vmap(single), compiler_options=QUICK)(params, x))

    wrong = checks.verdicts(one_scale(0), want) == checks.VERDICTS.index("wrong")
    assert wrong[2:].any() and not wrong[:2].any()
    got = one_scale(2)
    right_or_refused(got, want)
    assert np.isnan(got[wrong, -1]).all()
    assert not np.isnan(got[:2]).any() and not np.isnan(got[:, :3]).any()


@pytest.mark.slow
def test_the_choice_is_right_where_one_scale_is_not():
    """The passes, seed by seed: each taken somewhere, and the result as proved."""
    params, x, config, want = hard()
    given = functools.partial(pairs.certified_profiles, params, x, config, batch=4)
    wide, got = given(pairs=False), given(float64=False)
    for found, number in ((wide, 1), (got, pairs.PASSES.index("pairs"))):
        assert found.profile.shape == want.shape and not np.isnan(found.profile).any()
        right_or_refused(found.profile, want)
        assert set(found.passed[:2]) == {0} and number in found.passed
        assert set(found.passed[2:]) <= {0, number}
    choose = jax.jit(pairs.certified_profile, compiler_options=QUICK)
    for s in (0, int(np.flatnonzero(got.passed)[0])):
        one = choose(*jax.tree.map(lambda a, s=s: a[s], (params, x)), config)
        assert int(one.passed) == got.passed[s]
        np.testing.assert_allclose(one.profile, got.profile[s], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_masked_tokens_are_as_if_removed():
    config = rc.san(3, 2, D)
    params = rc.init(jax.random.key(0), config, 2.0, 0.1)
    x = jax.random.normal(jax.random.key(1), (N, D)).at[2].set(1e6)
    padded = pairs.pair_profile(params, x, config, mask=EXISTS)
    removed = pairs.pair_profile(params, x[EXISTS], config)
    np.testing.assert_allclose(padded, removed, rtol=1e-4, atol=1e-4)


def test_tokens_that_see_nothing_give_nan_and_equal_tokens_minus_infinity():
    config = rc.san(2, 2, D)
    params, x = rc.init(jax.random.key(0), config), jnp.ones((4, D))
    np.testing.assert_array_equal(pairs.pair_profile(params, x, config), -np.inf)
    x = jax.random.normal(jax.random.key(1), (4, D))
    blind = np.ones((4, 4), bool)
    blind[2] = False
    got = np.asarray(pairs.pair_profile(params, x, config, mask=blind))
    assert np.isfinite(got[0]) and np.isnan(got[1:]).all()


def test_copies_that_differ_or_contradict_their_tokens_end_the_profile():
    copies = np.tile(np.float32([1.0, -50.0, -3e4, -np.inf]), (4, 1))
    agree = np.ones((4, 4), bool)
    np.testing.assert_array_equal(noise.certain(copies, agree), copies[0])
    copies[1] += [0.009, 0.04, 29, 0]  # within 0.01 decades or a thousandth of the logarithm
    np.testing.assert_array_equal(noise.certain(copies, agree), copies[0])
    copies[2, 1] -= 0.02
    np.testing.assert_array_equal(np.isnan(noise.certain(copies, agree)), [0, 1, 1, 1])
    copies[2, 1] += 0.02
    agree[3, 2] = False
    np.testing.assert_array_equal(np.isnan(noise.certain(copies, agree)), [0, 0, 1, 1])


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
        for still in (noise.Noise(jnp.uint32(5), jnp.uint32(0)), noise.Silence()):
            np.testing.assert_array_equal(still.at(jnp.uint32(3))(a), a)


def exact_activation(name):
    mpf, exp = mpmath.mpf, mpmath.exp

    def sigmoid(p):
        return 1 / (1 + exp(-p))

    def tanh_argument(z):
        return 2 * mpmath.sqrt(2 / mpmath.pi) * (z + mpf(0.044715) * z**3)

    return {
        "identity": lambda z: z,
        "relu": lambda z: max(z, mpf(0)),
        "gelu": lambda z: z * mpmath.erfc(-z / mpmath.sqrt(2)) / 2,
        "gelu_tanh": lambda z: z * sigmoid(tanh_argument(z)),
        "quick_gelu": lambda z: z * sigmoid(mpf(1.702) * z),
        "silu": lambda z: z * sigmoid(z),
        "tanh": lambda z: 2 * sigmoid(2 * z),
    }[name]


@pytest.mark.parametrize("name", slow_but(layers.ACTIVATIONS, "relu", "gelu"))
def test_activation_differences_at_any_step(name, x64):
    """Steps from 1e-200 to 100, in both tails: the logarithm to its digits, and the sign."""
    rng = np.random.default_rng(1)
    z = rng.normal(0, np.repeat([3.0, 12.0], 60))
    step = rng.choice([-1, 1], 120) * 10 ** rng.uniform(-20, 2, 120)
    step[:20] *= 1e-180
    z[20], step[20] = 0.0, 2.0
    given = ops.Signed(jnp.sign(step), jnp.log(jnp.abs(step)))
    got = ops.activation_difference(name, jnp.asarray(z), jnp.asarray(z + step), given)
    phi = exact_activation(name)
    with mpmath.workdps(2500):
        for a, s, sign, log in zip(z, step, *map(np.asarray, got), strict=True):
            want = phi(mpmath.mpf(a) + mpmath.mpf(s)) - phi(mpmath.mpf(a))
            if want == 0:
                assert log == -np.inf or sign == 0
                continue
            assert sign == mpmath.sign(want)
            exact = float(mpmath.log(abs(want)))
            assert abs(log - exact) <= 1e-10 * max(1, abs(exact))


def test_the_one_scale_pass_keeps_the_digits_of_saturated_features():
    """Both ends in one tail, where φ(z + εu) and φ(z) agree in most digits or are all but 0."""
    rng = np.random.default_rng(2)
    z = (rng.choice([-1, 1], 60) * rng.uniform(4, 15, 60)).astype(np.float32)
    u = rng.uniform(-3, 3, 60).astype(np.float32)
    for name in layers.ACTIVATIONS:
        phi = exact_activation(name)
        for eps in np.float32([1e-12, 0.01, 1]):
            got = log_operations._divided_difference(name, jnp.asarray(z), u[None], eps)[0]
            with mpmath.workdps(150):
                points = zip(z, u, strict=True)
                ends = [
                    (mpmath.mpf(float(a)), mpmath.mpf(float(b)) * float(eps)) for a, b in points
                ]
                want = np.float64([(phi(a + s) - phi(a)) / float(eps) for a, s in ends])
            seen = np.abs(want) > 1e-34  # above what float32 holds
            assert seen.mean() > 0.4
            np.testing.assert_allclose(np.asarray(got)[seen], want[seen], rtol=1e-3)


def test_features_below_float_range_are_refused():
    """All features of SiLU so far below 0 that float32 has 0: not a residual of 0."""
    config = rc.TransformerConfig(2, 2, D, mlp="silu", d_ff=D)
    params = rc.init(jax.random.key(0), config)
    mlp = params.layers.mlp
    params = params.replace(layers=params.layers.replace(mlp=mlp.replace(b_in=mlp.b_in - 300)))
    x = jax.random.normal(jax.random.key(1), (4, D))
    got = np.asarray(rc.log_residual_profile(params, x, config, replicas=0))
    assert np.isfinite(got[0]) and np.isnan(got[1:]).all()


@pytest.mark.parametrize(
    ("fields", "shape", "message"),
    [
        ({"cross_attention": True}, (N, D), "cross_attention=True"),
        ({"score": "additive", "position": "rotary"}, (N, D), "position='rotary'"),
        ({}, (N, D + 1), r"\(6, 17\)"),
        ({}, (1025, D), "1025 tokens of width 16"),
    ],
)
def test_refusals_name_the_value(fields, shape, message):
    config = rc.TransformerConfig(depth=1, num_heads=H, d_model=D, **fields)
    params = rc.init(jax.random.key(0), config)
    with pytest.raises(ValueError, match=message):
        pairs.pair_profile(params, jnp.ones(shape), config)
