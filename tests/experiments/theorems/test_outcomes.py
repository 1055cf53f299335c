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
    once = beyond._replace(x=[1, 2], predicted=[1, 1], measured=[1, 2])
    assert judge([equation, once])[0] == HOLDS
    digits = Curve("e", [1.2344], [9.87654], [2.3456])
    assert judge([digits]).failed == "e, 1.234: 2.346, claimed = 9.877"
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


@pytest.mark.parametrize(
    ("relation", "measured", "expected"),
    [
        ("=", [9.0, 10.0, 11.0, 11.1, 5.0], [True, True, True, False, True]),
        ("≤", [2.0, 10.0, 11.0, 11.1, 5.0], [True, True, True, False, True]),
        ("≥", [9.0, 10.0, 99.0, 8.9, 5.0], [True, True, True, False, True]),
        ("none", [1.0, 10.0, 99.0, -1.0, 5.0], [True] * 5),
    ],
)
def test_a_relation_is_met_within_a_share_of_the_prediction(relation, measured, expected):
    """Ends belong to it; where nothing is predicted nothing fails."""
    predicted = [10.0, 10.0, 10.0, 10.0, np.nan]
    curve = Curve("a", range(5), predicted, measured, relation, 0.1)
    assert curve.holds().tolist() == expected
    mirrored = {"≤": "≥", "≥": "≤"}.get(relation, relation)
    negative = Curve("a", range(4), [-10.0] * 4, [-m for m in measured[:4]], mirrored, 0.1)
    assert negative.holds().tolist() == expected[:4]
    exact = curve._replace(x=[0], predicted=[10.0], measured=[10.0], tolerance=0)
    assert exact.holds().all()


def test_a_bound_is_loose_by_the_median_of_its_factors():
    above = Curve("a", [1, 2, 3], [10.0, 30.0, 8.0], [5.0, 10.0, 1.0], "≤")
    below = Curve("b", [1, 2, 3], [5.0, 10.0, 1.0], [10.0, 30.0, 8.0], "≥")
    assert above.looseness() == below.looseness() == 3.0
    assert above._replace(relation="=").looseness() == 1.0
    assert above._replace(predicted=[0.0, 30.0, 8.0]).looseness() == 1.0
    assert above._replace(measured=[-5.0, 10.0, 1.0]).looseness() == 1.0


def test_the_tightest_of_loose_bounds_counts_and_all_of_them_must_be_loose():
    loose = Curve("a", [1], [10.0], [2.0], "≤")
    tighter, tight = loose._replace(measured=[4.0]), loose._replace(measured=[9.0])
    assert judge([loose, tighter]) == (LOOSE, 2.5, "")
    assert judge([loose, tight]) == (HOLDS, 1.0, "")
    equation = Curve("b", [1], [1.0], [1.0])
    assert judge([loose, equation]) == (HOLDS, 1.0, "")
    shown = loose._replace(relation="none", measured=[99.0])
    assert judge([loose, tighter, shown]) == (LOOSE, 2.5, "")
    both = [Curve(name, [1], [1.0], [m], beyond=True) for name, m in (("c", 1.0), ("d", 3.0))]
    assert judge([equation, *both]) == (HOLDS, 1.0, "")
    assert judge([equation, both[0], both[1]._replace(relation="none")]) == (BEYOND, 1.0, "")
    first = Curve("e", [1, 2, 3], [1.0, 1.0, 1.0], [1.0, 7.0, 9.0])
    assert judge([equation, first]).failed == "e, 2: 7, claimed = 1"
    wrong = both[1]._replace(beyond=False, instead=True)
    assert judge([equation, wrong]) == (HOLDS, 1.0, "") and judge([wrong]).verdict == OPEN
