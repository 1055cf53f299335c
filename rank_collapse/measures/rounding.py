"""The residual ratio that rounding alone leaves between tokens that are equal."""

import numpy as np

from rank_collapse.annotations import DType
from rank_collapse.checks import refuse_if

# 2^−p of the p bits behind the point, by the name of a dtype or its beginning
_EPSILONS = {
    "float64": 2**-52,
    "float32": 2**-23,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float8_e5m2": 2**-2,
    "float8": 2**-3,
    "float4": 2**-1,
}
_ROUNDINGS = 8


def rounding_limit(dtype: DType) -> float:
    """Return the residual ratio of tokens that differ only by a layer's rounding.

    A layer that has made all tokens equal still rounds them one by one: bias, sum with the skip,
    and in a norm the mean, its subtraction, the variance, the division, scale and shift. These are
    r = 8 operations, each rounded by at most ε/2 of its size. res(·) at most doubles a norm, so the
    ratio is up to r ε. For dtypes of fewer than 32 bits r = 1: layers compute in float32 and round
    only what is stored.

    Args:
        dtype: Number format of floats, or its name.

    Raises:
        ValueError: It is not a floating-point dtype.
    """
    name = getattr(dtype, "name", getattr(dtype, "__name__", dtype))  # np.float32 has the latter
    name = str(name).rpartition(".")[2]
    epsilon = next((e for start, e in _EPSILONS.items() if name.startswith(start)), None)
    refuse_if(
        epsilon is None,
        f"dtype={name!r} is not one of the floating-point types {', '.join(_EPSILONS)}",
    )
    return (_ROUNDINGS if name in ("float32", "float64") else 1) * epsilon


def layer_limits(hidden: object, batch_axis: int | None) -> float | np.ndarray:
    """Return the `rounding_limit` of hidden states: one number, or one per layer [l].

    A list has one limit per layer, since its arrays may differ in dtype. If its entries are
    examples, the layers are an axis of each array, so that all layers share the largest limit.

    Args:
        hidden: Array of all states, or a list of arrays, or a `Trace` or a list of them.
        batch_axis: Axis of the examples once a list is stacked: 0 if each entry is an example; None
            or 1 if each entry is a layer.
    """

    def read_limit(states):
        array = getattr(states, "hidden", states)  # of a Trace
        name = str(getattr(array, "dtype", "")).rpartition(".")[2]
        return rounding_limit(name if "float" in name else "float32")

    if not isinstance(hidden, list | tuple):
        return read_limit(hidden)
    limits = np.array([read_limit(states) for states in hidden])
    return limits.max() if batch_axis == 0 and len(limits) else limits
