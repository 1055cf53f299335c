"""What rounding may add to an attention, term by term."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.theory import log_attention
from tests.support.closeness import assert_close

H, N, M, V, D = 2, 5, 5, 3, 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sees", ["all keys", "the first key", "keys of their own"])
def test_rounding_is_a_unit_of_the_largest_value_times_the_heaviest_row(sees, dtype, x64):
    """Of the tokens that exist; a key that all rows see does not count once for every row."""
    rng = np.random.default_rng(0)
    rows = {
        "all keys": rng.normal(size=(H, N, M)),
        "the first key": np.eye(M)[0] * rng.normal(size=(H, N, 1)),
        "keys of their own": np.eye(M) * rng.normal(size=(H, N, 1)),
    }[sees]
    keep = np.array([True, True, False, True, False])
    rows[:, 2] = 1e3  # of a token that does not exist
    q, p, other = rng.random((3, H, N, M))
    large, noise = rng.random((H, N, 1)) > 0.5, 10.0 ** rng.normal(size=H)
    values, w_o = rng.normal(size=(H, M, V)), rng.normal(size=(H, V, D))
    top, other_top, log_scale = rng.normal(size=H), rng.normal(size=H), -1.7
    cast = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    weights = types.SimpleNamespace(
        q=cast(q), p=cast(p), e=cast(rows), large=jnp.asarray(large), top=cast(top)
    )
    computed = log_attention.rounding_noise(
        types.SimpleNamespace(w_o=cast(w_o)),
        cast(values),
        types.SimpleNamespace(noise=cast(noise)),
        weights,
        [(cast(other), 1, cast(other_top))],
        cast(log_scale),
        jnp.asarray(keep),
    )
    largest = -np.inf
    for h in range(H):
        unit = np.finfo(dtype).eps * np.abs(values[h]).max() * np.abs(w_o[h]).max()
        for i in np.flatnonzero(keep):
            uncertain = noise[h] * (q[h, i] + p[h, i] * large[h, i])
            of_e = np.log(unit * sum(abs(rows[h, i]) + uncertain)) + 3 * log_scale + top[h]
            of_other = np.log(unit * sum(other[h, i])) + log_scale + other_top[h]
            largest = max(largest, of_e, of_other)
    assert computed.dtype == dtype
    assert_close(computed, largest, rtol=1e-5 if dtype == "float32" else 1e-12)
