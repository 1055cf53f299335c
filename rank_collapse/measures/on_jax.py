"""What measures need of JAX alone: compilation, derivatives, and arrays sharded over devices."""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import is_numpy_array
from jaxtyping import Array


def measured(measure: Callable[..., Any], args: tuple, options: Mapping[str, Any]) -> Any:
    """measure(*args, **options) in full precision; of arrays in the host's memory by NumPy.

    They are passed without a copy, and the results become JAX's again. Accelerators round the
    factors of a product to TF32 or bfloat16 by default, which a residual does not survive.
    """
    leaves, structure = jax.tree.flatten((args, dict(options)))
    of_jax = [_is_on_host(a) for a in leaves]
    leaves = [np.asarray(a) if host else a for a, host in zip(leaves, of_jax, strict=True)]
    args, options = jax.tree.unflatten(structure, leaves)
    with jax.default_matmul_precision("highest"):
        result = measure(*args, **options)
    return jax.tree.map(as_jax, result) if any(of_jax) else result


def _is_on_host(a):
    if not isinstance(a, jax.Array) or isinstance(a, jax.core.Tracer):
        return False
    return a.is_fully_addressable and {d.platform for d in a.devices()} == {"cpu"}


def as_jax(x: Any) -> Array:
    """NumPy's array as JAX's; unlike `jnp.asarray` this compiles nothing."""
    return jax.device_put(x) if is_numpy_array(x) else x


@functools.cache
def compiled(function: Callable[..., Any], static_argnums: tuple[int, ...] = ()) -> Any:
    """A function of a module as one program."""
    return jax.jit(function, static_argnums=static_argnums)


def gathered(x: Any, axis_name: str | None, axis: int) -> Any:
    """All of an array whose axis is sharded over a mesh axis of `jax.shard_map`.

    Raises:
        ValueError: No such axis.
    """
    if x is None:
        return None
    try:
        return jax.lax.all_gather(jnp.asarray(x), axis_name, axis=axis, tiled=True)
    except NameError:
        raise ValueError(f"axis_name={axis_name!r} is not an axis of a shard_map here") from None


def of_first_shard(tree: Any, axis_name: str) -> Any:
    """The first shard's copy of a value that is equal on all shards, marked as not varying."""
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda a: jax.lax.psum(jnp.where(is_first, a, 0), axis_name), tree)


def repeated(step: Callable[[Array], Array], v: Array, times: int, x: Array) -> Array:
    """`step` of v so many times; v varies over devices as x does, inside `shard_map`."""
    v = v + 0 * (x == 0)
    return jax.lax.scan(lambda v, _: (step(v), None), v, None, length=times)[0]


def _one_by_one(plain: Callable) -> Callable:
    """`plain` of [..., n, d], one matrix at a time on a CPU. Derivatives are those of `plain`.

    jaxlib's LAPACK calls for several matrices split them over the thread pool that already runs the
    call, and wait for it. With as many CPU devices as threads all of them wait, for ever (jaxlib
    0.10.2, seeds shared by two devices on two cores). A call for one matrix does not wait, so vmap
    becomes a loop on a CPU; elsewhere it stays the batched call.
    """

    @jax.custom_batching.custom_vmap
    def batched(x):
        return plain(x)

    @batched.def_vmap
    def looped(size, in_batched, x):
        loop, at_once = partial(jax.lax.map, batched), jax.vmap(plain)
        out = jax.lax.platform_dependent(x, cpu=loop, default=at_once)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_jvp
    def decomposed(x):
        return batched(x)

    @decomposed.defjvp
    def derivative(primals, tangents):
        return jax.jvp(plain, primals, tangents)

    def of_each(x):
        return decomposed(x) if x.ndim == 2 else jax.vmap(of_each)(x)

    return of_each


# x [..., n, d] → U [n, r], singular values [r], largest first, and Vᵀ [r, d], with r = min(n, d)
svd = _one_by_one(partial(jnp.linalg.svd, full_matrices=False))
svdvals = _one_by_one(jnp.linalg.svdvals)  # x [n, d] → singular values [r], largest first


@functools.cache
def from_svd(of_factors: Callable[..., Array], change: Callable[..., Array]) -> Callable:
    """x [..., n, d] → of_factors(U, σ, Vᵀ), with the derivative change(U, σ, Vᵀ, dx)."""

    @jax.custom_jvp
    def of_matrix(x):
        return of_factors(*svd(x))

    @of_matrix.defjvp
    def derivative(primals, tangents):
        factors = svd(*primals)
        return of_factors(*factors), change(*factors, *tangents)

    return jnp.vectorize(of_matrix, signature="(n,d)->(n,d)")
