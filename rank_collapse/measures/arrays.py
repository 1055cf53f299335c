"""Arrays on their own device: NumPy, JAX or torch, through one namespace of functions.

Measures are written once over `namespace(x)`, the functions of the array API standard for the
framework of x. Code for JAX alone is in `on_jax`, which is imported when a JAX array is measured.
Concrete JAX arrays on a CPU are computed by NumPy, because JAX would compile every operation again
for each number of tokens.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import array_api_compat
import numpy as np
from array_api_compat import array_namespace as namespace, is_numpy_array, is_torch_array

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import refuse, refuse_if

P = ParamSpec("P")
R = TypeVar("R")


def where_it_lives(measure: Callable[P, R]) -> Callable[P, R]:
    """Decorate a measure so that its result has its argument's framework and device.

    Products keep their precision, in torch under `autocast` and in JAX on accelerators. Inside
    `torch.compile` a measure runs between the graphs.
    """

    @functools.wraps(measure)
    def measure_in_place(*args: P.args, **options: P.kwargs) -> R:
        """Call the measure on the arrays' own device and framework, in full precision."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return torch.compiler.disable(measure_in_place)(*args, **options)
        for value in iterate_leaves((args, options)):
            refuse_unreadable(value)
        device = next(
            (a.device.type for a in iterate_leaves((args, options)) if is_torch_array(a)), None
        )
        if device is not None:
            with torch.autocast(device, enabled=False):
                return measure(*args, **options)
        with np.errstate(all="ignore"):
            if sys.modules.get("jax") is None:
                return measure(*args, **options)
            from rank_collapse.measures import on_jax

            return on_jax.run_on_host(measure, args, options)

    return measure_in_place


def is_jax_array(x: AnyArray) -> bool:
    """Return whether x is an array of JAX, traced or not; False if JAX is not imported."""
    return sys.modules.get("jax") is not None and array_api_compat.is_jax_array(x)


def iterate_leaves(values: AnyArray) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dictionaries."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from iterate_leaves(value)
    else:
        yield values


def refuse_unreadable(x: AnyArray) -> None:
    """Refuse an array whose numbers a measure cannot read.

    Args:
        x: Any object; an object that is not an array passes.

    Raises:
        ValueError: In torch, an array without values (meta, fake), or a nested, sparse or quantised
            one; in JAX, a deleted array or random keys; in NumPy, more digits than float64.
    """
    if is_torch_array(x):
        refuse_if(
            x.is_nested,
            "a nested tensor has rows of different lengths: pad it by "
            "torch.nested.to_padded_tensor, and pass mask=",
        )  # before its shape is read, which it may not have
        layout = str(x.layout).rpartition(".")[2]
        refuse(
            (
                x.is_meta or type(x).__name__ == "FakeTensor",
                f"a tensor of shape {tuple(x.shape)} on {x.device}, of {type(x).__name__}, has no "
                "values: measure one that has, not of the meta device or of FakeTensorMode",
            ),
            (x.is_quantized, f"a quantised tensor ({x.dtype}) cannot be measured: x.dequantize()"),
            (layout != "strided", f"a tensor of layout {layout} cannot be measured: x.to_dense()"),
        )
    elif is_jax_array(x):
        import jax

        refuse(
            (
                not is_traced(x) and x.is_deleted(),
                f"an array of shape {x.shape} was deleted or donated: measure it before, or a copy",
            ),
            (
                jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended),
                f"an array of dtype {x.dtype} holds random keys, not numbers",
            ),
        )
    elif isinstance(x, np.ndarray | np.generic):
        is_long = x.dtype.kind == "f" and x.dtype.itemsize > 8
        refuse_if(
            is_long, f"x of dtype {x.dtype} has more digits than float64: pass x.astype(np.float64)"
        )


def as_array(x: AnyArray) -> AnyArray:
    """Convert x to an array of NumPy, JAX or torch; such arrays are returned unchanged.

    Args:
        x: An array, or anything that NumPy takes, such as a list of arrays.

    Raises:
        ValueError: The values are not real numbers, or the array is a `numpy.ma` array.
    """
    if hasattr(x, "__jax_array__") and not is_jax_array(x):  # of NNX
        x = x.__jax_array__()
    kind = type(x).__name__
    refuse_if(
        isinstance(x, np.ma.MaskedArray),
        f"a {kind} has its own mask: pass x.data, and the mask as mask=",
    )
    if not (is_jax_array(x) or is_torch_array(x)):
        is_array = _find_framework_test(x)
        if is_array is not None:  # a list of arrays of one framework
            return _stack_arrays(x, is_array)
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ValueError(
                f"a {kind} has rows of different lengths: pad them, and pass mask="
            ) from error
        refuse_if(
            x.dtype.kind in "OSUMm",
            f"a {kind} is not an array of numbers: pass hidden states or weights",
        )
    refuse_unreadable(x)
    refuse_if("complex" in str(x.dtype), f"x of dtype {x.dtype} is not real")
    return x


def _find_framework_test(x):
    """Find the test for arrays of the framework that a list holds; None for NumPy numbers."""
    leaves = list(iterate_leaves(x)) if isinstance(x, list | tuple) else []
    tests = (is_jax_array, is_torch_array)
    return next((test for test in tests if any(map(test, leaves))), None)


