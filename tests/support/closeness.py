"""Tolerances of float32 values come from the dtype, not from the CPU that the suite was written on.

`np.testing.assert_allclose` compares to 1e-7 by default, less than one rounding of float32.
"""

from typing import Any

import numpy as np

ROUNDINGS = 8  # of float32 that two ways of computing a value may be apart; 9.5e-7
FLOAT32 = ROUNDINGS * float(np.finfo(np.float32).eps)
_allclose = np.testing.assert_allclose


def assert_allclose(
    actual: Any, desired: Any, rtol: float | None = None, atol: float = 0, **options: Any
) -> None:
    """NumPy's, where neither array is float32; there rtol is `FLOAT32` at least.

    Values that have to be equal to the bit are compared with rtol=0 and atol=0.
    """
    dtypes = (np.asarray(a).dtype for a in (actual, desired))
    least = FLOAT32 if np.dtype(np.float32) in dtypes else 0
    if rtol is None:
        rtol = max(1e-7, least)
    elif rtol or atol:
        rtol = max(rtol, least)
    _allclose(actual, desired, rtol=rtol, atol=atol, **options)
