"""Operations of a program's products, the published rates of devices, and the seeds they hold."""

import math
from typing import Any, NamedTuple

import jax


class Device(NamedTuple):
    """Published figures of an accelerator.

    Attributes:
        products: Operations a second of float32 products at precision "highest".
        bandwidth: Bytes a second of its memory.
        memory: Its size in bytes.
    """

    products: float
    bandwidth: float
    memory: float


# H100 SXM: 67 TFLOP/s of float32 outside of tensor cores, which round to TF32; NVIDIA's data sheet.
# v5e: 197 TFLOP/s of bfloat16, of which "highest" takes six products; Google's TPU documentation.
DEVICES = {
    "h100": Device(67e12, 3.35e12, 80e9),
    "v5e": Device(197e12 / 6, 0.82e12, 16e9),
}


def product_flops(jaxpr: Any) -> float:
    """Operations of all matrix products of a jaxpr.

    Of a `cond` the costlier branch; bodies of loops of unknown length once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        params, kind = equation.params, equation.primitive.name
        if kind == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        values = jax.tree.leaves(params, is_leaf=lambda v: hasattr(v, "eqns"))
        values = [getattr(value, "jaxpr", value) for value in values]
        inner = [product_flops(value) for value in values if hasattr(value, "eqns")]
        if inner:
            add = max if kind == "cond" else sum
            total += add(inner) * (params["length"] if kind == "scan" else 1)
    return total


def seeds_that_fit(peaks: dict[int, float], memory_bytes: float) -> int:
    """How many seeds fit, by the line through the compiled programs of two numbers of seeds."""
    (few, low), *_, (many, high) = sorted(peaks.items())
    each = (high - low) / (many - few)
    return int((memory_bytes - (low - few * each)) / each)
