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

from experiments.cures.cases import MEASURES, Case, base_of, ends
from experiments.shell.flag_values import Flags
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
    found = {}
    for levels in itertools.product(*factors.values()) if factors else ():
        of = dict(zip(factors, levels, strict=True))
        depth = of.get("depth", min(options.depths))
        base = base_of(
            options, depth, of.get("heads", options.num_heads), of.get("width", options.d_model)
        )
        gains = {"branch_gain": of.get("residual", 1.0), "temperature": of.get("temperature", 1.0)}
        name = ", ".join(f"{n}={level:g}" for n, level in of.items())
        found[name] = Case("cell", name, depth, base.replace(**gains))
    return found


def design_of(count: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(terms, [2^k, terms]) of k factors: the mean, main effects and products of two, levels ±1."""
    terms = [(), *itertools.combinations(range(count), 1), *itertools.combinations(range(count), 2)]
    levels = np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
    return terms, np.stack([levels[:, list(term)].prod(axis=1) for term in terms], axis=1)


def effects_of(found: Sequence[Mapping[str, np.ndarray]], factors: Factors) -> dict[str, Any]:
    """{measure: {term: [effect, low, high]}}; None where a network has no number.

    Args:
        found: `measures_of` of every cell, in the order of `cells_of`.
        factors: Of the cells.
    """
    terms, design = design_of(len(factors))
    names = [" × ".join(list(factors)[i] for i in term) for term in terms]
    out = {}
    for measure in SHOWN:
        values = np.stack([own[measure] for own in found])  # [cells, s]
        fit = 2 * np.linalg.lstsq(design, np.nan_to_num(values))[0]
        known = np.where(np.isfinite(values).all(), fit, np.nan)
        out[measure] = {n: ends(own) for n, own in list(zip(names, known, strict=True))[1:]}
    return out


def simple_effects(
    found: Sequence[Mapping[str, np.ndarray]], factors: Factors, measure: str
) -> dict[str, list[float | None]]:
    """{change: [mean, low, high]} of the two factors with the largest product: of each with the
    other at its low and at its high level, and of both together; of one factor, of none.

    Means over all cells with these levels; empty where a network has no number.

    Args:
        found, factors: As of `effects_of`.
        measure: One of `SHOWN`.
    """
    values, count = np.stack([own[measure] for own in found]), len(factors)
    if count < 2 or not np.isfinite(values).all():
        return {}
    cells = values.reshape(*[2] * count, -1)
    means = {
        pair: cells.mean(axis=tuple(i for i in range(count) if i not in pair))
        for pair in itertools.combinations(range(count), 2)
    }  # [level of the first, level of the second, s]
    sizes = {pair: abs(np.mean(m[1, 1] - m[1, 0] - m[0, 1] + m[0, 0])) for pair, m in means.items()}
    pair = max(sizes, key=sizes.get)
    (a, (a_low, a_high)), (b, (b_low, b_high)) = (list(factors.items())[i] for i in pair)
    (none, second), (first, both) = means[pair]
    changes = {
        f"{a} at {b} {b_low:g}": first - none,
        f"{a} at {b} {b_high:g}": both - second,
        f"{b} at {a} {a_low:g}": second - none,
        f"{b} at {a} {a_high:g}": both - first,
        f"{a} and {b} together": both - none,
    }
    return {name: ends(own) for name, own in changes.items()}


@figures.styled
def effects_figure(effects: Mapping[str, Any]) -> Figure:
    """Effects of a two-level factorial at initialisation, low to high level, means over seeds with
    95 % intervals; a × b: half of what the effect of a changes by from a low to a high b.
    """
    count = len(next(iter(effects.values())))
    fig, axes = figures.figure(1, len(effects), width=4.2, height=1 + 0.22 * count, sharey=True)
    for ax, (measure, own) in zip(axes.flat, effects.items(), strict=True):
        for place, (mean, low, high) in enumerate(own.values()):
            if mean is not None:
                ax.plot([mean], [place], "o", color=figures.color(0))
            if low is not None:
                ax.plot([low, high], [place, place], color=figures.color(0), marker="")
        ax.axvline(0, color="0.5", lw=0.8)
        ax.set(xlabel=f"change of {MEASURES[measure]}")
        ax.set_yticks(range(len(own)), list(own), fontsize=8)
    axes[0, 0].invert_yaxis()
    return fig


def reading(effects: Mapping[str, Any], simple: Mapping[str, Any], factors: Factors) -> str:
    """The largest effects of single factors on the residual kept, and how two of them join."""
    own = {n: e for n, e in effects["log10_residual"].items() if n in factors and e[0] is not None}
    first = sorted(own, key=lambda n: -abs(own[n][0]))[:3]
    levels = ", ".join(f"{n} {low:g} to {high:g}" for n, (low, high) in factors.items())
    said = f"Of {levels} the largest effects on log10 of the residual kept are "
    said += "; ".join(_change(n, own[n]) for n in first) + "."
    if simple:
        said += f" Two of them: {'; '.join(_change(n, e) for n, e in simple.items())}."
    return said


def _change(name, ends):
    mean, low, high = ends
    return f"{name} {mean:+.2f}" + ("" if low is None else f" ({low:+.2f} to {high:+.2f})")
