"""Seeds: their keys, and one function over all of them, spread over every device.

Seed s of a run draws from fold_in(key(base_seed), s), so that more seeds never change earlier
ones. How many devices share the work changes results by rounding alone (docs/sweeps.md).

    mesh = seed_mesh()
    keys = seed_keys(0, 10)
    call = spread(lambda key, scale: scale * jax.random.normal(key), mesh)
    values = to_host(call(lay_out(keys, mesh), 2.0), 10)
"""

from collections.abc import Callable, Sequence
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rank_collapse.annotations import AnyArray, Key, Tree
from rank_collapse.checks import check_whole, refuse_if
from rank_collapse.runs.states import is_key

AXIS = "seeds"
KEYS = 64  # that one program makes at a time
# Options of `jax.jit` on a CPU for programs that run for less time than they take to compile.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# XLA's older generator of loops compiles random draws in half the time and small networks in two
# thirds, because it starts no further compiler for each loop. Draws keep their values, but sums of
# products may round differently. The option is left out where JAX may refuse it.
OLDER_LOOPS = {"xla_cpu_use_fusion_emitters": False}
# On a GPU: of the products that XLA gives to Triton it refuses some, such as those of [240, 48]
# when a single seed of run_sort is compiled for an H100.
PRODUCTS = {"xla_gpu_enable_triton_gemm": False}


def seed_keys(base_seed: int, num_seeds: int, first: int = 0) -> Key:
    """Return the keys of seeds first .. first + num_seeds − 1: fold_in(key(base_seed), s).

    Args:
        base_seed: Seed from which the run derives all its seeds.
        num_seeds, first: Number of the seeds, and the first of them.
    """
    numbers = np.arange(check_whole("num_seeds", num_seeds, 1))
    return fold_seeds(base_seed, check_whole("first", first, 0) + numbers)


def fold_seeds(base_seed: int, numbers: np.ndarray) -> Key:
    """Return the keys of some seeds, by their numbers.

    The numbers are padded to a multiple of `KEYS`, so that few numbers of seeds compile a program.
    """
    padded = np.pad(numbers, (0, -len(numbers) % KEYS))
    # Whatever generator JAX is set to: the draws of others may depend on the seeds in a vmap.
    key = jax.random.key(base_seed, impl="threefry2x32")
    return select_keys(fold_key(key, padded), slice(len(numbers)))


def select_keys(keys: Key, rows: slice | np.ndarray) -> Key:
    """Return some of the keys [s], selected on the host, which compiles nothing."""
    data = np.asarray(jax.random.key_data(keys))[rows]
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


@jax.jit
def fold_key(key: Key, numbers: AnyArray) -> Key:
    """Return fold_in(key, s) of each number s.

    They are computed one after the other: for a key of `unsafe_rbg` each number of a vmap would
    change the keys of the others.
    """
    return jax.lax.map(lambda s: jax.random.fold_in(key, s), numbers)


def seed_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a one-dimensional mesh of devices (all by default), whose axis is "seeds"."""
    devices = jax.devices() if devices is None else list(devices)
    refuse_if(not devices, "devices= has no device")
    return jax.make_mesh(
        (len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )


def padded_size(num_seeds: int, mesh: Mesh) -> int:
    """Return the smallest multiple of the number of devices that holds the seeds."""
    return -(-num_seeds // mesh.size) * mesh.size


def seed_sharding(mesh: Mesh) -> NamedSharding:
    """Return how a leaf [s, ...] lies over the mesh: its leading axis split."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def shard_seeds(tree: Tree, mesh: Mesh, size: int | None = None) -> Tree:
    """Split the leading axis of leaves [s, ...] over the mesh, the last seed repeated after.

    Args:
        tree: The leaves.
        mesh: Mesh from `seed_mesh`.
        size: Seeds and repeats; None for the next multiple of the number of devices.

    Raises:
        ValueError: A size below the number of seeds.
    """
    count, sharding = jax.tree.leaves(tree)[0].shape[0], seed_sharding(mesh)
    num_repeats = (size or padded_size(count, mesh)) - count
    refuse_if(num_repeats < 0, f"{count} seeds do not fit into {size}")

    def shard_leaf(a):
        """Pad one array by its last seed, and lay it out."""
        if num_repeats:
            module = np if isinstance(a, np.ndarray) else jnp  # compiles nothing on the host
            a = module.concatenate([a, module.repeat(a[-1:], num_repeats, axis=0)])
        return jax.device_put(a, sharding)

    return jax.tree.map(shard_leaf, tree)


