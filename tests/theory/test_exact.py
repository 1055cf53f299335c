"""Profiles in ball arithmetic, against the plain network in mpmath and closed forms."""

import itertools
import types

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.theory import exact
from tests.oracles import draws, mp_network
from tests.oracles.small_residuals import CASES, KEEP, SKIPS, D, H, network
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def check_inside(balls, want):
    """Asserts that all balls are narrow and hold the numbers of many digits."""
    assert not np.isnan(balls.profile).any()
    for value, radius, true in zip(balls.profile, balls.radius, want, strict=True):
        if value == -np.inf or true == -mpmath.inf:
            assert value == float(true)
        else:
            assert radius <= exact.NARROW * max(1, abs(value))
            assert abs(mpmath.mpf(value) - true) <= radius


# These run at the usual scale, and all cases at a larger one.
USUAL = (
    "attention alone",
    "swiglu MLP",
    "post-RMS, skips",
    "sandwich, bare first layer",
    "gains",
    "a token that sees nothing",
    "windows, part rotated",
    "relative bias",
    "relative key",
    "normalised together, rotary",
    "additive, rotary, normalised, capped",
)


@pytest.mark.parametrize(
    ("case", "large"),
    [(c, False) for c in USUAL] + [pytest.param(c, True, marks=pytest.mark.full) for c in CASES],
)
def test_the_plain_network_in_many_digits_lies_inside_the_balls(case, large):
    # At a scale of 3 these have residuals below 1e-700.
    tiny = case.endswith(" MLP") or case == "learned gains"
    scale = (1.5 if tiny else 3.0) if large else 1.0
    params, x, config, inputs = network(case, scale)
    balls = exact.exact_profile(params, x, config, **inputs)
    digits = 700 if large else 300
    with mpmath.workdps(digits):
        check_inside(balls, mp_network.profile(params, x, config, digits, **inputs))


