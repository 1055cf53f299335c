"""Sampled rows of attention against the same rows of full weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import each_is_refused

import rank_collapse as rc

B, H, G, N, M, K = 2, 4, 2, 6, 8, 5
RNG = np.random.default_rng(0)
Q, KEYS = RNG.normal(size=(B, H, N, K)), RNG.normal(size=(B, G, M, K))
LEFT = np.arange(M) >= np.array([[0], [3]])  # padding on the left


def weights(q, k, mask=None, causal=False, window=None):
    """Full weights [b, h, n, m], query by query; zeros where no key may be attended to."""
    n, m = q.shape[-2], k.shape[-2]
    p = np.zeros((B, H, n, m))
    for b, h, i in np.ndindex(B, H, n):
        place = i + m - n
        seen = [
            j
            for j in range(m)
            if (mask is None or np.broadcast_to(mask, (B, m))[b, j])
            and (not causal or j <= place)
            and (window is None or abs(place - j) < window)
        ]
        if seen:
            e = np.exp([q[b, h, i] @ k[b, h // (H // G), j] / np.sqrt(K) for j in seen])
            p[b, h, i, seen] = e / e.sum()
    return p


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 3},
        {"window": 2},
        {"mask": LEFT},
        {"mask": LEFT[1], "causal": True, "window": 4},
    ],
    ids=str,
)
def test_rows_are_those_of_full_weights(framework, options):
    kind = {"numpy": np.asarray, "jax": jnp.asarray}.get(framework)
    kind = kind or pytest.importorskip("torch").tensor
    dtype = np.float32 if framework == "jax" else np.float64
    for keys, rows in ((KEYS, [5, 0, 3]), (KEYS[:, :, :N], None), (KEYS[:, :, :N], [4, 2])):
        given = dict(options)
        if "mask" in given:
            given["mask"] = given["mask"][..., -keys.shape[-2] :]
        p = weights(Q, keys, **given)[:, :, slice(None) if rows is None else rows]
        mask = np.broadcast_to(given.get("mask", True), (B, keys.shape[-2]))
        counted = p.sum(axis=-1) > 0
        if keys.shape[-2] == N:
            counted &= mask[:, None, slice(None) if rows is None else rows]
        found = rc.attention_rows(
            kind(Q.astype(dtype)), kind(keys.astype(dtype)), rows=rows, **given
        )
        for name, value in found.items():
            extra = {"key_mask": mask} if name in ("first_column", "sink_rate") else {}
            want = rc.MEASURES[name](p, mask=counted, **extra)
            np.testing.assert_allclose(value, want, rtol=2e-5 if framework == "jax" else 1e-12)
            assert type(value) is type(kind(np.ones(2, dtype)))


def test_rows_and_shapes_that_do_not_fit_are_refused():
    each_is_refused(
        (
            lambda: rc.attention_rows(Q, KEYS, rows=[0, 6]),
            r"rows=\[0 6\] are not all among the 6 queries",
        ),
        (
            lambda: rc.attention_rows(Q, np.ones((B, 3, M, K))),
            r"q of shape .* does not fit k of shape \(2, 3, 8, 5\)",
        ),
    )
