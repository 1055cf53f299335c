"""Copies numbers by NumPy, where JAX outside of `jit` compiles a program for every shape.

A slice, a reshape, a broadcast or a concatenation of arrays computes nothing: NumPy gives the same
bits in a thousandth of the time. What computes stays with JAX, and so does everything inside of
`jit` and everything that a device or a mesh was chosen for.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import core
from jax._src.lax import slicing

_NATIVE = "biuf"  # kinds of types that NumPy has itself, and bfloat16 has the kind V
_usual: dict[Any, Callable[..., Any]] = {}  # {primitive: what it does without this module}


def broadcast_in_dim(a, *, shape, broadcast_dimensions):
    ones = np.ones(len(shape), int)
    ones[list(broadcast_dimensions)] = a.shape
    return np.broadcast_to(a.reshape(ones), shape)


def reshape(a, *, new_sizes, dimensions):
    return None if dimensions is not None else a.reshape(new_sizes)


def slice_(a, *, start_indices, limit_indices, strides):
    steps = strides or (1,) * a.ndim
    return a[tuple(map(slice, start_indices, limit_indices, steps))]


def dynamic_slice(a, *starts, slice_sizes):
    """Moves a slice that reaches over an end to this end, as JAX does."""
    lasts = np.subtract(a.shape, slice_sizes)
    firsts = [min(max(int(s), 0), last) for s, last in zip(starts, lasts, strict=True)]
    return a[tuple(slice(s, s + size) for s, size in zip(firsts, slice_sizes, strict=True))]


def iota(*, dtype, shape, dimension):
    row = np.arange(shape[dimension]).astype(dtype)
    return np.broadcast_to(row.reshape(-1, *(1,) * (len(shape) - dimension - 1)), shape)


def convert_element_type(a, *, new_dtype, weak_type):
    """Converts integers alone: what a fraction, an infinity or a denormal becomes, JAX decides."""
    is_whole = a.dtype.kind in "biu" and np.dtype(new_dtype).kind in _NATIVE
    fits = (is_whole or core.typeof(a).dtype == new_dtype) and not weak_type
    return a.astype(new_dtype) if fits else None


COPIES = {
    core.stage_p: lambda a: a,
    lax.iota_p: iota,
    lax.broadcast_in_dim_p: broadcast_in_dim,
    lax.reshape_p: reshape,
    lax.squeeze_p: lambda a, *, dimensions: a.squeeze(dimensions),
    lax.transpose_p: lambda a, *, permutation: a.transpose(permutation),
    lax.rev_p: lambda a, *, dimensions: np.flip(a, dimensions),
    lax.concatenate_p: lambda *arrays, dimension: np.concatenate(arrays, dimension),
    lax.convert_element_type_p: convert_element_type,
    slicing.slice_p: slice_,
    slicing.dynamic_slice_p: dynamic_slice,
}


def copy_by_numpy(on: bool) -> None:
    """Lets NumPy do what `COPIES` lists, or JAX as it usually does."""
    for primitive, copy in COPIES.items():
        usual = _usual.setdefault(primitive, primitive.impl)
        primitive.def_impl(_prefer(primitive, copy, usual) if on else usual)


def _prefer(primitive, copy, usual):
    """Makes an implementation of a primitive: `copy`, and `usual` for what it does not cover."""

    def implement(*operands, **params):
        if not (_has_no_place(params) and all(map(_is_copied, operands))):
            return usual(*operands, **params)
        # what JAX refuses is refused, as it says it
        expected, _ = primitive.abstract_eval(*map(core.typeof, operands), **params)
        options = {name: value for name, value in params.items() if name != "sharding"}
        copied = copy(*map(np.asarray, operands), **options)
        if copied is None:
            return usual(*operands, **params)
        result = jax.device_put(np.array(copied, order="C"))
        # float64 stays float64 where JAX's arrays are of float32
        return result if result.dtype == expected.dtype else usual(*operands, **params)

    return implement


def _has_no_place(params):
    """Returns whether neither a device nor a mesh was chosen for what is computed."""
    chosen = params.get("sharding"), jax.config.jax_default_device
    return chosen == (None, None) and jax.sharding.get_abstract_mesh().empty


def _is_copied(a):
    """Returns whether a is an array of numbers that no device was chosen for.

    Numbers of Python are not: they leave the choice of a type to what they are combined with.
    """
    if isinstance(a, jax.Array) and (a.committed or a.is_deleted()):
        return False
    aval = core.typeof(a)
    return not aval.weak_type and getattr(aval.dtype, "kind", "") in (*_NATIVE, "V")
