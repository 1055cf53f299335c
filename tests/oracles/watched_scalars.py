"""Scalars that `watch` measures, in NumPy, of tokens [b, n, d] and weights [b, h, n, m]."""

import numpy as np


def composite(x):
    return np.sqrt(np.abs(x).sum(axis=0).max() * np.abs(x).sum(axis=1).max())


def compute_ratio(x, mask):
    """Computes ‖X − 1x̄ᵀ‖/‖X‖ in ‖·‖_{1,∞}, the mean over examples."""
    examples = [a[m] for a, m in zip(x, mask, strict=True)]
    return np.mean([composite(a - a.mean(axis=0)) / composite(a) for a in examples])


def compute_entropy(p, mask):
    """Computes the mean entropy over heads and the queries that exist, then over examples."""
    p = np.concatenate([p, np.maximum(1 - p.sum(axis=-1, keepdims=True), 1e-30)], axis=-1)  # sinks
    rows = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    return np.mean([r[:, m].mean() for r, m in zip(rows, mask, strict=True)])
