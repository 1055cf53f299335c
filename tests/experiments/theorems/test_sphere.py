"""Tokens on the sphere: the equiangular flow and the growth of modes."""

import numpy as np
import pytest

from experiments.theorems import sphere
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_equiangular_flow_has_the_field_report_s_numbers():
    """Numbers of an independent NumPy integration."""
    expected = [0.3626, 0.8163, 0.9705, 0.9959, 0.9994, 0.9999]
    flow = sphere.equiangular_flow(np.arange(1, 7), 8, 1.0)
    assert_close(flow, expected, atol=6e-5)
    small = sphere.pass_equiangular(8, 1.0, 0.1)  # layers of a = 0.1, by the same NumPy
    assert_close(small[[0, 1, 2, 3]], [0.3336, 0.7803, 0.9598, 0.9938], atol=6e-5)


def test_modes_grow_by_their_rates():
    rates = sphere.mode_growth(16.0)
    assert_close(rates[[2, 4, 5, 6]], [0.4210, 0.7021, 0.7143, 0.6470], atol=6e-5)
    np.testing.assert_allclose(sphere.pass_modes(16.0, n=64, depth=100)[:8], rates[:8], rtol=0.03)
