"""Exponents of laws, and places between two laws."""

import numpy as np

from experiments.stability import stability_results
from experiments.stability.padded_designs import Case
from tests.support.closeness import assert_close


def test_places_between_the_laws():
    laws = {"O(N)": 1.0, "O(log N)": 0.3, "O(1)": 0.1}
    places = [
        stability_results.place_between(e, laws) for e in (-0.1, 0.1, 0.2, 0.3, 0.65, 1.0, 1.35)
    ]
    assert_close(places, [-1, 0, 0.5, 1, 1.5, 2, 2.5])


def test_exponents_of_the_laws():
    n = np.array([12, 24, 48, 96])
    assert_close(stability_results.fit_exponents(n, np.stack([3.0 * n, n**0.5])), [1, 0.5])
    # far below the precision of numbers near 1, too
    assert_close(stability_results.fit_exponents(n, 1e-30 * n[None]), [1])
    laws = stability_results.law_exponents(n)
    assert abs(laws["O(N)"] - 1) < 1e-9 and 0.2 < laws["O(log N)"] < 0.4 and laws["O(1)"] < 0.05


def test_a_change_of_zero_has_an_exponent_and_designs_are_shallow_first():
    n = np.array([12, 24])
    assert np.isfinite(stability_results.fit_exponents(n, np.array([[0.0, 0.5], [0.0, 0.0]]))).all()
    cases = [Case(name, depth, 2 * depth) for depth in (4, 2) for name in ("pre", "post")]
    designs = stability_results.by_design({case: {"depth": case.depth} for case in cases})
    assert {name: [*map(int, (c.depth for c in group))] for name, group in designs.items()} == {
        "pre": [2, 4],
        "post": [2, 4],
    }


def test_rows_are_by_layer_and_numbers_of_a_network_in_its_last():
    """Numbers of branches of two a layer have no column; those of layers begin with the first."""
    measures = {
        "apart": np.arange(6.0).reshape(2, 3),
        "growth": 10.0 + np.arange(4).reshape(2, 2),
        "shares": np.arange(8.0).reshape(2, 4),
        "change.sgd": np.array([0.5, 0.25]),
    }
    table = list(stability_results.make_rows({Case("pre", 2, 4): measures}))
    columns = [(r["seed"], r["layer"], r["apart"], r["growth"], r["change.sgd"]) for r in table]
    assert columns == [
        (0, 0, "0", "", ""),
        (0, 1, "1", "10", ""),
        (0, 2, "2", "11", "0.5"),
        (1, 0, "3", "", ""),
        (1, 1, "4", "12", ""),
        (1, 2, "5", "13", "0.25"),
    ]
    assert {(r["design"], r["depth"]) for r in table} == {("pre", 2)} and "shares" not in table[0]