KINDS = (
    {},
    {"attention_skip": True},
    {"norm_placement": "post", "mlp": "gelu", "d_ff": 32} | SKIPS,
)
SHAPES = {"6 tokens": (6, 1), "10 tokens": (10, 2), "16 tokens": (16, 4)}
NOT_PROVED = {"6 tokens": {2, 14}, "10 tokens": {27}, "16 tokens": set()}


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_large_weights_are_proved_but_in_three_of_48_networks(shape):
    """Scales 1.5 to 3: saturated attention, and clusters in clusters."""
    (n, heads), lost = SHAPES[shape], set()
    first = 16 * list(SHAPES).index(shape)
    for s in range(first, first + 16):
        kind, scale = KINDS[s // 4 % 3], (1.5, 2.0, 2.5, 3.0)[s % 4]
        config = rc.TransformerConfig(depth=6, num_heads=heads, d_model=16, **kind)
        key = jax.random.key(s)
        x = jax.random.normal(jax.random.fold_in(key, 1), (n, 16)) + 0.3
        params = rc.init(key, config, scale, 0.1)
        balls = exact.exact_profile(params, x, config, max_digits=3200)
        if np.isnan(balls.profile).any():
            lost.add(s)
        elif config.mlp == "none" and balls.digits <= 100:
            with mpmath.workdps(200):
                check_inside(balls, mp_network.profile(params, x, config, 200))
    assert lost == NOT_PROVED[shape]


@pytest.mark.full
@pytest.mark.parametrize(("scale", "norm_placement"), [(30.0, "post"), (1e3, "pre")])
def test_gelu_at_large_weights(scale, norm_placement):
    """Tokens in different tails of Φ: their change is known to the digits of the tokens."""
    config = rc.transformer(3, 2, 8, mlp="gelu", norm_placement=norm_placement)
    params, x = draws.parameters(config, 0, scale, 0.1), draws.tokens(5, 8)
    balls = exact.exact_profile(params, x, config)
    check_inside(balls, mp_network.profile(params, x, config, 200))


def test_digits_are_doubled_until_the_balls_are_narrow():
    params, x, config, _ = network("attention alone")
    coarse = exact.exact_profile(params, x, config, digits=10, max_digits=10)
    assert coarse.digits == 10 and np.isnan(coarse.profile[-1])
    assert np.isnan(coarse.radius[np.isnan(coarse.profile)]).all()
    fine = exact.exact_profile(params, x, config, digits=10)
    assert fine.digits in (20, 40, 80)
    has_value = ~np.isnan(coarse.profile)
    assert (np.abs(fine.profile - coarse.profile) <= fine.radius + coarse.radius)[has_value].all()
    assert exact.exact_profile(params, x, config, digits=10, max_seconds=0.0).digits == 10


@pytest.mark.parametrize(
    ("seconds", "options", "is_begun"),
    [
        (1, {"max_seconds": 3}, True),
        (1, {"max_seconds": 2.9}, False),
        (200, {}, True),
        (201, {}, False),
        (1, {"max_digits": 20}, True),
        (1, {"max_digits": 19}, False),
    ],
)
def test_an_attempt_is_begun_unless_it_takes_too_long_or_too_many_digits(
    seconds, options, is_begun, monkeypatch
):
    """Digits are doubled, and take three times the seconds of those before; 600 are allowed."""
    params, x, config, _ = network("attention alone")
    now = itertools.count(step=seconds)
    monkeypatch.setattr(exact, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    balls = exact.exact_profile(params, x, config, digits=10, **options)
    assert (balls.digits > 10) == is_begun


@pytest.mark.parametrize("kind", exact.ACTIVATIONS)
def test_activations_are_those_of_mpmath(kind):
    z, phi = np.array([-3.5, -0.3, 0.0, 0.7, 2.0]), mp_network.activation(kind)
    with exact.flint.ctx.workdps(30), mpmath.workdps(30):
        balls = exact.ACTIVATIONS[kind](exact.to_balls(z))
        expected = [float(phi(mpmath.mpf(float(a)))) for a in z]
    assert_close([float(b.mid()) for b in balls], expected, rtol=1e-14)


def test_tokens_that_are_exactly_equal_have_no_residual():
    balls = exact.exact_profile(draws.parameters(SAN), np.ones((4, 4)), SAN, max_digits=100)
    np.testing.assert_array_equal(balls.profile, [-np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(balls.radius, [0, np.nan, np.nan])
    assert balls.digits == 100


SAN = rc.san(2, 2, 4)


def call(x=None, config=SAN, attention=None, **options):
    x = draws.tokens(3, 4) if x is None else x
    params = draws.changed(draws.parameters(SAN), attention=attention or {})
    return rc.theory.exact_profile(params, x, config, **options)


@parametrize_refusals(
    [
        (lambda: call(x=np.float32([[1, 2, 3, np.inf]] * 3)), "x has values that are not finite"),
        (
            lambda: call(attention={"b_o": np.full((2, 4), np.nan, np.float32)}),
            "params has values that are not finite",
        ),
        (lambda: call(bias=np.full((2, 3, 3), -np.inf)), "bias has values that are not finite"),
        (lambda: call(config=SAN.replace(skip_gain=np.nan)), "config has values that are not"),
        (lambda: call(x=jnp.ones((3, 5))), r"\(3, 5\)"),
        (lambda: call(mask=np.zeros(3, bool)), "leaves out every token"),
        (lambda: call(digits=5), "digits=5 is not a whole number from 10 to 25600"),
        (lambda: call(max_digits=40), "digits=50 is not a whole number from 10 to 40"),
    ]
)
def test_refusals_name_the_value(arguments, message):
    is_refused(message, *arguments)


@pytest.mark.parametrize("name", ["params", "x", "config"])
def test_traced_arguments_are_refused(name):
    arguments = {"params": draws.parameters(SAN), "x": draws.tokens(3, 4), "config": SAN}
    prove = jax.jit(lambda traced: rc.theory.exact_profile(**arguments | {name: traced}).profile)
    is_refused("outside of jit and vmap", prove, arguments[name])


def test_masked_tokens_have_no_part_in_the_residual():
    config = rc.transformer(2, H, D)
    params = draws.parameters(config)
    x = draws.with_value(draws.tokens(5, D), [0, 4], 1e6)
    padded = exact.exact_profile(params, x, config, mask=KEEP)
    removed = exact.exact_profile(params, x[KEEP], config)
    assert (np.abs(padded.profile - removed.profile) <= padded.radius + removed.radius).all()
    assert padded.digits == removed.digits == 50  # the first attempt's


def test_the_rate_of_eight_layers():
    config = rc.san(8, 2, 8)
    balls = exact.exact_profile(draws.parameters(config), draws.tokens(5, 8), config)
    assert balls.profile[-1] < -100
    assert_close(rc.local_rate(balls.profile)[-1], 3, atol=0.05)
