"""Axes of a sweep: shapes, order of points, examples, and names of runs."""

import jax
import numpy as np
import pytest

from rank_collapse.training.engine.axes import make_axes, name_value
from tests.support.refusals import is_refused

AXES = make_axes(
    {"rate": [0.1, 0.2, 0.3], "scale": 0.5, "on": [True, False]},
    {"depth": [2, 4], "act": np.tanh},
)


def test_only_lists_are_axes():
    assert (AXES.hyper_shape, AXES.static_shape, AXES.num_hyper) == ((3, 2), (2,), 6)
    assert AXES.static_points() == [{"depth": 2, "act": np.tanh}, {"depth": 4, "act": np.tanh}]
    assert make_axes(None, None).num_hyper == 1 and make_axes(None, None).static_points() == [{}]


@pytest.mark.parametrize(
    ("values", "ending"),
    [
        ([2, 4, 2], "has 2 twice"),
        ([1, "1"], "has '1' twice: each needs a name .* its own __repr__"),
        ([lambda: 1, lambda: 2], "has '<lambda>' twice: each needs a name .* its own __repr__"),
    ],
)
def test_static_values_have_different_names(values, ending):
    is_refused(ending + "$", make_axes, None, {"act": values})


def test_points_are_counted_with_the_last_axis_first_and_leaves_are_in_the_order_of_names():
    on, rate, scale = AXES.hyper_leaves(np.array([0, 1, 5]))
    assert on.tolist() == [True, False, False]
    np.testing.assert_array_equal(rate, np.float32([0.1, 0.1, 0.3]))
    np.testing.assert_array_equal(scale, np.float32([0.5, 0.5, 0.5]))
    assert rate.dtype == jax.dtypes.canonicalize_dtype(np.float64)


def test_constants_keep_every_digit_as_swept_values_do(x64):
    values = {"count": 2**24 + 1, "rate": 1 / 3}
    swept = make_axes({name: [value] for name, value in values.items()}, None)
    for axes in (make_axes(values, None), swept):
        assert [leaf.tolist() for leaf in axes.hyper_leaves(np.zeros(2, int))] == [
            [value] * 2 for value in values.values()
        ]


def test_whole_numbers_without_a_sign_keep_their_value_or_are_refused(x64):
    """As whole numbers of 64 bits, where these hold them."""
    largest = 2**63 - 1
    (leaf,) = make_axes({"a": np.array([largest], np.uint64)}, None).hyper_leaves(np.array([0]))
    assert leaf.tolist() == [largest] and leaf.dtype == np.int64
    (leaf,) = make_axes({"a": np.array([2**63], np.uint64)}, None).hyper_leaves(np.array([0]))
    assert leaf.tolist() == [2**63]


def test_examples_are_python_numbers_unless_their_dtype_is_chosen():
    values = {"a": [1, 2], "b": np.float32([1.5]), "c": 0.5, "d": [True, False]}
    values |= {"e": range(3), "f": (0.5, 1), "g": np.array([1, 2], np.int32)}
    values |= {"h": np.float16([2])}
    axes = make_axes(values, None)
    examples = axes.examples()
    assert {name: type(value) for name, value in examples.items()} == {
        "a": int,
        "b": np.float32,
        "c": float,
        "d": bool,
        "e": int,
        "f": float,
        "g": np.int32,
        "h": np.float16,
    }
    swept = {
        "a": [1, 2],
        "b": [1.5],
        "d": [True, False],
        "e": [0, 1, 2],
        "f": [0.5, 1],
        "g": [1, 2],
        "h": [2.0],
    }
    assert list(axes.hyper_axes.items()) == list(swept.items())  # in the order of the caller
    leaves = axes.hyper_leaves(np.array([0]))
    kinds = [np.int64, np.float32, np.float64, bool, np.int64, np.float64, np.int32, np.float16]
    assert [leaf.dtype for leaf in leaves] == [jax.dtypes.canonicalize_dtype(k) for k in kinds]


def test_a_tuple_is_one_static_value_and_values_of_several_kinds_have_names():
    one = make_axes(None, {"sizes": (1, 2)})
    assert one.static_shape == () and one.static_points() == [{"sizes": (1, 2)}]
    mixed = make_axes(None, {"a": ["x", 1], "b": [1, 2.5]})
    assert mixed.static_axes == {"a": ["x", "1"], "b": [1, 2.5]}
    assert mixed.static_points()[1] == {"a": "x", "b": 2.5}
    assert make_axes(None, {"a": [*np.arange(2)]}).static_axes == {"a": [0, 1]}


def test_a_run_is_named_by_what_is_swept():
    assert AXES.describe_static(1) == "depth=4"
    assert AXES.describe_run(0, 5, 3) == "seed 3 (depth=2, rate=0.3, on=False)"
    assert make_axes({"rate": 0.1}, None).describe_run(0, 0, 3) == "seed 3"


def test_names_of_values_have_no_address():
    assert name_value(np.tanh) == "tanh" and name_value([1]) == "[1]"
    assert name_value(object()) == "<object object>"


@pytest.mark.parametrize(
    ("hyper", "static", "message"),
    [
        ({"a": 1.0}, {"a": 1}, "'a' is in both hyper and static"),
        ({"seed": 1.0}, None, "hyper has the name 'seed', which is an axis of every sweep"),
        ({"a": [0.1, 0.1 + 1e-12]}, None, "has 0.1.* twice"),  # in float32
        (None, {"a": [1, 1]}, "has 1 twice"),
        ({"a": []}, None, "is empty"),
        ({"a": np.zeros(0)}, None, "hyper\\['a'\\] is empty: list at least one value"),
        ({"a": complex(1, np.nan)}, None, "hyper\\['a'\\]=.*nanj\\) has a NaN"),
    ],
)
def test_what_means_nothing_is_refused(hyper, static, message):
    is_refused(message, make_axes, hyper, static)
