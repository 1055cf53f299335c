"""A coordinate check over depth: do a network's quantities keep their size when it gets deeper?

    check = rc.coord_check(build, depths=(2, 8, 32))     # build(depth, seed=s) → step function
    print(check)
    check.figure().savefig("depth_check.png")

Each quantity of a step is fitted by a power of the depth, y ~ L^slope, for each seed: the mean
slope over seeds with its 95 % interval, and the largest ratio of the quantity between two depths,
which is large for a bump that a slope does not show.

Source: Yang et al. 2022 (arXiv 2203.03466), appendix D.1, for width; Dey et al. 2025
(arXiv 2505.01618), figure 7, for depth.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.annotations import ArrayLike
from rank_collapse.checks import check_numbers, check_whole, refuse, refuse_if
from rank_collapse.measures.arrays import (
    as_floats,
    match_framework,
    namespace,
    on_host,
)
from rank_collapse.measures.layer_measures import measure_states
from rank_collapse.measures.norms import matrix_norm
from rank_collapse.printed import format_count
from rank_collapse.report import figures
from rank_collapse.report.intervals import Interval, all_equal, describe_level, mean_interval

MEANING = {
    "stream": "mean |x_L|",
    "logits": "mean |logit|",
    "change": "mean |Δx_L| of a step",
    "branch": "‖x_L − x_{L−1}‖/‖x_L‖",
    "residual_ratio": "residual ratio of x_L",
    "cosine_distance": "1 − token cosine of x_L",
    "query_gradient": "‖∂W_Q‖ of the last block",
    "linearisation": "distance from linear in weights",
}
ARRAYS = ("hidden", "before", "logits", "query_gradient")  # of what a step gives
MEASURED = ("stream", "change", "branch", "residual_ratio", "cosine_distance")
AXES = ("width", "depth", "seed", "step")


class Slope(NamedTuple):
    """The power of the depth, or of the width, in one quantity.

    Attributes:
        quantity, over: Its name; "depth" or "width".
        slope, low, high: Mean over seeds and its 95 % interval, which is infinite for one seed, and
            the slope itself where several seeds agree exactly; NaN where a size has no positive
            number.
        ratio: Largest over smallest geometric mean over seeds, between all depths or widths.
        reason: Why there is no number, or "".
    """

    quantity: str
    over: str
    slope: float
    low: float
    high: float
    ratio: float
    reason: str


@dataclasses.dataclass(frozen=True)
class CoordCheck:
    """What `coord_check` measured.

    Attributes:
        values: {quantity: [widths, depths, seeds, steps]}, NaN where a step has none.
        depths, widths: The axes; no widths where these were not varied.
    """

    values: Mapping[str, np.ndarray]
    depths: tuple[int, ...]
    widths: tuple[int, ...] = ()

    def __post_init__(self):
        for name, sizes in (("depths", self.depths), ("widths", self.widths or (1, 2))):
            few = len({*sizes}) < max(len(sizes), 2)
            refuse_if(few, f"{name}={sizes} must have at least two different values")
            check_numbers("(0, inf)", arrays=True, **{name: np.asarray(sizes)})

    def slopes(self, step: int = -1) -> list[Slope]:
        """Fit the slope of every quantity at a step, over depth and, if there are widths, these."""
        slopes, finite = [], np.isfinite(self.values["stream"][..., step]).any()
        names = [name for name in MEANING if name in self.values]
        for name in dict.fromkeys((*names, *self.values)):
            values = self.values[name][..., step]
            if finite and np.isnan(values).all():
                continue  # no network has it at this step
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(np.where(values > 0, values, np.nan))
            slopes.append(_fit_slope(name, "depth", self.depths, logs.mean(axis=0)))
            if len(self.widths) > 1:
                slopes.append(_fit_slope(name, "width", self.widths, logs.mean(axis=1)))
        return slopes

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of a table, one value for each row.

        They are "width" where there are widths, "depth", "seed", "step" from 1 on, then each
        quantity.
        """
        _, _, seeds, steps = next(iter(self.values.values())).shape
        axes = (self.widths or (0,), self.depths, range(seeds), range(1, steps + 1))
        grid = dict(zip(AXES, np.meshgrid(*axes, indexing="ij"), strict=True))
        names = AXES if self.widths else AXES[1:]
        columns = {name: grid[name] for name in names} | dict(self.values)
        return {name: a.reshape(-1) for name, a in columns.items()}

    def to_pandas(self) -> Any:
        """Convert `columns` to a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.columns())

    def by_width(self, label: str = "") -> dict[str, dict[str, np.ndarray]]:
        """Split the values: {"label d=width": {quantity: [depths, seeds, steps]}}, for a figure."""
        titles = [f"{label} d={width}".strip() for width in self.widths] or [label]
        return {
            title: {name: a[i] for name, a in self.values.items()} for i, title in enumerate(titles)
        }

    def figure(self) -> Any:
        """Plot a panel per quantity over depth, at the first and the last step."""
        return coordinates_figure(self.by_width(), self.depths)

    def __str__(self) -> str:
        ends = [f"L={depth}" for depth in (self.depths[0], self.depths[-1])]
        rows = [
            ("quantity", "over", *ends, "slope", f"{describe_level()} interval", "largest ratio")
        ]
        for one in self.slopes():
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(self.values[one.quantity].mean(axis=0)[[0, -1], :, -1])
            means = [f"{value:.3g}" for value in np.exp(logs.mean(axis=1))]
            span = f"{one.low:.2f} to {one.high:.2f}" if math.isfinite(one.high) else ""
            about = MEANING.get(one.quantity, one.quantity)
            rows.append(
                (
                    about,
                    one.over,
                    *means,
                    f"{one.slope:.2f}",
                    span,
                    one.reason or f"{one.ratio:.3g}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        steps = next(iter(self.values.values())).shape[-1]
        return "\n".join([f"after {format_count(steps, 'step')}:", *lines])


def _fit_slope(name, over, sizes, logs):
    """Fit the slope of logarithms.

    Args:
        name, over: Name and abscissa of the `Slope`.
        sizes: Depths or widths.
        logs: Logarithms of the quantity, [sizes, seeds].
    """
    positive = np.isfinite(logs).all(axis=1)
    if not positive.all():
        reason = f"not a positive number at {over} {sizes[int(np.argmin(positive))]}"
        return Slope(name, over, *[math.nan] * 4, reason)
    away = np.log(sizes) - np.log(sizes).mean()
    by_seed = away @ logs / (away @ away)  # least squares, [seeds]
    means = logs.mean(axis=1)
    ratio = float(np.exp(means.max() - means.min()))
    slope, ends = float(by_seed.mean()), mean_interval(by_seed)
    if len(by_seed) > 1 and all_equal(by_seed):  # Student's interval knows no spread then
        ends = Interval(slope, slope)
    return Slope(name, over, slope, *ends, ratio, "")


def coord_check(
    build: Callable[..., Callable[[], Mapping[str, Any]]],
    depths: Sequence[int] = (2, 8, 32),
    widths: Sequence[int] | None = None,
    *,
    steps: int = 10,
    seeds: int = 3,
) -> CoordCheck:
    """Train networks of several depths for a few steps and fit each quantity by a power of depth.

    Args:
        build: build(depth, seed=s), or build(depth, width=w, seed=s) with widths, → a function
            without arguments that takes one training step and returns measurements from before it:
            "hidden" [..., n, d], the states after the last block, for the same tokens at every
            step; optionally "before", the states before the last block; "logits" [..., n, v];
            "query_gradient", an array; and other numbers by name. Arrays of any framework.
        depths, widths: At least two of each that is given, all different.
        steps, seeds: Number of training steps, and number of networks of each size; with one
            network a slope has no interval.

    Raises:
        ValueError: Too few sizes, or sizes that are not above 0; a step without "hidden"; arrays of
            another shape; a number with the name of a measured quantity.
    """
    refuse(
        (not callable(build), f"build is a {type(build).__name__}, not a function of the depth"),
        (np.ndim(depths) != 1, f"depths={depths!r} must have at least two different values"),
    )
    steps, seeds = check_whole("steps", steps, 1), check_whole("seeds", seeds, 1)
    values: dict[str, np.ndarray] = {}
    check = CoordCheck(values, tuple(depths), tuple(widths or ()))
    sizes = [{"width": width} for width in check.widths] or [{}]
    shape = (len(sizes), len(check.depths), seeds, steps)
    for place in itertools.product(*map(range, shape[:3])):
        step, last = build(check.depths[place[1]], seed=place[2], **sizes[place[0]]), None
        kind = type(step).__name__
        refuse_if(not callable(step), f"build returned a {kind}, not a function that takes a step")
        for number in range(steps):
            result = step()
            kind = type(result).__name__
            is_dictionary = isinstance(result, Mapping)
            refuse_if(not is_dictionary, f"a step returned a {kind}, not a dictionary")
            has_hidden = result.get("hidden") is not None
            refuse_if(not has_hidden, f"a step returned {', '.join(result)}, but no 'hidden'")
            measured = coordinates(result, last)
            hidden = as_floats(result["hidden"])
            last = namespace(hidden).asarray(hidden, copy=True)  # the step may use its buffer again
            for name, value in measured.items():
                is_number = not isinstance(value, str | None) and np.ndim(value) == 0
                refuse_if(not is_number, f"{name} of a step is {value!r:.60}, not a number")
                column = values.setdefault(name, np.full(shape, np.nan))
                column[(*place, number)] = on_host(as_floats(value))
    return check


def coordinates(result: Mapping[str, object], last: ArrayLike | None = None) -> dict[str, Any]:
    """Compute {quantity: number} from the measurements of one training step; arrays may be traced.

    Args:
        result: Arrays by name ("hidden", and if measured "before", "logits", "query_gradient"), and
            further numbers, which are passed on; see `coord_check`.
        last: "hidden" of the step before, for the change; None for none.

    Raises:
        ValueError: States of different shapes, or a number with the name of a measured one.
    """
    numbers = {name: value for name, value in result.items() if name not in ARRAYS}
    taken = [name for name in numbers if name in MEASURED]
    refuse_if(
        taken,
        f"{', '.join(taken)}: coord_check measures this itself; give your numbers another name",
    )
    arrays = {name: as_floats(result[name]) for name in ARRAYS if result.get(name) is not None}
    hidden = arrays["hidden"]
    xp, quantities = namespace(hidden), {}
    quantities["stream"] = xp.mean(xp.abs(hidden))
    if "logits" in arrays:
        quantities["logits"] = namespace(arrays["logits"]).abs(arrays["logits"]).mean()
    if last is not None:
        quantities["change"] = xp.mean(
            xp.abs(_subtract_states(hidden, last, "those of the last step"))
        )
    if "before" in arrays:
        branch = _subtract_states(hidden, arrays["before"], "those before the last block")
        quantities["branch"] = _frobenius_norm(branch) / _frobenius_norm(hidden)
    # NaN where a state is not finite.
    token_measures = measure_states(("residual_ratio", "token_cosine"), hidden)
    quantities["residual_ratio"] = xp.mean(token_measures["residual_ratio"])
    quantities["cosine_distance"] = 1 - xp.mean(token_measures["token_cosine"])
    if "query_gradient" in arrays:
        quantities["query_gradient"] = _frobenius_norm(arrays["query_gradient"])
    return quantities | numbers


def _subtract_states(hidden, other, subject):
    """Subtract other states of the same shape; `subject` names them in the message."""
    shapes = tuple(hidden.shape), tuple(other.shape)
    refuse_if(
        shapes[0] != shapes[1], f"states of shape {shapes[0]} and {subject} of {shapes[1]} differ"
    )
    hidden, other = match_framework(hidden, as_floats(other))
    return hidden - other


def _frobenius_norm(a):
    return matrix_norm(a.reshape((1, -1)), "frobenius") if a.shape else abs(a)


@figures.styled
def coordinates_figure(
    curves: Mapping[str, Mapping[str, Any]],
    depths: Sequence[int],
    meaning: Mapping[str, str] = MEANING,
) -> figures.Figure:
    """Plot a panel for each quantity over depth: dotted at the first step, solid at the last.

    Lines are geometric means over seeds; bands are one standard deviation of the logarithm.

    Args:
        curves: {label: {quantity: [depths, seeds, steps]}}, a colour for each label.
        depths: L.
        meaning: {quantity: what its axis says}.
    """
    names = list(dict.fromkeys(name for quantities in curves.values() for name in quantities))
    fig, axes = figures.panels(len(names), 4, width=2.9, height=2.4)
    for ax, name in zip(axes.flat, names, strict=False):
        for index, (label, quantities) in enumerate(curves.items()):
            for step, dashes, when in ((0, ":", "first step"), (-1, "-", "last step")):
                values = np.asarray(quantities[name])[..., step].T
                if np.isfinite(values).any():
                    text = f"{label} {when}".strip()
                    figures.log_band(ax, depths, values, text, index, linestyle=dashes)
        has_logs = any(np.any(np.asarray(quantities[name]) > 0) for quantities in curves.values())
        yscale = "log" if has_logs else "linear"  # 0 at all depths, as branches that start at 0
        ylabel = textwrap.fill(meaning.get(name, name), 22)  # no longer than a panel is high
        ax.set(xscale="log", yscale=yscale, xlabel="layers L", ylabel=ylabel)
        ax.set_xticks(depths, labels=map(str, depths))
        ax.set_xticks([], minor=True)
    entries = axes[0, 0].get_legend_handles_labels()
    fig.legend(*entries, loc="outside lower center", ncols=6)
    return fig
