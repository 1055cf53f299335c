"""Which of depth, width, heads, residual scale and temperature decides: a two-level factorial.

Every combination of a low and a high level of each factor is a network. An effect is the mean
change of a measure from low to high, of a product of factors half the change of one factor's effect
with the other's level; the design is orthogonal, so that each seed gives all of them by least
squares and intervals are over seeds. With levels of ±1 effects are twice the coefficients. So the
change by a factor with another one at its low or high level is its effect less or plus that of the
product, and the change by both together is the sum of their own effects: the product cancels.

    factors_of(["depth:12:48", "residual:0.25:1"])
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import initial
from experiments.cures.cases import MEASURES, Case, ends
from experiments.shell.options import Flags
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure

FACTORS = {
    "depth": int,
    "width": int,
    "heads": int,
    "residual": float,  # gain of all branches
    "temperature": float,
}
SHOWN = ("log10_residual", "log10_gradient")
Factors = Mapping[str, tuple[Any, Any]]


def factors_of(texts: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """{factor: (low, high)} of "factor:low:high".

    Raises:
        ValueError: Another form, an unknown factor, or levels that are no two numbers in order.
    """
    found = {}
    for text in texts:
        name, *levels = text.split(":")
        if name not in FACTORS:
            raise ValueError(f"--factors={text}: {name!r} is not one of {', '.join(FACTORS)}")
        try:
            low, high = (FACTORS[name](level) for level in levels)
        except ValueError:
            low = high = 0
        if not 0 < low < high or name in found:
            raise ValueError(f"--factors={text} is not {name}:low:high, once, with 0 < low < high")
        found[name] = low, high
    return found


def cells_of(options: Flags, factors: Factors) -> dict[str, Case]:
    """{levels: case} of all combinations, the last factor's level changing first."""
    plain = {"depth": min(options.depths), "width": options.d_model, "heads": options.num_heads}
    plain |= {"residual": 1.0, "temperature": 1.0}
    found = {}
    for levels in itertools.product(*factors.values()) if factors else ():
        chosen = dict(zip(factors, levels, strict=True))
        of = plain | chosen
        config = initial.network_of(
            options,
            of["depth"],
            num_heads=of["heads"],
            d_model=of["width"],
            norm_placement=options.norm_placement,
            branch_gain=of["residual"],
            temperature=of["temperature"],
        )
        name = ", ".join(f"{n}={level:g}" for n, level in chosen.items())
        found[name] = Case("cell", name, of["depth"], config)
    return found


def levels_of(factors: Factors) -> dict[str, np.ndarray]:
    """{factor: its level in each cell, −1 or 1}, in the order of `cells_of`."""
    levels = np.array(list(itertools.product((-1.0, 1.0), repeat=len(factors))))
    return dict(zip(factors, levels.T, strict=True))


def effects_of(
    cells: Mapping[str, Mapping[str, np.ndarray]], factors: Factors, measure: str
) -> dict[str, np.ndarray]:
    """{term: effect [s]} of factors and products of two; NaN where a network has no number.

    Args:
        cells: {name: {measure: [s]}}, in the order of `cells_of`.
        factors: Of the cells.
        measure: One of `SHOWN`.
    """
    levels, values = levels_of(factors), np.stack([found[measure] for found in cells.values()])
    terms = [(name,) for name in factors] + list(itertools.combinations(factors, 2))
    signs = {" × ".join(t): np.prod([levels[name] for name in t], axis=0) for t in terms}
    return {term: 2 * sign @ values / len(values) for term, sign in signs.items()}


def simple_effects(
    cells: Mapping[str, Mapping[str, np.ndarray]], factors: Factors, measure: str
) -> dict[str, np.ndarray]:
    """{change: [s]} of the two factors with the largest product: of each with the other at its low
    and at its high level, and of both together; of one factor, of none.

    Means over all cells with these levels; empty where a network has no number.

    Args:
        cells, factors, measure: As of `effects_of`.
    """
    effects, levels = effects_of(cells, factors, measure), levels_of(factors)
    products = {n: abs(v.mean()) for n, v in effects.items() if " × " in n}
    if not np.isfinite([*products.values()]).all() or not products:
        return {}
    a, b = max(products, key=products.get).split(" × ")
    values = np.stack([found[measure] for found in cells.values()])
    none, second, first, both = (
        values[(levels[a] == i) & (levels[b] == j)].mean(axis=0)
        for i, j in itertools.product((-1, 1), repeat=2)
    )
    return {
        f"{a} at {b} {factors[b][0]:g}": first - none,
        f"{a} at {b} {factors[b][1]:g}": both - second,
        f"{b} at {a} {factors[a][0]:g}": second - none,
        f"{b} at {a} {factors[a][1]:g}": both - first,
        f"{a} and {b} together": both - none,
    }


def effects_figure(cells: Mapping[str, Any], setup: Any) -> Figure:
    """Effects of a two-level factorial at initialisation, low to high level, means over seeds with
    95 % intervals; a × b: half of what the effect of a changes by from a low to a high b.
    """
    found = {measure: effects_of(cells, setup.factors, measure) for measure in SHOWN}
    terms = list(found[SHOWN[0]])
    fig, axes = figures.figure(1, len(SHOWN), width=4.2, height=1 + 0.22 * len(terms), sharey=True)
    for ax, (measure, effects) in zip(axes.flat, found.items(), strict=True):
        for place, (mean, low, high) in enumerate(map(ends, effects.values())):
            if mean is not None:
                ax.plot([mean], [place], "o", color=figures.color(0))
            if low is not None:
                ax.plot([low, high], [place, place], color=figures.color(0), marker="")
        ax.axvline(0, color="0.5", lw=0.8)
        ax.set(xlabel=f"change of {MEASURES[measure]}")
        ax.set_yticks(range(len(terms)), terms, fontsize=8)
    axes[0, 0].invert_yaxis()
    return fig
