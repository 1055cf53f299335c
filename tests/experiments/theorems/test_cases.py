"""Cases of a theorem in one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.theorems.cases import compute_cases
from rank_collapse.runs import seeds
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_cases_are_those_of_the_function_alone_traced_once():
    """Of keys and numbers; the leaves of its values are NumPy arrays, cases first."""
    traces = []

    def compute(key, scale):
        traces.append(scale.dtype)
        x = jax.random.normal(key, (3,))
        return {"scaled": scale * x, "size": jnp.linalg.norm(x)}

    keys, scales = seeds.seed_keys(5, 4), (0.5, 1.0, -2.0, 3.0)
    values = compute_cases(compute, keys, scales)
    drawn = np.array([jax.random.normal(key, (3,)) for key in keys])
    assert set(traces) == {np.dtype("float64")} and len(traces) == 1
    assert all(type(value) is np.ndarray for value in values.values())
    assert_close(values["scaled"], np.array(scales)[:, None] * drawn, rtol=1e-14)
    assert_close(values["size"], np.linalg.norm(drawn, axis=1), rtol=1e-14)


def test_a_single_case_has_its_axis():
    (value,) = compute_cases(lambda x: 2 * x, [1.25])
    assert value == 2.5
