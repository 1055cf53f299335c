"""Comparisons of float32 values: the tolerance comes from the dtype, and still finds errors."""

import ast
import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.closeness import FLOAT32, assert_close
from tests.support.folders import REPOSITORY

ONE = np.float32([1.0])


@pytest.mark.parametrize("one", [ONE, jnp.asarray(ONE)])
@pytest.mark.parametrize("options", [{}, {"rtol": 1e-9}, {"rtol": 0, "atol": 1e-9}])
def test_float32_values_are_compared_to_some_roundings(one, options):
    for expected in (1 + 0.9 * FLOAT32, 1 - 0.9 * FLOAT32):
        assert_close(one, [expected], **options)
        assert_close([expected], one, **options)
    for expected in (1 + 1.2 * FLOAT32, 1 - 1.2 * FLOAT32):
        with pytest.raises(AssertionError):
            assert_close(one, [expected], **options)


def test_float64_values_and_equal_ones_are_compared_as_asked():
    for expected, options in ((1 + 2e-7, {}), (1 + 2e-9, {"rtol": 1e-9})):
        with pytest.raises(AssertionError):
            assert_close(np.ones(1), [expected], **options)
    with pytest.raises(AssertionError):
        assert_close(ONE, np.nextafter(ONE, 2), rtol=0, atol=0)


FLOAT64 = {  # files where `pytest.approx` below 1e-6 compares float64 or Python's numbers
    "experiments/architectures/test_published_targets.py",
    "experiments/attention_forms/test_score_functions.py",
    "experiments/test_run_path_counts.py",
    "experiments/verdicts/test_statistics.py",
    "measures/test_norms.py",
    "measures/test_residuals.py",
    "measures/test_spikes.py",
    "paths/test_contributions.py",
    "paths/test_sharing.py",
}


def list_calls(name):
    """Lists (path, call) of all calls of functions with this name in tests."""
    paths = [p for folder in ("tests", "tests_docs") for p in (REPOSITORY / folder).rglob("*.py")]
    return [
        (path.relative_to(REPOSITORY), node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def get_argument(call, position, name, absent):
    """Returns the value of an argument: NaN where it is computed, and `absent` without it."""
    values = [k.value for k in call.keywords if k.arg == name] + call.args[position : position + 1]
    return getattr(values[0], "value", math.nan) if values else absent


def test_other_comparisons_below_1e_6_are_listed():
    calls = list_calls("approx")
    paths = {path for path, call in calls if 0 < get_argument(call, 1, "rel", 1) < 1e-6}
    assert {path.relative_to("tests").as_posix() for path in paths} == FLOAT64


def test_comparisons_by_numpy_name_a_tolerance_above_rounding():
    """Others are made by `assert_close`, which knows what float32 rounds."""
    wrong = []
    for path, call in list_calls("assert_allclose"):
        rtol, atol = get_argument(call, 2, "rtol", 1e-7), get_argument(call, 3, "atol", 0)
        if path.name != "closeness.py" and not (rtol >= FLOAT32 or rtol == atol == 0):
            wrong.append(f"{path}:{call.lineno}")
    assert not wrong, "\n".join(wrong)
