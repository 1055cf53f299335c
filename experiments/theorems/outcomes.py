"""The parts of a theorem: its text, its curves of measured and predicted values, and its outcome.

A curve is an equation or a bound, evaluated at several points. `judge` computes the outcome from
the curves alone; it is never written by hand.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import numpy as np

Relation = Literal["=", "≤", "≥", "none"]
RELATIONS = get_args(Relation)
HOLDS = "holds as stated"
LOOSE = "holds, bound loose by a factor"
BEYOND = "holds under more than is stated"
FAILS = "fails as worded"
OPEN = "measured, no claim to judge"
DRAW = "draw"  # label of an axis whose points are draws of one quantity
LOOSE_FACTOR = 1.5  # a bound that lies less far above what it bounds is not called loose


class Panel(NamedTuple):
    """One quantity of a theorem, which has its own panel in the figure.

    Attributes:
        x: Label of the horizontal axis, with its unit.
        y: Label of the quantity, with its unit.
        log: Which axes are logarithmic: "", "x", "y" or "xy".
        names: Labels at x = 0, 1, … where x is not a number.
    """

    x: str
    y: str
    log: str = ""
    names: tuple[str, ...] = ()


class Curve(NamedTuple):
    """One relation of a theorem at several points.

    Attributes:
        name: Name of the setting, unique within its theorem.
        x: [k], where.
        predicted: [k], by the theorem; NaN where it makes no prediction.
        measured: [k], through the toolkit.
        relation: measured = predicted, ≤ or ≥; "none" for a curve that is only shown.
        tolerance: Relative error of an equation, or the relative amount by which a bound may be
            exceeded (rounding).
        beyond: Whether the point is outside the theorem's conditions.
        instead: Whether this relation holds in place of a statement that fails.
        ordering: Whether two measured values are compared, whose ratio is not the looseness of a
            bound.
        panel: Index of its panel in the theorem's figure, from 0.
    """

    name: str
    x: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray
    relation: Relation = "="
    tolerance: float = 0.01
    beyond: bool = False
    instead: bool = False
    ordering: bool = False
    panel: int = 0

    def as_array(self) -> np.ndarray:
        """Stacks positions, predictions and measurements to [k, 3]."""
        columns = np.broadcast_arrays(*(np.atleast_1d(a) for a in self[1:4]))
        return np.stack(columns, axis=-1).astype(float)

    def holds(self) -> np.ndarray:
        """Tests the relation at every point, Bool [k]; True where nothing is predicted."""
        _, predicted, measured = self.as_array().T
        slack = self.tolerance * np.abs(predicted)
        is_met = {
            "=": np.abs(measured - predicted) <= slack,
            "≤": measured <= predicted + slack,
            "≥": measured >= predicted - slack,
            "none": np.ones(len(measured), bool),
        }[self.relation]
        return is_met | np.isnan(predicted)

    def looseness(self) -> float:
        """Computes the factor by which a bound is loose, in the median; 1 for an equation."""
        _, predicted, measured = self.as_array().T
        is_bound = self.relation in ("≤", "≥") and np.all(predicted > 0) and np.all(measured > 0)
        if not is_bound:
            return 1.0
        ratio = predicted / measured if self.relation == "≤" else measured / predicted
        return float(np.median(ratio))


class Theorem(NamedTuple):
    """A statement of a paper and how it is measured.

    Attributes:
        name: Name of the flag, the figure and the arrays.
        source: Authors, year and address.
        read: How much of the paper was read: "text", "abstract" or "memory".
        statement: One line.
        formula: Predicted relation.
        conditions: Conditions of the claim.
        measured: Functions of the toolkit that measure it.
        helps: Use for a practitioner.
        panels: Panels of its figure, one for each quantity.
        curves: Seed → its curves.
        terms: Explanation of the terms of the statement, for the caption.
    """

    name: str
    source: str
    read: str
    statement: str
    formula: str
    conditions: str
    measured: str
    helps: str
    panels: tuple[Panel, ...]
    curves: Callable[[int], list[Curve]]
    terms: str


class Outcome(NamedTuple):
    """How a theorem came out.

    Attributes:
        verdict: `HOLDS`, `LOOSE`, `BEYOND`, `FAILS` or `OPEN`.
        factor: Factor by which the tightest of the loose bounds is off in the median; 1 for other
            theorems.
        failed: "curve at x", the first point against it; "" for none.
    """

    verdict: str
    factor: float
    failed: str


def judge(curves: list[Curve]) -> Outcome:
    """Judges a theorem by its curves.

    Args:
        curves: All curves of the theorem; curves of `instead` are only shown.
    """
    stated = [c for c in curves if not (c.beyond or c.instead) and c.relation != "none"]
    beyond = [c for c in curves if c.beyond and c.relation != "none"]
    for curve in stated:
        if not curve.holds().all():
            x, predicted, measured = curve.as_array()[np.argmin(curve.holds())]
            failed = (
                f"{curve.name}, {x:.4g}: {measured:.4g}, claimed {curve.relation} {predicted:.4g}"
            )
            return Outcome(FAILS, 1.0, failed)
    if not stated:
        return Outcome(OPEN, 1.0, "")
    bounds = [c for c in stated if c.relation in ("≤", "≥") and not c.ordering]
    factor = min((c.looseness() for c in bounds), default=1.0)
    if len(bounds) == len(stated) and factor > LOOSE_FACTOR:
        return Outcome(LOOSE, factor, "")
    if beyond and all(c.holds().all() for c in beyond):
        return Outcome(BEYOND, 1.0, "")
    return Outcome(HOLDS, 1.0, "")


def save_curves(curves: list[Curve]) -> dict[str, np.ndarray]:
    """Makes the arrays of curves for a run folder: "NAME/values" [k, 3] and "NAME/judged" [6]."""
    arrays = {}
    for curve in curves:
        relation = RELATIONS.index(curve.relation)
        arrays[f"{curve.name}/values"] = curve.as_array()
        arrays[f"{curve.name}/judged"] = np.array(
            [
                relation,
                curve.tolerance,
                curve.beyond,
                curve.instead,
                curve.ordering,
                curve.panel,
            ],
            float,
        )
    return arrays


def load_curves(arrays: Mapping[str, np.ndarray]) -> list[Curve]:
    """Makes the curves of the arrays of `save_curves`."""
    curves = []
    for key, values in arrays.items():
        name, _, part = key.rpartition("/")
        if part != "values":
            continue
        x, predicted, measured = values.T  # [k] each
        judged = arrays[f"{name}/judged"].tolist()
        relation, tolerance, beyond, instead, ordering, panel = judged
        curves.append(
            Curve(
                name,
                x,
                predicted,
                measured,
                RELATIONS[int(relation)],
                tolerance,
                bool(beyond),
                bool(instead),
                bool(ordering),
                int(panel),
            )
        )
    return curves
