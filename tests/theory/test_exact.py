"""Profiles in ball arithmetic, against the plain network in mpmath and closed forms."""

import itertools

import draws
import flint
import jax
import jax.numpy as jnp
import mp_oracle
import mpmath
import numpy as np
import pytest
from marks import full_but
from refusals import refused
from small_residuals import CASES, KEEP, SKIPS, D, H, network

import rank_collapse as rc
from rank_collapse.network import layers
from rank_collapse.theory import balls, exact


def check_inside(found, want):
    """Numbers of many digits inside the balls, all of which are narrow."""
    assert not np.isnan(found.profile).any()
    for value, radius, true in zip(found.profile, found.radius, want, strict=True):
        if value == -np.inf or true == -mpmath.inf:
            assert value == float(true)
        else:
            assert radius <= exact.NARROW * max(1, abs(value))
            assert abs(mpmath.mpf(value) - true) <= radius


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_the_plain_network_in_many_digits_lies_inside_the_balls(case, large):
    # At a scale of 3 these have residuals below 1e-700.
    tiny = case.endswith(" MLP") or case in ("learned gains", "experts of all")
    scale = (1.5 if tiny else 3.0) if large else 1.0
    params, x, config, inputs = network(case, scale)
    found = exact.exact_profile(params, x, config, **inputs)
    with mpmath.workdps(700):
        check_inside(found, mp_oracle.profile(params, x, config, 700, **inputs))


KINDS = (
    {},
    {"attention_skip": True},
    {"norm_placement": "post", "mlp": "gelu", "d_ff": 32} | SKIPS,
)
SHAPES = {"6 tokens": (6, 1), "10 tokens": (10, 2), "16 tokens": (16, 4)}


