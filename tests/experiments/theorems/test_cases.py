"""Cases of a theorem share one program and equal the same function of each case alone."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.theorems.cases import compute_cases
from tests.support.closeness import assert_close


def test_cases_equal_the_function_of_each_case_in_one_program():
    num_traces = []

    def compute(key, scale):
        num_traces.append(1)
        noise = jax.random.normal(key, (3,))
        return {"noise": scale * noise, "half": scale / 2}

    keys, scales = jax.random.split(jax.random.key(0), 4), [1.0, -2.0, 0.0, 0.5]
    results = compute_cases(compute, keys, scales)
    assert len(num_traces) == 1
    assert all(isinstance(leaf, np.ndarray) for leaf in results.values())
    alone = [compute(key, jnp.float32(scale)) for key, scale in zip(keys, scales, strict=True)]
    for name, values in results.items():
        assert_close(values, np.stack([case[name] for case in alone]), rtol=1e-6)
