"""Parts of measures that need JAX: compilation, derivatives, and arrays sharded over devices."""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import is_numpy_array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from rank_collapse.annotations import AnyArray, Leaf


def run_on_host(measure: Callable[..., Any], args: tuple, options: Mapping[str, object]) -> Any:
    """Call measure(*args, **options) in full precision; with NumPy if all arrays are in the host's
    memory.

    Arrays are passed without a copy, and the results become JAX arrays again. By default
    accelerators round the factors of a product to TF32 or bfloat16, which destroys a residual.

    Args:
        measure: A function of arrays.
        args, options: Arguments of the measure, pytrees of arrays.
    """
    leaves, structure = jax.tree.flatten((args, dict(options)))
    has_values = not any(isinstance(a, jax.core.Tracer) for a in leaves)
    are_on_host = [has_values and _is_on_host(a) for a in leaves]
    leaves = [np.asarray(a) if host else a for a, host in zip(leaves, are_on_host, strict=True)]

    def call(tree):
        args, options = tree
        return measure(*args, **options)

    with jax.default_matmul_precision("highest"):
        result = call_with_auto_axes(call, jax.tree.unflatten(structure, leaves))
    return jax.tree.map(as_jax, result) if any(are_on_host) else result


def call_with_auto_axes(call: Callable[[Any], Any], tree: Any) -> Any:
    """Call a function of arrays whose types say how they lie over devices, and let XLA choose how
    what is computed of them does.

    Explicit axes would refuse to slice, sort, reshape or decompose what is spread over them. A
    result lies like the first axes of an argument of the same sizes; others are on all devices.
    Functions among the arguments, such as norms, see arrays with explicit axes: they may close over
    such arrays.

    Args:
        call: Function of a pytree of arrays, functions and other objects.
        tree: Its argument.
    """
    leaves, structure = jax.tree.flatten(tree)
    mesh = next(filter(None, map(_find_explicit_mesh, leaves)), None)
    if mesh is None:
        return call(tree)
    axes, arrays = _list_explicit_axes(mesh), {}
    for i, a in enumerate(leaves):
        if isinstance(a, jax.Array):
            arrays[i] = a
    specs = [(a.shape, jax.typeof(a).sharding.spec) for a in arrays.values()]

    def choose_sharding(result):
        shape = result.shape
        alike = (spec for first, spec in specs if shape and first[: len(shape)] == shape)
        return NamedSharding(mesh, PartitionSpec(*next(alike, ())[: len(shape)]))

    def make_explicit(function):
        def call_function(*args):
            """Call a function of the caller's with the axes that its own arrays have."""
            places = tuple(map(choose_sharding, args))
            return jax.sharding.explicit_axes(function, axes=axes, in_sharding=places)(*args)

        return call_function

    def call_arrays(arrays):
        filled = [arrays.get(i, a) for i, a in enumerate(leaves)]
        filled = [make_explicit(a) if callable(a) else a for a in filled]
        return call(jax.tree.unflatten(structure, filled))

    def spread(out_sharding):
        return jax.sharding.auto_axes(call_arrays, axes=axes, out_sharding=out_sharding)

    shapes = jax.eval_shape(spread(NamedSharding(mesh, PartitionSpec())), arrays)
    return spread(jax.tree.map(choose_sharding, shapes))(arrays)


def _find_explicit_mesh(a):
    """Return the mesh of an array whose type says how it lies over devices; None for others.

    Such are the axes of `jax.make_mesh` unless it gets other types (jax.sharding.AxisType).
    """
    if not isinstance(a, jax.Array) or not hasattr(jax.typeof(a), "sharding"):
        return None
    mesh = jax.typeof(a).sharding.mesh
    return mesh if _list_explicit_axes(mesh) else None


def _list_explicit_axes(mesh):
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == jax.sharding.AxisType.Explicit)


def _is_on_host(a):
    """Return whether a is a concrete array of JAX in the host's memory."""
    if not isinstance(a, jax.Array) or isinstance(a, jax.core.Tracer):
        return False
    return a.is_fully_addressable and {d.platform for d in a.devices()} == {"cpu"}


def as_jax(x: AnyArray) -> Leaf:
    """Convert NumPy's array to JAX's; unlike `jnp.asarray` this compiles nothing."""
    return jax.device_put(x) if is_numpy_array(x) else x


