"""Results with names: xarray Datasets over the axes of a run, its seeds, and those of a measure.

    found = of_arrays(executor.measure(...)["seeds"], {"ratio": ("variant", "layer")})
    found.ratio.sel(variant="san").isel(layer=-1)        # [s], with the names that it was found by

A statement's rows, the table and the figures of an experiment are made of them by the functions
below, whatever axes there are. "seed" is the axis of independent draws.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from experiments.lab.statements import make_row
from experiments.verdicts import Comparison
from experiments.verdicts.claims import Row
from rank_collapse.report import figures
from rank_collapse.report.wording import WORDS

MOST_LABELS = 12  # of the curves of a panel: a legend of hundreds takes minutes to lay out


def make_dataset(
    arrays: Mapping[str, np.ndarray], axes: Sequence[str], **others: Sequence[str]
) -> xr.Dataset:
    """Arrays {"name/a/b": [s, ...]} as variables [s, a, b, ...].

    Args:
        axes: What the levels of the names, and then the axes after the seeds, are called; of
            arrays with fewer the first of them.
        **others: The same of some names.
    """
    levels: dict[str, dict[tuple[str, ...], np.ndarray]] = {}
    for path, values in arrays.items():
        name, *keys = path.split("/")
        levels.setdefault(name, {})[tuple(keys)] = values
    variables = {}
    for name, parts in levels.items():
        keys = [list(dict.fromkeys(level)) for level in zip(*parts, strict=True)]
        stack = np.stack([parts[key] for key in itertools.product(*keys)], axis=1)
        values = stack.reshape(len(stack), *map(len, keys), *stack.shape[2:])
        called = others.get(name, axes)[: values.ndim - 1]
        coordinates = {axis: _numbers(level) for axis, level in zip(called, keys, strict=False)}
        variables[name] = xr.DataArray(values, coordinates, ("seed", *called))
    return xr.Dataset(variables)


def _numbers(texts):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return [kind(text) for text in texts]
    return texts


def join_datasets(parts: Mapping[tuple[Any, ...], xr.Dataset], axes: Sequence[str]) -> xr.Dataset:
    """Datasets by the point of a grid as one over it; NaN where a part lacks a variable."""
    if not axes:
        return next(iter(parts.values()))
    values = list(dict.fromkeys(point[0] for point in parts))
    of_value = [{p[1:]: own for p, own in parts.items() if p[0] == v} for v in values]
    parts_along = [join_datasets(own, axes[1:]) for own in of_value]
    return xr.concat(parts_along, xr.Variable(axes[0], values), data_vars="all", join="outer")


def apply_along(
    fn: Callable[[np.ndarray], Any], values: xr.DataArray, axis: str, **how: Any
) -> Any:
    """fn of arrays [..., k] whose last axis is that one; `how` as of `xr.apply_ufunc`."""
    return xr.apply_ufunc(fn, values, input_core_dims=[[axis]], **how)


def iterate_points(values: Any, *but: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """(coordinates, values) of each point of the axes that are not left out."""
    sizes = {axis: size for axis, size in values.sizes.items() if axis not in but}
    for place in itertools.product(*map(range, sizes.values())):
        chosen = values.isel(dict(zip(sizes, place, strict=True)))
        yield {axis: chosen[axis].item() for axis in sizes}, chosen


def several(values: xr.DataArray) -> xr.DataArray:
    """The values without axes of one value, unless all are: a setting need not name these."""
    alone = [axis for axis, size in values.sizes.items() if size == 1 and axis != "seed"]
    return values.squeeze(alone, drop=True) if len(alone) + 1 < values.ndim else values


def describe_point(point: Mapping[str, Any]) -> str:
    """A point in words: "Post-LN, weight scale 0.55"."""

    def named(flag, value):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        text = f"{flag.replace('_', ' ')} {text}"
        return WORDS.get(text, WORDS.get(value, text))

    return ", ".join(itertools.starmap(named, point.items()))


def statement_rows(key: str, values: xr.DataArray, what: str = "", **how: Any) -> Iterator[Row]:
    """A statement's rows, one for each point of the axes but seeds; `how` as of `make_row`."""
    for point, draws in iterate_points(several(values), "seed"):
        yield make_row(
            key, ", ".join(filter(None, (what, describe_point(point)))), draws.values, **how
        )