def _stack_arrays(x, is_array):
    """Stack nested lists of arrays of one framework, which may also hold numbers and NumPy
    arrays."""
    if not any(map(is_array, iterate_leaves(x))) or is_array(x):
        return as_array(x)
    elements = [_stack_arrays(element, is_array) for element in x]
    first = next(element for element in elements if is_array(element))
    elements = [match_framework(first, element)[1] for element in elements]
    shapes = {tuple(element.shape) for element in elements}
    refuse_if(
        len(shapes) > 1,
        f"a {type(x).__name__} has arrays of different shapes {shapes}: pad them, and pass mask=",
    )
    return namespace(first).stack(elements)


def as_floats(x: AnyArray) -> AnyArray:
    """Convert x as `as_array` does; float64 stays, other numbers become float32."""
    x = as_array(x)
    xp, name = namespace(x), str(x.dtype)
    return x if name.endswith(("float32", "float64")) else xp.astype(x, xp.float32)


def is_traced(x: AnyArray) -> bool:
    """Return whether x is a traced JAX array, whose values are not known yet."""
    if not is_jax_array(x):
        return False
    import jax

    return isinstance(x, jax.core.Tracer)


def as_bools(mask: AnyArray, name: str = "mask") -> AnyArray:
    """Convert a mask to Bool in its own framework.

    Args:
        mask: Booleans or the numbers 0 and 1, lists of them too.
        name: Name of the argument in the message.

    Raises:
        ValueError: Values other than 0 and 1, because an additive mask of floats would be read the
            wrong way round. Traced floats, and floats that are all 0, are therefore refused too.
            For torch only floats are checked, on the host.
    """
    if isinstance(mask, str):
        raise ValueError(f"{name}={mask!r} is not an array: use config.replace(mask={mask!r})")
    mask = as_array(mask)
    if is_torch_array(mask):
        if "float" not in str(mask.dtype):
            return mask != 0
        return namespace(mask).asarray(as_bools(on_host(mask), name), device=mask.device)
    xp, dtype = namespace(mask), str(mask.dtype)
    if mask.dtype == bool:
        return mask
    has_values = not is_traced(mask)
    is_binary = has_values and bool(xp.all((mask == 0) | (mask == 1)))
    is_integer = "int" in dtype and "float" not in dtype
    refuse(
        (
            not is_integer and not (is_binary and mask.any()),
            f"{name} has dtype {mask.dtype}, but a mask is boolean or has 1 where a query may "
            "attend and 0 elsewhere; pass an additive mask as bias=",
        ),
        (
            has_values and not is_binary,
            f"{name} of dtype {mask.dtype} has values other than 0 and 1",
        ),
    )
    return mask.astype(bool)


def match_framework(x: AnyArray, mask: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Convert two arrays to one framework on one device.

    Args:
        x: Array that decides the framework, unless the mask is a JAX array.
        mask: The second array.

    Returns:
        (x, mask).
    """
    if is_torch_array(x) and is_torch_array(mask):
        return x, mask.to(x.device)
    if is_torch_array(x):
        return x, namespace(x).asarray(np.array(mask), device=x.device)
    mask = on_host(mask)
    if not is_jax_array(x) and not is_jax_array(mask):
        return x, mask
    import jax.numpy as jnp

    return jnp.asarray(x), jnp.asarray(mask)


def broadcast_mask(
    x: AnyArray, mask: AnyArray, shape: tuple[int, ...], subject: str
) -> tuple[AnyArray, AnyArray]:
    """Broadcast a mask to all tokens of x.

    Args:
        x: An array of any framework.
        mask: Booleans whose axes are the last of `shape`.
        shape: [..., n].
        subject: Name of x in the message.

    Returns:
        (x, mask as Bool of that shape) in one framework, see `match_framework`.

    Raises:
        ValueError: A mask of other axes.
    """
    x, mask = match_framework(x, as_bools(mask))
    axes = tuple(mask.shape)
    refuse_if(
        not axes or axes != shape[-len(axes) :],
        f"mask of shape {axes} does not fit {subject} of {shape}",
    )
    return x, namespace(x).broadcast_to(mask, shape)


def host_values_or_none(x: AnyArray) -> AnyArray:
    """Return the values as NumPy's array if they are in the host's memory; else None."""
    if not is_torch_array(x):
        return x if is_numpy_array(x) else None
    if x.device.type != "cpu" or sys.modules["torch"].compiler.is_compiling():
        return None
    with contextlib.suppress(RuntimeError):  # inside a transformation of torch.func
        return on_host(x)


def on_host(x: AnyArray) -> AnyArray:
    """Convert a torch tensor to a NumPy array (float32 for dtypes that NumPy does not have); others
    are returned unchanged."""
    if not is_torch_array(x):
        return x
    x = x.detach().cpu()
    is_narrow = str(x.dtype).rpartition(".")[2].startswith(("bfloat", "float8"))
    return (x.float() if is_narrow else x).numpy()


def stop_gradient(x: AnyArray) -> AnyArray:
    """Return x without its derivative."""
    if is_torch_array(x):
        return x.detach()
    if not is_jax_array(x):
        return x
    import jax

    return jax.lax.stop_gradient(x)