@functools.cache
def compile_function(
    function: Callable[..., Any], static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Compile a function of a module as one program, once."""
    return jax.jit(function, static_argnums=static_argnums)


def repeat_step(step: Callable[[Array], Array], v: Array, times: int, x: Array) -> Array:
    """Apply a step to v several times.

    Args:
        step: v → v.
        v: The first value.
        times: Number of repetitions.
        x: v varies over devices in the same way as x, inside `shard_map`.
    """
    v = v + 0 * (x == 0).astype(v.dtype)
    return jax.lax.scan(lambda v, _: (step(v), None), v, None, length=times)[0]


def map_numbers(function: Callable[[Array], Any], count: int) -> Any:
    """Call a function of 0 to count − 1, one after the other, and stack the results."""
    return jax.lax.map(function, jnp.arange(count))


def retry_unless_finite(first: Callable, second: Callable) -> Callable:
    """Return a function that calls `first`, and on a CPU `second` if `first` fails on a finite
    matrix.

    LAPACK's divide and conquer does not converge for about one matrix in ten thousand, and JAX then
    returns NaN. `second` computes the same from the transposed matrix, which takes other steps.

    Args:
        first, second: Functions of one matrix [n, d] with results of the same shapes.
    """

    def check_first(x):
        """Call `second` where `first` gives no finite results of a finite matrix."""
        results = first(x)
        is_finite = [jnp.isfinite(a).all() for a in jax.tree.leaves(results)]
        must_retry = jnp.isfinite(x).all() & ~jnp.stack(is_finite).all()
        return jax.lax.cond(must_retry, second, lambda _: results, x)

    return partial(jax.lax.platform_dependent, cpu=check_first, default=first)


def _loop_on_cpu(plain: Callable, second: Callable) -> Callable:
    """Return `plain` of [..., n, d], one matrix at a time on a CPU, with the same derivatives.

    Where `plain` returns NaN on a CPU, `second` is called, but not in a derivative.

    jaxlib's LAPACK calls for several matrices split them over the thread pool that already runs the
    call, and wait for it. If there are as many CPU devices as threads, all of them wait for ever
    (jaxlib 0.10.2, seeds shared by two devices on two cores). A call for one matrix does not wait,
    so vmap becomes a loop on a CPU; elsewhere it stays the batched call.

    Args:
        plain, second: Functions of one matrix [n, d] with results of the same shapes.
    """
    checked = retry_unless_finite(plain, second)

    @jax.custom_batching.custom_vmap
    def call_batch(x):
        return checked(x)

    @call_batch.def_vmap
    def vmap_batch(size, in_batched, x):
        """Call it for a batch: one matrix after the other on a CPU, all at once elsewhere."""
        loop, at_once = partial(jax.lax.map, call_batch), jax.vmap(plain)
        out = jax.lax.platform_dependent(x, cpu=loop, default=at_once)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_jvp
    def decompose_matrix(x):
        return call_batch(x)

    @decompose_matrix.defjvp
    def differentiate(primals, tangents):
        return jax.jvp(plain, primals, tangents)

    def decompose_matrices(x):
        return decompose_matrix(x) if x.ndim == 2 else jax.vmap(decompose_matrices)(x)

    return decompose_matrices


def _decompose(x):
    """Return (U, σ, Vᵀ) of a matrix."""
    return tuple(jnp.linalg.svd(x, full_matrices=False))


def _decompose_transposed(x):
    """Return (U, σ, Vᵀ) of a matrix from the decomposition of its transpose."""
    v, s, ut = jnp.linalg.svd(x.T, full_matrices=False)
    return ut.T, s, v.T


# x [..., n, d] → U [n, r], singular values [r], largest first, and Vᵀ [r, d], with r = min(n, d)
svd = _loop_on_cpu(_decompose, _decompose_transposed)
# x [n, d] → singular values [r], largest first
svdvals = _loop_on_cpu(jnp.linalg.svdvals, lambda x: jnp.linalg.svdvals(x.T))


@functools.cache
def from_svd(compute: Callable[..., Array], change: Callable[..., Array]) -> Callable:
    """Return a function of matrices x [..., n, d] that is computed from their SVD, with a
    derivative.

    The derivative of the SVD itself is infinite where singular values are equal; that of the
    result, in closed form, is not.

    Args:
        compute: (U, σ, Vᵀ) → its value.
        change: (U, σ, Vᵀ, dx) → its derivative along dx.
    """

    @jax.custom_jvp
    def compute_from_svd(x):
        return compute(*svd(x))

    @compute_from_svd.defjvp
    def differentiate(primals, tangents):
        factors = svd(*primals)
        return compute(*factors), change(*factors, *tangents)

    return jnp.vectorize(compute_from_svd, signature="(n,d)->(n,d)")
