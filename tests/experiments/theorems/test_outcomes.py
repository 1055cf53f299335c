"""An outcome follows from its curves, which are saved as they are."""

import numpy as np
import pytest

from experiments.theorems.outcomes import (
    BEYOND,
    FAILS,
    HOLDS,
    LOOSE,
    OPEN,
    Curve,
    judge,
    load_curves,
    save_curves,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_an_outcome_follows_from_the_curves():
    equation = Curve("a", [1, 2], [3, 4], [3.001, 4])
    loose = Curve("b", [1], [10], [2], "≤", 0)
    beyond = Curve("c", [1], [1], [1], beyond=True)
    wrong = Curve("d", [1, 7], [1, 2], [1, 3])
    assert judge([equation])[:2] == (HOLDS, 1.0)
    assert judge([loose])[:2] == (LOOSE, 5.0)
    assert judge([loose._replace(ordering=True)])[:2] == (HOLDS, 1.0)
    assert judge([equation, beyond])[0] == BEYOND
    assert judge([equation, beyond._replace(measured=[2])])[0] == HOLDS
    assert judge([equation, wrong]) == (FAILS, 1.0, "d, 7: 3, claimed = 2")
    assert judge([equation, wrong._replace(instead=True)])[0] == HOLDS
    assert judge([wrong._replace(relation="none")])[0] == OPEN


def test_curves_are_saved_as_they_are():
    curves = [
        Curve("a/b", [1, 2], np.nan, [3.0, 4.0], "≥", 0.5, beyond=True, ordering=True, panel=2),
        Curve("c", [1], [2], [3], instead=True),
    ]
    for curve, again in zip(curves, load_curves(save_curves(curves)), strict=True):
        assert (again.name, *again[4:]) == (curve.name, *curve[4:])
        np.testing.assert_array_equal(again.as_array(), curve.as_array())
