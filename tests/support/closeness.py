"""Comparisons whose tolerance comes from the dtype, not from the CPU that the suite was written on.

`np.testing.assert_allclose` compares to 1e-7 by default, less than one rounding of float32.
"""

from typing import Any

import jax
import numpy as np

ROUNDINGS = 8  # of float32 that two ways of computing a value may be apart; 9.5e-7
FLOAT32 = ROUNDINGS * float(np.finfo(np.float32).eps)


def assert_close(
    actual: Any, desired: Any, rtol: float | None = None, atol: float = 0, **options: Any
) -> None:
    """Compares as `np.testing.assert_allclose` does; float32 values may be 8 roundings apart.

    Where neither array is float32, the tolerances are NumPy's. Where one is, rtol is `FLOAT32` at
    least. Values that have to be equal to the bit are compared with rtol=0 and atol=0.
    """
    dtypes = (np.asarray(a).dtype for a in (actual, desired))
    least = FLOAT32 if np.dtype(np.float32) in dtypes else 0
    if rtol is None:
        rtol = max(1e-7, least)
    elif rtol or atol:
        rtol = max(rtol, least)
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)


def near(actual: Any, expected: Any, **tolerances: Any) -> None:
    """Asserts that all arrays of two trees are close; of a dictionary, the expected entries."""
    if isinstance(expected, dict):
        actual, expected = {name: actual[name] for name in expected}, {**expected}
    jax.tree.map(lambda a, b: assert_close(a, b, **tolerances), actual, expected)
