"""Singular values under vmap, one matrix after the other where LAPACK computes them.

jaxlib's LAPACK calls for several matrices split them over the thread pool that already runs the
call, and wait for it. With as many CPU devices as threads all of them wait, for ever (jaxlib
0.10.2, seeds shared by two devices on two cores). A call for one matrix does not wait, so vmap
becomes a loop on a CPU; elsewhere it stays the batched call.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


def _one_by_one(plain: Callable) -> Callable:
    """`plain` of [..., n, d], one matrix at a time on a CPU. Derivatives are those of `plain`."""

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
