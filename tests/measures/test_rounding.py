"""Where rounding decides a measure: limits of each dtype, layer and example."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.measures.profiles import make_profile
from rank_collapse.measures.rounding import rounding_limit
from tests.support.refusals import is_refused, parametrize_refusals

RNG = np.random.default_rng(7)


def test_rounding_is_at_the_limit_and_overrules_a_spike():
    limit = 2.0**-7
    values = {
        "residual_ratio": np.array([limit, 1.01 * limit, 1]),
        "spiked": np.array([True, True, False]),
        "left_out": np.array([1, 0, 0]),
    }
    profile = make_profile(values, limit)
    assert profile.rounding.tolist() == [True, False, False]
    assert profile.spiked.tolist() == [False, True, False]
    assert list(profile.measures) == ["residual_ratio"] and profile.left_out.tolist() == [1, 0, 0]
    by_layer = make_profile(
        {"residual_ratio": np.full((2, 3), 0.01), "spiked": np.ones((2, 3), bool)},
        np.array([0.1, 0.001]),
    )
    assert by_layer.rounding.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (np.float64, 8 * 2**-52),
        (jnp.float32, 8 * 2**-23),
        ("torch.float32", 8 * 2**-23),
        (np.dtype("float16"), 2**-10),
        (jnp.bfloat16, 2**-7),
        (ml_dtypes.float8_e5m2, 2**-2),
        (np.dtype(ml_dtypes.float8_e4m3fn), 2**-3),
        ("float4_e2m1fn", 2**-1),
    ],
)
def test_rounding_limits_are_those_of_the_digits_of_a_dtype(dtype, limit):
    """ml_dtypes and NumPy say how far 1 is from the next number."""
    assert rounding_limit(dtype) == limit
    if not isinstance(dtype, str):
        name = np.dtype(dtype)
        rounds = 8 if name in (np.float32, np.float64) else 1
        assert float(ml_dtypes.finfo(name).eps) * rounds == limit


@parametrize_refusals([("int32", "dtype='int32' is not one of"), (bool, "bool")])
def test_other_dtypes_are_refused(arguments, message):
    is_refused(message, rounding_limit, *arguments)


def test_the_limit_is_of_each_layer_and_of_the_least_precise_example():
    close = (np.ones((3, 4, 2)) + 2e-3 * RNG.normal(size=(3, 4, 2))).astype(np.float32)
    low = close.astype(ml_dtypes.bfloat16)
    assert rc.profile([close[0], low[1], close[2]]).rounding.tolist() == [False, True, False]
    for examples in ([close, low], [low, close]):
        assert rc.profile(examples, batch_axis=0).rounding.all()
    assert not rc.profile([close, close], batch_axis=0).rounding.any()
    is_refused("or there are none", rc.profile, [], batch_axis=0)
    whole = np.full((1, 2, 1), 10**7)  # numbers that are no floats count as float32
    whole[0, 1] += 1
    assert rc.profile(whole)["residual_ratio"][0] > 1e-8 and rc.profile(whole).rounding.all()
    assert not rc.profile(close.astype(np.float64) * 1e-3 + 1).rounding.any()
    last_digit = rc.profile(np.array([[[1.0], [1 + 2**-52]]]))
    assert last_digit["residual_ratio"][0] > 0 and last_digit.rounding[0]
