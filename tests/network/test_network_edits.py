"""Edits are traced anew where the values that they refer to have changed."""

import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.network.edits import trace_edits


def test_an_edit_refers_to_the_values_of_its_call():
    """JAX keeps what it traced for a function; the function may refer to another value by now."""
    config, factor = rc.san(1, 2, 4), 2.0

    def scale(value, layer):
        return factor * value

    value, results = jnp.ones((2, 3, 3)), []
    for factor in (2.0, 5.0):  # noqa: B007  `scale` reads it
        edits = trace_edits({"weights": scale}, config, 3, 3, jnp.float32)
        results.append(float(np.unique(edits["weights"](value, 0))[0]))
    assert results == [2.0, 5.0]