def to_host(tree: Tree, num_seeds: int | None = None) -> Tree:
    """Copy every leaf to the host.

    Args:
        tree: Arrays, with leading seed axes where `num_seeds` is given.
        num_seeds: Number of seeds to keep, because laid-out arrays are padded.

    Returns:
        Numpy arrays; random keys stay keys, on one device.
    """

    def copy_leaf(leaf):
        """Copy one array to the host; random keys stay keys."""
        if is_key(leaf):
            data = copy_leaf(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        array = np.asarray(leaf)
        return array if num_seeds is None else array[:num_seeds]

    return jax.tree.map(copy_leaf, tree)


def group_size(mesh: Mesh) -> int | None:
    """Return how many seeds a device vmaps over: one on a CPU, all (None) elsewhere.

    One is about as fast there.
    """
    return 1 if is_on_cpu(mesh) else None


def is_on_cpu(mesh: Mesh) -> bool:
    """Return whether the devices are CPUs."""
    return mesh.devices.flat[0].platform == "cpu"


def run_seeds(
    fn: Callable,
    mesh: Mesh,
    *,
    at_once: int | None = None,
    donate: tuple[int, ...] = (),
    level: int = 1,
) -> Callable:
    """Return fn(*one seed's pytrees, shared) as one jitted call for all seeds on all devices.

    Nothing is communicated. Call the result with leaves [s, ...] in all arguments but the last (s
    is a multiple of the mesh: `shard_seeds`), and with any pytree in the last, which is the same
    for every seed. It returns fn's outputs with a leading seed axis, laid out over the mesh.

    Args:
        fn: Function of one seed.
        mesh: Mesh from `seed_mesh`.
        at_once: Number of seeds over which a device vmaps; it runs such groups one after the other.
            None for all its seeds. It changes results only by rounding.
        donate: Positions of arguments whose memory the result may reuse.
        level: How hard XLA optimises on a CPU. Level 1 compiles in two thirds of the default's
            time, and the programs are as fast; level 0, which is `QUICK` with `OLDER_LOOPS`, is for
            programs that run once, such as random draws. JAX's own setting,
            JAX_DISABLE_MOST_OPTIMIZATIONS=1, takes precedence.
    """
    at_once = None if at_once is None else check_whole("at_once", at_once, 1)

    def on_device(*arguments):
        """Compute the seeds of one device, vmapped or one after the other."""
        *by_seed, shared = arguments
        count = jax.tree.leaves(by_seed)[0].shape[0]
        if at_once == 1:
            return jax.lax.map(lambda a: fn(*a, shared), tuple(by_seed))
        if at_once is None or at_once >= count:
            return jax.vmap(lambda *a: fn(*a, shared))(*by_seed)
        return _map_groups(lambda a: fn(*a, shared), tuple(by_seed), at_once)

    def call_shards(*arguments):
        """Run the seeds of each device on it. All arguments but the last are split by seeds."""
        specs = (PartitionSpec(AXIS),) * (len(arguments) - 1) + (PartitionSpec(),)
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec(AXIS),
            # Scans start from constants that are the same on every device and end in values
            # that are not, which the check refuses.
            check_vma=False,
        )(*arguments)

    options = PRODUCTS if mesh.devices.flat[0].platform == "gpu" else None
    if is_on_cpu(mesh) and not jax.config.read("jax_disable_most_optimizations"):
        is_jaxlib_0_10 = metadata.version("jaxlib").startswith("0.10.")
        quick = QUICK | OLDER_LOOPS if is_jaxlib_0_10 else QUICK
        options = {"xla_backend_optimization_level": level} if level else quick
    return jax.jit(
        call_shards,
        donate_argnums=donate,
        out_shardings=seed_sharding(mesh),  # which XLA would change for arrays of size 0
        compiler_options=options,
    )


def _map_groups(fn, by_seed, at_once):
    """Compute seeds in groups, one group after the other, as `jax.lax.map` does with `batch_size`,
    but for arrays of size 0, too.

    Args:
        fn: Function of one seed.
        by_seed: Its arguments [s, ...].
        at_once: Seeds of a group; the last group may have fewer.
    """
    count = jax.tree.leaves(by_seed)[0].shape[0]
    groups, remaining = divmod(count, at_once)
    whole = groups * at_once

    def split(a):
        return a[:whole].reshape(groups, at_once, *a.shape[1:])

    grouped = jax.lax.map(jax.vmap(fn), jax.tree.map(split, by_seed))
    results = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), grouped)
    if not remaining:
        return results
    last = jax.vmap(fn)(jax.tree.map(lambda a: a[whole:], by_seed))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), results, last)
