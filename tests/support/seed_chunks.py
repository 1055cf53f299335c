"""Runs a function of seeds over devices, chunk by chunk, as the executor does."""

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.runs import seeds


def map_seeds(fn, keys, shared, *, mesh=None, chunk=0, at_once=None):
    """Computes fn(key, shared) for all keys as host arrays, `chunk` keys at a time (0: all)."""
    mesh = seeds.seed_mesh() if mesh is None else mesh
    size = seeds.padded_size(chunk or len(keys), mesh)
    call, parts = seeds.run_seeds(fn, mesh, at_once=at_once), []
    for start in range(0, len(keys), size):
        chunk_keys = keys[start : start + size]
        parts.append(
            seeds.to_host(call(seeds.shard_seeds(chunk_keys, mesh, size), shared), len(chunk_keys))
        )

    def concatenate(*pieces):
        return (np if isinstance(pieces[0], np.ndarray) else jnp).concatenate(pieces)

    return jax.tree.map(concatenate, *parts)
