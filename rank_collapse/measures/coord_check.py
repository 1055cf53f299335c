"""A coordinate check over depth: do a network's quantities stay of one size when it gets deeper?

    check = rc.coord_check(build, depths=(2, 8, 32))     # build(depth, seed=s) → step function
    print(check)
    check.figure().savefig("depth_check.png")

Each quantity of a step is fitted by a power of the depth, y ~ L^slope, for each seed; the mean
slope over seeds with its 95 % interval is held against a range.

Source: Yang et al. 2022 (arXiv 2203.03466), appendix D.1, for width; Dey et al. 2025
(arXiv 2505.01618), figure 7, for depth.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rank_collapse.measures.arrays import as_floats, namespace, on_host
from rank_collapse.measures.profiles import installed, of_states
from rank_collapse.report.intervals import Interval, geometric_mean, mean_interval, slope
from rank_collapse.struct import refuse_if

# Ranges of slopes. Over 2 to 32 layers a slope of a quarter is a factor of two.
STEADY = (-0.25, 0.25)
DEEP: dict[str, tuple[float, float]] = {
    "stream": STEADY,
    "logits": STEADY,
    "change": STEADY,
    "branch": (-1.25, -0.25),  # L branches of one sign are 1/L each, of random signs 1/√L
    "residual_ratio": (-0.25, math.inf),
    "cosine_distance": (-0.25, math.inf),
    "query_gradient": (-1.25, math.inf),  # a branch of size 1/L has it by 1/L
    "linearisation": (-0.25, math.inf),
}
WIDE = {name: own for name, own in DEEP.items() if name not in ("branch", "query_gradient")}
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
AXES = ("width", "depth", "seed", "step")
FEWEST_SEEDS = 3
HOLDS, FAILS, OPEN, NO_RANGE = "holds", "does not hold", "cannot be said", "no range"


class Slope(NamedTuple):
    """The power of the depth, or of the width, in one quantity.

    Attributes:
        quantity, over: Its name; "depth" or "width".
        slope, low, high: Mean over seeds and its 95 % interval; NaN where there is none.
        least, most: The range in which it is to lie; NaN for any.
        answer: "holds", "does not hold", "cannot be said" or "no range".
        why: What the numbers do not say by themselves.
    """

    quantity: str
    over: str
    slope: float
    low: float
    high: float
    least: float
    most: float
    answer: str
    why: str


@dataclasses.dataclass(frozen=True)
class CoordCheck:
    """What `coord_check` measured.

    Attributes:
        values: {quantity: [widths, depths, seeds, steps]}, NaN where a step has none.
        depths, widths: The axes; no widths where these were not varied.
        deep, wide: {quantity: range of its slope} over depth and over width.
    """

    values: Mapping[str, np.ndarray]
    depths: tuple[int, ...]
    widths: tuple[int, ...] = ()
    deep: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=lambda: DEEP)
    wide: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=lambda: WIDE)

    def __post_init__(self):
        for name, sizes in (("depths", self.depths), ("widths", self.widths or (1, 2))):
            few = len({*sizes}) < max(len(sizes), 2)
            refuse_if(few, f"{name}={sizes} are not two different {name} or more")

    def slopes(self, step: int = -1) -> list[Slope]:
        """The slope of every quantity at a step, over depth and, where there are widths, these."""
        found, there = [], np.isfinite(self.values["stream"][..., step]).any()
        names = [name for name in MEANING if name in self.values]
        for name in dict.fromkeys((*names, *self.values)):
            own = self.values[name][..., step]
            if there and np.isnan(own).all():
                continue  # no network has it at this step
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(np.where(own > 0, own, np.nan))
            found.append(_slope(name, "depth", self.depths, logs.mean(axis=0), self.deep))
            if len(self.widths) > 1:
                found.append(_slope(name, "width", self.widths, logs.mean(axis=1), self.wide))
        return found

    def columns(self) -> dict[str, np.ndarray]:
        """{"width" where there are widths, "depth", "seed", "step" from 1 on, then each quantity:
        one value for each row of a table}."""
        _, _, seeds, steps = next(iter(self.values.values())).shape
        axes = (self.widths or (0,), self.depths, range(seeds), range(1, steps + 1))
        grid = dict(zip(AXES, np.meshgrid(*axes, indexing="ij"), strict=True))
        named = AXES if self.widths else AXES[1:]
        return {n: a.reshape(-1) for n, a in ({n: grid[n] for n in named} | self.values).items()}

    def to_pandas(self) -> Any:
        """A DataFrame of `columns`."""
        return installed("pandas").DataFrame(self.columns())

    def by_width(self, label: str = "") -> dict[str, dict[str, np.ndarray]]:
        """{"label d=width": {quantity: [depths, seeds, steps]}}, as a figure takes them."""
        titles = [f"{label} d={width}".strip() for width in self.widths] or [label]
        every = self.values.items()
        return {title: {n: a[i] for n, a in every} for i, title in enumerate(titles)}

    def figure(self) -> Any:
        """A panel per quantity over depth, at the first and the last step, of matplotlib."""
        from rank_collapse.report.coord_check import coordinates_figure

        return coordinates_figure(self.by_width(), self.depths, MEANING)

    def __str__(self) -> str:
        ends = [f"L={depth}" for depth in (self.depths[0], self.depths[-1])]
        rows = [("quantity", "over", *ends, "slope", "95 % interval", "range", "answer")]
        for one in self.slopes():
            own = self.values[one.quantity].mean(axis=0)[[0, -1], :, -1]
            values = [f"{v:.3g}" for v in geometric_mean(own.T)]
            about = MEANING.get(one.quantity, one.quantity)
            spans = [f"{a:.2f} to {b:.2f}" for a, b in (one[3:5], one[5:7])]
            spans = ["" if "nan" in span else span for span in spans]
            answer = f"{one.answer}: {one.why}" if one.why else one.answer
            rows.append((about, one.over, *values, f"{one.slope:.2f}", *spans, answer))
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, sizes)).rstrip() for row in rows)
        steps = next(iter(self.values.values())).shape[-1]
        return "\n".join([f"after {steps} steps:", *lines])


def _slope(name, over, sizes, logs, ranges):
    """Of logarithms [sizes, seeds]."""
    each, claimed = slope(np.log(sizes), logs.T), ranges.get(name)
    finite = [value for value in each if np.isfinite(value)]
    interval = mean_interval(finite) if len(finite) >= FEWEST_SEEDS else Interval()
    why = f"{len(finite)} seeds" if len(finite) < FEWEST_SEEDS else ""
    if not why and not interval.known:
        why = "all draws are equal"
    answer = _judge(interval, claimed) if claimed else NO_RANGE
    if not (known := np.isfinite(logs).all(axis=1)).all():
        answer = FAILS if claimed else NO_RANGE
        why = f"not a positive number at {over} {sizes[int(np.argmin(known))]}"
    unknown = (math.nan, math.nan)
    return Slope(name, over, float(each.mean()), *interval, *(claimed or unknown), answer, why)


def _judge(interval, claimed):
    """Whether all of an interval lies in the open range, or none of it."""
    (low, high), (least, most) = interval, claimed
    if least < low and high < most:
        return HOLDS
    return FAILS if high <= least or low >= most else OPEN


def coord_check(
    build: Callable[..., Callable[[], Mapping[str, Any]]],
    depths: Sequence[int] = (2, 8, 32),
    widths: Sequence[int] | None = None,
    *,
    steps: int = 10,
    seeds: int = 3,
    ranges: Mapping[str, tuple[float, float] | None] | None = None,
) -> CoordCheck:
    """Trains networks of several depths for a few steps and fits each quantity by a power of depth.

    Args:
        build: build(depth, seed=s), or build(depth, width=w, seed=s) with widths, → a function
            without arguments that takes one training step and returns what it saw before it:
            "hidden" [..., n, d], the states after the last block, of the same tokens at every step;
            where there are any, "before", those before the last block; "logits" [..., n, v];
            "query_gradient", an array; and other numbers by name. Arrays of any framework.
        depths, widths: At least two of each that is given, all different.
        steps, seeds: Training steps, and networks of each size: a slope has no interval with fewer
            than three.
        ranges: {quantity: range of the slope over depth}, in place of or beside `DEEP`; None for
            none.

    Raises:
        ValueError: No function, too few sizes, or a step without "hidden".
    """
    refuse_if(not callable(build), f"build={build!r:.60} is no function (depth, seed=s) → step")
    refuse_if(min(steps, seeds) < 1, f"steps={steps} and seeds={seeds} are to be positive")
    chosen = {n: own for n, own in (DEEP | dict(ranges or {})).items() if own is not None}
    values: dict[str, np.ndarray] = {}
    check = CoordCheck(values, tuple(depths), tuple(widths or ()), chosen)
    sizes = [{"width": width} for width in check.widths] or [{}]
    shape = (len(sizes), len(depths), seeds, steps)
    for place in itertools.product(*map(range, shape[:3])):
        step, last = build(depths[place[1]], seed=place[2], **sizes[place[0]]), None
        for number in range(steps):
            seen = step()
            refuse_if("hidden" not in seen, f"a step gave {', '.join(seen)}, but no 'hidden'")
            found = coordinates(seen, last)
            last = seen["hidden"]
            for name, value in found.items():
                own = values.setdefault(name, np.full(shape, np.nan))
                own[(*place, number)] = on_host(value)
    return check


def coordinates(seen: Mapping[str, Any], last: Any = None) -> dict[str, Any]:
    """{quantity: number} of what a step saw, see `coord_check`; traced or not.

    Args:
        last: "hidden" of the step before, for the change; None for none.
    """
    rest = dict(seen)
    hidden = as_floats(rest.pop("hidden"))
    xp, found = namespace(hidden), {}
    found["stream"] = xp.mean(xp.abs(hidden))
    if (logits := rest.pop("logits", None)) is not None:
        found["logits"] = xp.mean(xp.abs(as_floats(logits)))
    if last is not None:
        found["change"] = xp.mean(xp.abs(hidden - as_floats(last)))
    if (before := rest.pop("before", None)) is not None:
        found["branch"] = _size(hidden - as_floats(before)) / _size(hidden)
    of_tokens = of_states(("residual_ratio", "token_cosine"), hidden)  # NaN where not finite
    found["residual_ratio"] = xp.mean(of_tokens["residual_ratio"])
    found["cosine_distance"] = 1 - xp.mean(of_tokens["token_cosine"])
    if (gradient := rest.pop("query_gradient", None)) is not None:
        found["query_gradient"] = _size(as_floats(gradient))
    return found | rest


def _size(a):
    xp = namespace(a)
    return xp.sqrt(xp.sum(xp.square(a)))