def compare_means(
    text: str, values: xr.DataArray, other: Any = None, note: str = "", show: Callable = float
) -> Iterator[Comparison]:
    """Means over seeds of each point of the other axes, beside others of some of these axes."""
    for point, mean in iterate_points(several(values).mean("seed")):
        reference = other
        if isinstance(other, xr.DataArray):
            reference = other.sel({n: v for n, v in point.items() if n in other.dims}).item()
        yield Comparison(f"{describe_point(point)}: {text}", show(mean.item()), reference, note)


def table_rows(
    found: xr.Dataset, axes: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each point of the axes at which any column has a number."""
    shown = found[[name for name in columns if name in found]]
    frame = shown.to_dataframe(dim_order=[*axes]).reset_index()
    return frame_rows(frame.dropna(how="all", subset=list(shown))[[*axes, *shown]])


def product_rows(
    results: Mapping[str, Any], axes: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each combination of the axes; a column that lacks the first axes is repeated.

    Args:
        results: Arrays by name: of an axis its values [k], without them 0, 1, ..; of a column
            [..., k] for the last axes.
        axes: Names of the axes, such as "seed" and "length".
        columns: Names of the columns. Where a value is NaN the row has no entry.
    """
    arrays = [
        np.asarray(results[name], object) for name in columns
    ]  # integers may exceed any float
    values = dict(zip(columns, np.broadcast_arrays(*arrays), strict=True))
    for index in np.ndindex(values[columns[0]].shape):
        places = zip(axes, index, strict=True)
        row = {axis: results[axis][i] if axis in results else i for axis, i in places}
        yield row | {n: a[index] for n, a in values.items() if a[index] == a[index]}


def frame_rows(frame: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pandas DataFrame, without entries for what is no number."""
    kept = frame.notna().to_numpy()
    for row, present in zip(frame.to_dict("records"), kept, strict=True):
        yield {name: value for (name, value), k in zip(row.items(), present, strict=True) if k}


def plot_facets(
    values: xr.DataArray,
    x: str = "layer",
    hue: str = "",
    col: str = "",
    draw: Callable = figures.band,
    style: Callable[[int, int], dict[str, Any]] = lambda index, count: {},
    columns: int | None = None,
    ylabel: str | None = None,
    **options: Any,
):
    """A panel for each value of `col`, in it a curve over x for each of `hue`, over seeds.

    Args:
        draw: As `figures.band`.
        style: (place of a curve, number of curves) → options of `draw`.
        columns: Panels in a row at the most; all by default.
        options: As of `figures.figure`.
    """
    count = values.sizes.get(col, 1)
    fig, axes = figures.panels(count, columns or count, **options)
    for ax, (place, panel) in zip(axes.flat, iterate_points(values, "seed", hue, x), strict=False):
        curves = list(iterate_points(panel, "seed", x))
        every = -(-len(curves) // MOST_LABELS)
        for index, (label, curve) in enumerate(curves):
            if curve.notnull().any():
                name = "".join(describe_point({"": v}).strip() for v in label.values())
                name = "" if index % every else name
                seeds = curve.transpose("seed", x)
                draw(ax, curve[x].values, seeds.values, name, index, **style(index, len(curves)))
        ax.set(xlabel=x, title=describe_point(place))
        figures.integer_ticks(ax)
    axes[0, 0].set_ylabel(ylabel)
    return fig, axes


@figures.styled
def plot_axes(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], shown: str):
    """A column of the table over the first axis, a curve for each value of the second, a panel for
    each of the third; means over seeds.

    Args:
        shown: "column,name=value,...": the column, and which rows; "last" is the last value.
    """
    import pandas as pd  # here: it takes half a second, which `--help` need not

    table = pd.DataFrame(rows)
    column, *conditions = shown.split(",")
    for name, value in (condition.split("=") for condition in conditions):
        at = table[name].iloc[-1] if value == "last" else value
        table = table[table[name].astype(str) == str(at)]
    x, hue, col, *_ = [*axes, "", ""]
    by = [name for name in (x, hue, col, "seed") if name in table]
    values = table.groupby(by)[column].mean().to_xarray()
    if "seed" not in values.dims:
        values = values.expand_dims("seed")
    return plot_facets(values, x, hue, col, ylabel=column, sharey=True)[0]
