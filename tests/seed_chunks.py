"""A function of seeds over devices, chunk by chunk, as the executor has it."""

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.runs import seeds


def mapped(fn, keys, shared, *, mesh=None, chunk=0, at_once=None):
    """fn(key, shared) of all keys as host arrays, `chunk` of them at a time (0: all)."""
    mesh = seeds.seed_mesh() if mesh is None else mesh
    size = seeds.padded_size(chunk or len(keys), mesh)
    call, parts = seeds.run_seeds(fn, mesh, at_once=at_once), []
    for start in range(0, len(keys), size):
        own = keys[start : start + size]
        parts.append(seeds.to_host(call(seeds.shard_seeds(own, mesh, size), shared), len(own)))

    def joined(*pieces):
        return (np if isinstance(pieces[0], np.ndarray) else jnp).concatenate(pieces)

    return jax.tree.map(joined, *parts)
