"""Full precision of matrix products, whatever the caller's default is."""

import functools
from collections.abc import Callable

import jax


def full_precision(measure: Callable) -> Callable:
    """Decorator: float32 products are float32 products.

    Accelerators round the factors of a product to TF32 or bfloat16 by default, an error of 1e-3
    to 1e-2 that a sum over path lengths or a residual does not survive. It holds under an outer
    jit too; a network's own forward pass (`apply`) keeps the caller's default, as in training.
    """

    @functools.wraps(measure)
    def measured(*args, **options):
        with jax.default_matmul_precision("highest"):
            return measure(*args, **options)

    return measured
