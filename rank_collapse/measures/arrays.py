"""Arrays where they live: NumPy, JAX or torch, on their device, by one namespace of functions.

Measures are written once over `namespace(x)`, the functions of the array API standard for the
framework of x. What is known and in the host's memory, JAX's arrays on a CPU among it, is computed
by NumPy, since JAX would compile every operation again for each number of tokens.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import (
    array_namespace as namespace,
    is_jax_array,
    is_numpy_array,
    is_torch_array,
)
from jaxtyping import Array

from rank_collapse.network.inputs import as_mask
from rank_collapse.network.precision import P, R

FRAMEWORKS = ("NumPy", "JAX", "torch")


def where_it_lives(measure: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a measure's result is of its argument's framework, and on its device.

    JAX's arrays in the host's memory are passed to the measure as NumPy's, without a copy, and its
    results become JAX's again. Products of torch tensors keep their precision under `autocast`.
    """

    def is_on_host(a):
        known = isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer)
        return known and a.is_fully_addressable and {d.platform for d in a.devices()} == {"cpu"}

    @functools.wraps(measure)
    def measured(*args: P.args, **options: P.kwargs) -> R:
        leaves, structure = jax.tree.flatten((args, options))
        of_jax = [is_on_host(a) for a in leaves]
        leaves = [np.asarray(a) if own else a for a, own in zip(leaves, of_jax, strict=True)]
        args, options = jax.tree.unflatten(structure, leaves)
        device = next((a.device.type for a in leaves if is_torch_array(a)), None)
        exact = contextlib.nullcontext()
        if device is not None:
            exact = sys.modules["torch"].autocast(device, enabled=False)
        with np.errstate(all="ignore"), exact:
            found = measure(*args, **options)
        return jax.tree.map(as_jax, found) if any(of_jax) else found

    return measured


def as_array(x: Any) -> Any:
    """NumPy's, JAX's or torch's array as it is; anything else, lists among it, as NumPy's.

    Raises:
        ValueError: No array of real numbers, or one of `numpy.ma`.
    """
    if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array):  # of NNX
        x = x.__jax_array__()
    kind = type(x).__name__
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(f"a {kind} has a mask of its own: pass x.data, and mask=")
    if not (is_jax_array(x) or is_torch_array(x)):
        traced = any(isinstance(a, jax.Array) for a in jax.tree.leaves(x))  # a list of them
        x = jnp.asarray(x) if traced else np.asarray(x)
        if not traced and x.dtype.kind in "OSU":
            raise ValueError(f"a {kind} is not an array of numbers: pass hidden states or weights")
    if "complex" in str(x.dtype):
        raise ValueError(f"x of dtype {x.dtype} is not real")
    return x


def framework_of(x: Any) -> str:
    """The one of `FRAMEWORKS` that an array, a list or a tensor is measured by."""
    return "JAX" if is_jax_array(x) else "torch" if is_torch_array(x) else "NumPy"


def as_floats(x: Any) -> Any:
    """`as_array` in float64 where it is, else in float32."""
    x = as_array(x)
    xp, name = namespace(x), str(x.dtype)
    return x if name.endswith(("float32", "float64")) else xp.astype(x, xp.float32)


def as_bools(mask: Any, name: str = "mask") -> Any:
    """A mask as Bool, from booleans or the numbers 0 and 1, see `as_array`.

    Raises:
        ValueError: Other values: see `inputs.as_mask`. Of torch only floats are checked, on the
            host.
    """
    mask = as_array(mask)
    if is_jax_array(mask):
        return as_mask(mask, name)
    if not is_torch_array(mask):
        as_mask(mask, name)  # whose result is traced inside jit
        return mask.astype(bool)
    if "float" not in str(mask.dtype):
        return mask != 0
    return namespace(mask).asarray(as_bools(on_host(mask), name), device=mask.device)


def beside(x: Any, mask: Any) -> tuple[Any, Any]:
    """(x, mask) of one framework on one device: of x, or of JAX where either is JAX's."""
    if is_torch_array(x) and is_torch_array(mask):
        return x, mask.to(x.device)
    if is_torch_array(x):
        return x, namespace(x).asarray(np.array(mask), device=x.device)
    both = x, on_host(mask)
    return tuple(map(jnp.asarray, both)) if any(map(is_jax_array, both)) else both


def with_mask(x: Any, mask: Any, shape: tuple[int, ...], what: str) -> tuple[Any, Any]:
    """(x, a mask [..., n] as Bool of that shape, of whose axes it has the last), see `beside`.

    Raises:
        ValueError: A mask of other axes.
    """
    x, mask = beside(x, as_bools(mask))
    own = tuple(mask.shape)
    if not own or own != shape[-len(own) :]:
        raise ValueError(f"mask of shape {own} does not fit {what} of {shape}")
    return x, namespace(x).broadcast_to(mask, shape)


def known(x: Any) -> Any:
    """NumPy's array of the values where they are in the host's memory and known; else None."""
    if not is_torch_array(x):
        return x if is_numpy_array(x) else None
    if x.device.type != "cpu" or sys.modules["torch"].compiler.is_compiling():
        return None
    with contextlib.suppress(RuntimeError):  # inside a transformation of torch.func
        return on_host(x)


def on_host(x: Any) -> Any:
    """A torch tensor as NumPy's array; others as they are."""
    return x.detach().cpu().numpy() if is_torch_array(x) else x


def as_jax(x: Any) -> Array:
    """NumPy's array as JAX's; unlike `jnp.asarray` this compiles nothing."""
    return jax.device_put(x) if is_numpy_array(x) else x


def constant(x: Any) -> Any:
    """x without its derivative."""
    return x.detach() if is_torch_array(x) else jax.lax.stop_gradient(x) if is_jax_array(x) else x


def gathered(x: Any, axis_name: str | None, axis: int) -> Any:
    """All of an array whose axis is sharded over a mesh axis of `jax.shard_map`; None: as it is.

    Raises:
        ValueError: No such axis.
    """
    if axis_name is None or x is None:
        return x
    try:
        return jax.lax.all_gather(jnp.asarray(x), axis_name, axis=axis, tiled=True)
    except NameError:
        raise ValueError(f"axis_name={axis_name!r} is not an axis of a shard_map here") from None


def of_first_shard(tree: Any, axis_name: str | None) -> Any:
    """The first shard's copy of a value that is equal on all shards, marked as not varying."""
    if axis_name is None:
        return tree
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda a: jax.lax.psum(jnp.where(is_first, a, 0), axis_name), tree)
