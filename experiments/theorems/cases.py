"""Cases of a theorem, such as draws, times or inverse temperatures, which share one program."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, PyTree

from experiments.lab.executor import spread_function
from rank_collapse.runs import seeds


def compute_cases(
    compute: Callable[..., PyTree[Array]], *cases: Array | Sequence[float] | np.ndarray
) -> PyTree[np.ndarray]:
    """Computes a function of each case, one after the other, in one compiled program.

    Outside jit JAX would compile each operation of the function by itself.

    Args:
        compute: Function of one element of each of `cases`.
        *cases: Random keys or numbers [k, ...], of the same length.

    Returns:
        The values of the function, leaves [k, ...].
    """
    arrays = tuple(a if isinstance(a, jax.Array) else np.asarray(a) for a in cases)
    device = seeds.seed_mesh(jax.devices()[:1])
    return seeds.to_host(spread_function(compute, device, at_once=1, level=0)(arrays, None))