def at_scales_from_1_5_to_3(shape):
    """16 of 48 draws: sizes by networks by four scales."""
    first, (n, heads) = 16 * list(SHAPES).index(shape), SHAPES[shape]
    for s in range(first, first + 16):
        kind, scale = KINDS[s // 4 % 3], (1.5, 2.0, 2.5, 3.0)[s % 4]
        config = rc.TransformerConfig(depth=6, num_heads=heads, d_model=16, **kind)
        key = jax.random.key(s)
        x = jax.random.normal(jax.random.fold_in(key, 1), (n, 16)) + 0.3
        yield rc.init(key, config, scale, 0.1), x, config


@pytest.mark.full
@pytest.mark.parametrize("shape", full_but(SHAPES, "6 tokens"))
def test_large_weights_are_proved_with_a_hundred_digits(shape):
    """Saturated attention, and clusters in clusters that one center for all would lose."""
    smallest = 0.0
    for params, x, config in at_scales_from_1_5_to_3(shape):
        found = exact.exact_profile(params, x, config, max_digits=100)
        assert not np.isnan(found.profile).any()
        smallest = min(smallest, found.profile.min())
        again = exact.exact_profile(params, x, config, digits=150)
        assert (np.abs(found.profile - again.profile) <= found.radius + again.radius).all()
        if config.mlp == "none" and found.profile.min() > -60:
            with mpmath.workdps(200):
                check_inside(found, mp_oracle.profile(params, x, config, 200))
    assert smallest < {"6 tokens": -1e5, "10 tokens": -1e7, "16 tokens": 0}[shape]


@pytest.mark.full
@pytest.mark.parametrize(("scale", "norm_placement"), [(30.0, "post"), (1e3, "pre")])
def test_gelu_at_large_weights_takes_fifty_digits(scale, norm_placement):
    """Tokens in different tails of Φ: their change is known to the digits of the tokens."""
    config = rc.transformer(3, 2, 8, mlp="gelu", norm_placement=norm_placement)
    params, x = draws.parameters(config, 0, scale, 0.1), draws.tokens(5, 8)
    found = exact.exact_profile(params, x, config)
    assert found.digits == 50
    check_inside(found, mp_oracle.profile(params, x, config, 200))


@pytest.mark.full
def test_digits_are_doubled_until_the_balls_are_narrow():
    params, x, config, _ = network("attention alone")
    few = exact.exact_profile(params, x, config, digits=10, max_digits=10)
    assert few.digits == 10 and np.isnan(few.profile[-1]) and few.more_seconds > 0
    assert np.isnan(few.radius[np.isnan(few.profile)]).all()
    more = exact.exact_profile(params, x, config, digits=10)
    assert more.digits in (20, 40) and more.more_seconds == 0
    known = ~np.isnan(few.profile)
    assert (np.abs(more.profile - few.profile) <= more.radius + few.radius)[known].all()
    at_most = exact.exact_profile(params, x, config, digits=10, max_seconds=few.more_seconds / 1.01)
    assert at_most.digits == 10 and at_most.more_seconds == few.more_seconds


def test_equal_tokens_have_no_residual_and_masked_ones_no_part_in_it():
    config = rc.transformer(2, H, D)
    params = draws.parameters(config)
    found = exact.exact_profile(params, jnp.ones((4, D)), config)
    np.testing.assert_array_equal(found.profile, -np.inf)
    x = draws.tokens(5, D).at[jnp.array([0, 4])].set(1e6)
    padded = exact.exact_profile(params, x, config, mask=KEEP)
    removed = exact.exact_profile(params, x[KEEP], config)
    assert (np.abs(padded.profile - removed.profile) <= padded.radius + removed.radius).all()


@pytest.mark.full
def test_depth_takes_no_digits():
    config = rc.san(12, 2, 8)
    found = exact.exact_profile(draws.parameters(config), draws.tokens(5, 8), config)
    assert found.digits <= 100 and found.profile[-1] < -1e4
    np.testing.assert_allclose(rc.local_rate(found.profile)[-1], 3, atol=1e-3)


SAN = rc.san(2, 2, 4)


def call(x=None, config=SAN, **options):
    x = draws.tokens(3, 4) if x is None else x
    return rc.exact_profile(draws.parameters(SAN), x, config, **options)


test_refusals_name_the_value = refused(
    [
        (lambda: jax.jit(lambda x: call(x=x).profile)(jnp.ones((3, 4))), "outside of jit and vmap"),
        (lambda: call(x=np.float32([[1, 2, 3, np.inf]] * 3)), "x has values that are not finite"),
        (lambda: call(bias=np.full((2, 3, 3), -np.inf)), "bias has values that are not finite"),
        (lambda: call(config=SAN.replace(skip_gain=np.nan)), "config has values that are not"),
        (lambda: call(x=jnp.ones((3, 5))), r"\(3, 5\)"),
        (lambda: call(mask=np.zeros(3, bool)), r"mask of shape \(3,\) leaves out every token"),
        (lambda: call(digits=5), "digits=5 is not between 10 and max_digits=6400"),
        (lambda: call(max_digits=40), "digits=50 is not between 10 and max_digits=40"),
        (
            lambda: call(digits=6000, max_seconds=1e-3),
            "3 tokens of width 4 in 2 layers at 6000 digits take about .* s, more than "
            "max_seconds=0.001",
        ),
    ]
)


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_activation_differences_at_any_step(name):
    """Steps from 1e-200 to 1000, in both tails: inside a ball that is narrow.

    Balls with a radius are narrow too, and hold the changes at two of their corners.
    """
    rng = np.random.default_rng(1)
    z = rng.normal(0, np.repeat([3.0, 12.0, 200.0], [30, 30, 10]))
    step = rng.choice([-1, 1], 70) * 10 ** rng.uniform(-20, 2, 70)
    step[:10] *= 1e-180
    z[20], step[20] = 0.0, 2.0
    z[60:62], step[60:62] = (-1000, 1000), (400, -2000)
    phi = mp_oracle.activation(name)
    cases = itertools.product(zip(z.tolist(), step.tolist(), strict=True), (0, 1, -1))
    for (a, s), border in cases:
        with flint.ctx.workdps(50), mpmath.workdps(700):
            wide = abs(border) * 2.0**-160
            found = balls.ACTIVATIONS[name][1](*(flint.arb(v, abs(v) * wide) for v in (a, s)))
            start, more = mpmath.mpf(a) * (1 + wide), mpmath.mpf(s) * (1 + border * wide)
            want = phi(start + more) - phi(start)
            if want == 0:
                assert found == 0
                continue
            middle, radius = (
                mpmath.mpf(int(v[0])) * mpmath.mpf(2) ** int(v[1])
                for v in (found.mid().man_exp(), found.rad().man_exp())
            )
            assert abs(middle - want) <= radius <= 1e-30 * abs(want)


@pytest.mark.full
def test_overlapping_experts_take_more_digits():
    with flint.ctx.workdps(30), pytest.raises(balls.Undecided):
        balls._largest([flint.arb(1, 0.1), flint.arb(1.05), flint.arb(3)], 2)
