"""Seeds: their keys, and one function over all of them, spread over every device.

Seed s of a run draws from fold_in(key(base_seed), s), so that more seeds never change earlier
ones, and no result depends on how many devices share the work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "seeds"


def seed_keys(base_seed: int, num_seeds: int, first: int = 0) -> Any:
    """Keys of seeds first .. first + num_seeds − 1: fold_in(key(base_seed), s)."""
    if num_seeds < 1:
        raise ValueError(f"num_seeds={num_seeds} is not a positive integer")
    key = jax.random.key(base_seed)
    return jax.vmap(lambda s: jax.random.fold_in(key, s))(first + jnp.arange(num_seeds))


def seed_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A one-dimensional mesh of the given devices (default all), whose axis is "seeds"."""
    devices = jax.devices() if devices is None else list(devices)
    return jax.make_mesh(
        (len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )


def pad_seeds(tree: Any, size: int) -> Any:
    """Every leaf [s, ...] extended to [size, ...] by repeats of its last seed."""

    def pad(a):
        missing = size - a.shape[0]
        if missing < 0:
            raise ValueError(f"{a.shape[0]} seeds do not fit into {size}")
        return a if not missing else jnp.concatenate([a, jnp.repeat(a[-1:], missing, axis=0)])

    return jax.tree.map(pad, tree)


def trim_seeds(tree: Any, num_seeds: int) -> Any:
    """Every leaf [s, ...] cut to its first `num_seeds`: undoes `pad_seeds`."""
    return jax.tree.map(lambda a: a[:num_seeds], tree)


def shard_seeds(tree: Any, mesh: Mesh) -> Any:
    """Every leaf [s, ...] laid out with its leading axis over the mesh; s a multiple of it."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def padded_size(num_seeds: int, mesh: Mesh) -> int:
    """The smallest multiple of the number of devices that holds the seeds."""
    return -(-num_seeds // mesh.size) * mesh.size


def over_seeds(fn: Callable, mesh: Mesh) -> Callable:
    """fn(seed_args, shared) of one seed, as one jitted call for all seeds, shared by devices.

    Each device vmaps over its own seeds; nothing is communicated. Call the result with leaves
    [s, ...] in the first argument (s a multiple of the mesh: `pad_seeds`) and any pytree, the same
    for every seed, in the second; it returns fn's outputs with a leading seed axis.

    Args:
        fn: Function of (one seed's pytree, shared pytree).
        mesh: From `seed_mesh`.
    """
    return jax.jit(
        jax.shard_map(
            jax.vmap(fn, in_axes=(0, None)),
            mesh=mesh,
            in_specs=(PartitionSpec(AXIS), PartitionSpec()),
            out_specs=PartitionSpec(AXIS),
            # Scans start from constants that are the same on every device and end in values
            # that are not, which the check refuses.
            check_vma=False,
        )
    )


def to_host(tree: Any) -> Any:
    """Every leaf as a numpy array, gathered from all processes where there are several."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        return process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)


def map_seeds(
    fn: Callable, per_seed: Any, shared: Any = None, *, mesh: Mesh | None = None, chunk: int = 0
) -> Any:
    """`over_seeds` for any number of seeds: pads, runs chunk by chunk, trims, on the host.

    Every chunk has the same size, so there is one compilation.

    Args:
        fn: As in `over_seeds`; or an already made or compiled `over_seeds` function's result
            may be called directly instead of this.
        per_seed: Pytree with leaves [s, ...].
        shared: Pytree that every seed sees.
        mesh: From `seed_mesh`; all devices by default.
        chunk: Seeds in memory at a time; 0 for all.

    Returns:
        fn's outputs as numpy arrays [s, ...].
    """
    mesh = seed_mesh() if mesh is None else mesh
    num_seeds = jax.tree.leaves(per_seed)[0].shape[0]
    size = padded_size(min(chunk, num_seeds) if chunk else num_seeds, mesh)
    call = over_seeds(fn, mesh)
    parts = []
    for start in range(0, num_seeds, size):
        part = jax.tree.map(lambda a, i=start: a[i : i + size], per_seed)
        count = min(size, num_seeds - start)
        out = call(shard_seeds(pad_seeds(part, size), mesh), shared)
        parts.append(to_host(trim_seeds(out, count)))
    return jax.tree.map(lambda *a: np.concatenate(a), *parts)
