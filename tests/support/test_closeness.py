"""Comparisons of float32 values: the tolerance comes from the dtype, and still finds errors."""

import ast

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.closeness import FLOAT32
from tests.support.folders import REPOSITORY

ONE = np.float32([1.0])


@pytest.mark.parametrize("one", [ONE, jnp.asarray(ONE)])
@pytest.mark.parametrize("options", [{}, {"rtol": 1e-9}, {"rtol": 0, "atol": 1e-9}])
def test_float32_values_are_compared_to_some_roundings(one, options):
    for expected in (1 + 0.9 * FLOAT32, 1 - 0.9 * FLOAT32):
        np.testing.assert_allclose(one, [expected], **options)
        np.testing.assert_allclose([expected], one, **options)
    for expected in (1 + 1.2 * FLOAT32, 1 - 1.2 * FLOAT32):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(one, [expected], **options)


def test_float64_values_and_equal_ones_are_compared_as_asked():
    for expected, options in ((1 + 2e-7, {}), (1 + 2e-9, {"rtol": 1e-9})):
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(np.ones(1), [expected], **options)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ONE, np.nextafter(ONE, 2), rtol=0, atol=0)


FLOAT64 = {  # files where `pytest.approx` below 1e-6 compares float64 or Python's numbers
    "test_closed_forms.py",
    "test_contributions.py",
    "test_run_paths.py",
    "test_score_variance.py",
    "test_sharing.py",
    "test_spikes.py",
    "test_statistics.py",
}


def test_other_comparisons_below_1e_6_are_listed():
    names = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "approx":
                tolerances = [k.value for k in node.keywords if k.arg == "rel"] or node.args[1:2]
                if any(0 < getattr(value, "value", 1) < 1e-6 for value in tolerances):
                    names.add(path.name)
    assert names == FLOAT64
