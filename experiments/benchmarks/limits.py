"""The physical limit: how long the products of a program take at the rate of a large product."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh
from jax.typing import DTypeLike

from experiments.benchmarks.timing import Report, Timing, describe_round, say
from rank_collapse.runs import seeds

# Width of the square matrices of each device, large enough that its rate no longer rises.
CPU_WIDTH, ACCELERATOR_WIDTH = 1024, 8192


def count_flops(program: ClosedJaxpr | Jaxpr) -> float:
    """Counts the operations of all matrix products and convolutions of a program.

    A product of [m, k] and [k, n] takes 2mkn operations. Other operations are not counted.

    Args:
        program: Jaxpr, closed or not, from `jax.make_jaxpr` or a traced jitted function.

    Raises:
        ValueError: A loop with an unknown number of turns has products.
    """
    return sum(times * count_product(equation) for equation, times in list_products(program))


def list_products(program: ClosedJaxpr | Jaxpr) -> list[tuple[JaxprEqn, int]]:
    """Lists (equation, how often it is computed) of the products and convolutions of a program.

    Args:
        program: See `count_flops`. A branch counts with the products of its longest side.

    Raises:
        ValueError: A loop with an unknown number of turns has products.
    """
    products = []
    for equation in getattr(program, "jaxpr", program).eqns:
        name, parameters = equation.primitive.name, equation.params
        if name in ("dot_general", "conv_general_dilated"):
            products.append((equation, 1))
            continue
        inner, times = [list_products(jaxpr) for jaxpr in _list_programs(parameters)], 1
        if name == "while" and any(inner):
            raise ValueError("the turns of a while loop with products cannot be counted")
        if name == "cond":
            inner = [max(inner, key=_count_products)]
        elif name == "scan":
            times = parameters["length"]
        elif name == "shard_map":
            times = parameters["mesh"].size
        products += [(product, times * n) for part in inner for product, n in part]
    return products


def count_product(equation: JaxprEqn) -> float:
    """Counts the operations of one product or convolution: two for each term of each result."""
    first, second, output = (v.aval.shape for v in (*equation.invars, *equation.outvars))
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = numbers  # axes of the first array over which the product sums
        return 2.0 * math.prod(output) * math.prod(first[axis] for axis in contracted)
    output_channels = second[numbers.rhs_spec[0]]
    return 2.0 * math.prod(output) * math.prod(second) / output_channels


def _count_products(products):
    """Counts the operations of the products of a branch."""
    return sum(times * count_product(equation) for equation, times in products)


def _list_programs(parameters: Mapping[str, object]) -> Iterator[ClosedJaxpr | Jaxpr]:
    leaves = jax.tree.leaves(list(parameters.values()), is_leaf=lambda v: hasattr(v, "eqns"))
    return (value for value in leaves if hasattr(value, "eqns"))


class LargeProduct:
    """A large product on every device at once, whose rate is the limit of the machine.

    Args:
        mesh: Mesh of the devices.
        width: Width of the square matrices; by default the width for the kind of device.
        dtype: Dtype of the matrices; `jax_default_matmul_precision` sets the precision of products.

    Attributes:
        flops: Operations of the products of all devices together.
    """

    def __init__(self, mesh: Mesh, width: int = 0, dtype: DTypeLike = jnp.float32):
        width = width or (CPU_WIDTH if seeds.is_on_cpu(mesh) else ACCELERATOR_WIDTH)
        draw = seeds.run_seeds(lambda k, _: jax.random.normal(k, (width, width), dtype), mesh)
        keys = seeds.shard_seeds(seeds.seed_keys(0, mesh.size), mesh)
        self._matrices, self.flops = draw(keys, None), 2.0 * width**3 * mesh.size
        self._multiply = seeds.run_seeds(lambda a, _: a @ a, mesh)
        self.time()

    def time(self) -> float:
        """Measures the seconds of one product on each device."""
        start = time.perf_counter()
        jax.block_until_ready(self._multiply(self._matrices, None))
        return time.perf_counter() - start

    def measure_rate(self) -> float:
        """Measures operations per second of all devices together."""
        return self.flops / self.time()


def compute_share(flops: float, seconds: Sequence[float], rates: Sequence[float]) -> float:
    """Computes the median share of the rate of a large product that a computation reaches.

    Args:
        flops: Operations of its products.
        seconds, rates: Seconds of the computation and rates of the large product, in each round.
    """
    return float(np.median(flops / np.array(seconds) / np.array(rates)))


def time_products(options: FlagValues, width: int = 0) -> Report:
    """Measures the rate of a large product in float32, fully exact, and in bfloat16.

    Args:
        options: The flags of `experiments.benchmark`.
        width: See `LargeProduct`.
    """
    mesh, timings, products = seeds.seed_mesh(), [], []
    for dtype in (jnp.float32, jnp.bfloat16):
        start = time.perf_counter()
        products.append(LargeProduct(mesh, width, dtype))
        timings.append(Timing(dtype.__name__, time.perf_counter() - start))
    for number in range(options.rounds):
        for timing, product in zip(timings, products, strict=True):
            timing.seconds.append(product.time())
        say(describe_round(timings, number, options.rounds))
    pairs = zip(timings, products, strict=True)
    return Report(
        timings, {f"TFLOP/s, {t.name}": (p.flops / t.best / 1e12, None) for t, p in pairs}
    )
