"""Full precision of matrix products, whatever the caller's default is."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(measure: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its float32 matrix products have full float32 precision.

    By default accelerators round the factors of a product to TF32 or bfloat16, with an error of
    1e-3 to 1e-2 that destroys a sum over path lengths or a residual. Full precision also holds
    under an outer jit; the forward pass (`apply`) keeps the caller's default, as in training.
    """

    @functools.wraps(measure)
    def measure_precisely(*args: P.args, **options: P.kwargs) -> R:
        with jax.default_matmul_precision("highest"):
            return measure(*args, **options)

    return measure_precisely
