"""Results with names: xarray Datasets over the axes of a run, of its seeds, and of a measure.

    results = make_dataset(executor.measure(...)["seeds"], {"ratio": ("variant", "layer")})
    results.ratio.sel(variant="san").isel(layer=-1)        # [s], by the names of the axes

The functions below make the rows of statements, the table and the figures of an experiment from
these Datasets. They accept any axes. "seed" is the axis of independent draws.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from experiments.lab.flags import FlagValue
from experiments.verdicts import Comparison, Row, TableRow, finite_or_none, make_row
from rank_collapse.report import figures
from rank_collapse.report.intervals import describe_interval, mean_interval
from rank_collapse.report.wording import describe_value, name_axis

if TYPE_CHECKING:
    import pandas as pd

MOST_LABELS = 12  # of the curves of a panel: a legend of hundreds takes minutes to lay out
MOST_PANELS = 24  # of a figure
# {axis: the value that a label need not name}; of other axes it need not name a single value.
USUAL = {"skip_gain": 1.0}


Labelled = TypeVar("Labelled", xr.DataArray, xr.Dataset)


def make_dataset(
    arrays: Mapping[str, np.ndarray], axes: Sequence[str], **special: Sequence[str]
) -> xr.Dataset:
    """Makes a Dataset of arrays {"name/a/b": [s, ...]}: variables [s, a, b, ...].

    Args:
        arrays: Arrays by name; the parts of a name after the first are coordinates.
        axes: Names of the levels of the array names, and then of the axes after the seeds; arrays
            with fewer have the first of them.
        **special: {name: its axes instead}.
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
        dims = special.get(name, axes)[: values.ndim - 1]
        coordinates = {axis: _to_numbers(level) for axis, level in zip(dims, keys, strict=False)}
        variables[name] = xr.DataArray(values, coordinates, ("seed", *dims))
    return xr.Dataset(variables)


def _to_numbers(texts):
    """Converts texts to integers, else to floats; returns them where they are neither."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return [kind(text) for text in texts]
    return texts


def join_datasets(
    parts: Mapping[tuple[FlagValue, ...], xr.Dataset], axes: Sequence[str]
) -> xr.Dataset:
    """Joins Datasets of the points of a grid to one over the grid; NaN where a Dataset does not
    have a variable.

    Args:
        parts: {values of the axes: Dataset}.
        axes: Names of the new dimensions.
    """
    if not axes:
        return next(iter(parts.values()))
    slices: dict[FlagValue, dict[tuple, xr.Dataset]] = {}
    for (value, *other_values), dataset in parts.items():
        slices.setdefault(value, {})[tuple(other_values)] = dataset
    datasets = [join_datasets(part, axes[1:]) for part in slices.values()]
    return xr.concat(datasets, xr.Variable(axes[0], [*slices]), data_vars="all", join="outer")


def apply_along(
    fn: Callable[[np.ndarray], np.ndarray | float], values: xr.DataArray, axis: str, **options: Any
) -> xr.DataArray:
    """Applies fn to arrays [..., k] whose last axis is the named one; see `xr.apply_ufunc`.

    Args:
        fn: Function of a NumPy array.
        values: Over any axes.
        axis: Name of the axis that is last for fn.
        **options: See `xr.apply_ufunc`.
    """
    return xr.apply_ufunc(fn, values, input_core_dims=[[axis]], **options)


def iterate_points(values: Labelled, *but: str) -> Iterator[tuple[dict[str, FlagValue], Labelled]]:
    """Yields (coordinates, values) for each combination of coordinates of all axes but the named
    ones.

    Args:
        values: DataArray or Dataset.
        *but: Axes that the values keep.
    """
    sizes = {axis: size for axis, size in values.sizes.items() if axis not in but}
    for index in itertools.product(*map(range, sizes.values())):
        selected = values.isel(dict(zip(sizes, index, strict=True)))
        yield {axis: selected[axis].item() for axis in sizes}, selected


def is_named(values: xr.DataArray | xr.Dataset, axis: str) -> bool:
    """Returns whether a label names the values of an axis: there are several, or one that is
    unusual.

    Args:
        values: DataArray or Dataset.
        axis: Name of the axis; results need not have it.
    """
    if axis not in values.sizes:
        return False
    if values.sizes[axis] > 1:
        return True
    return axis in USUAL and values[axis].item() != USUAL[axis]


def drop_single_axes(values: Labelled, but: Sequence[str] = ()) -> Labelled:
    """Drops axes of one value, which a setting need not name, unless all axes but "seed" have one
    value.

    Args:
        values: DataArray, or Dataset.
        but: Axes that stay.
    """
    single = [a for a, n in values.sizes.items() if n == 1 and a not in ("seed", *but)]
    single = [axis for axis in single if not is_named(values, axis)]
    return values.squeeze(single, drop=True) if len(single) + 1 < len(values.sizes) else values


def describe_point(point: Mapping[str, FlagValue]) -> str:
    """Describes a point {axis: value} in words: "Post-LN, weight scale 0.55"."""
    return ", ".join(describe_value(axis, value) for axis, value in point.items())


def statement_rows(
    key: str, values: xr.DataArray, setting: str = "", **options: Any
) -> Iterator[Row]:
    """Yields a statement's rows, one for each point of the axes but "seed".

    Args:
        key: Key of the statement.
        values: Statistic over seeds and the axes of the run.
        setting: Written before the point.
        **options: Further arguments of `make_row`.
    """
    for point, draws in iterate_points(drop_single_axes(values), "seed"):
        texts = filter(None, (setting, describe_point(point)))
        yield make_row(key, ", ".join(texts), draws.values, **options)


def compare_means(
    text: str,
    values: xr.DataArray,
    other: float | str | xr.DataArray | None = None,
    note: str = "",
    show: Callable = float,
    interval: bool = False,
    source: str = "published",
) -> Iterator[Comparison]:
    """Yields comparisons of means over seeds, one for each point of the other axes with a number.

    Args:
        text: The quantity, written after the point.
        values: Ours, over seeds and the axes of the run.
        other: The published value, or a DataArray over some of these axes.
        note: Note on every comparison.
        show: Mean → the value to show.
        source: Origin of `other`.
        interval: Whether the note has Student's 95 % interval of the mean over seeds, where it is
            finite.
    """
    for point, draws in iterate_points(drop_single_axes(values), "seed"):
        if draws.isnull().all():
            continue
        published = other
        if isinstance(other, xr.DataArray):
            published = other.sel({n: v for n, v in point.items() if n in other.dims}).item()
            published = finite_or_none(published)
        span = describe_interval(mean_interval(draws.values.tolist())) if interval else ""
        remark, mean = span or note, show(draws.mean().item())
        yield Comparison(f"{describe_point(point)}: {text}", mean, published, remark, source)


def table_rows(
    results: xr.Dataset, axes: Sequence[str], columns: Sequence[str]
) -> Iterator[TableRow]:
    """Yields a row for each point of the axes at which any column has a number.

    Args:
        results: Over the axes.
        axes: Names of the first columns.
        columns: Variables that are further columns, where the results have them.
    """
    values = results[[name for name in columns if name in results]]
    frame = values.to_dataframe(dim_order=[*axes]).reset_index()
    return frame_rows(frame.dropna(how="all", subset=list(values))[[*axes, *values]])


def product_rows(
    results: Mapping[str, ArrayLike], axes: Sequence[str], columns: Sequence[str]
) -> Iterator[TableRow]:
    """Yields a row for each combination of the axes; a column without the first axes is repeated.

    Args:
        results: Arrays by name: for an axis its values [k], or 0, 1, .. without them; for a column
            [..., k] over the last axes.
        axes: Names of the axes, such as "seed" and "length".
        columns: Names of the columns. Where a value is NaN the row has no entry.
    """
    # As objects: integers may exceed any float.
    arrays = np.broadcast_arrays(*(np.asarray(results[name], object) for name in columns))
    for index in np.ndindex(arrays[0].shape):
        row = {a: results[a][i] if a in results else i for a, i in zip(axes, index, strict=True)}
        values = {name: array[index] for name, array in zip(columns, arrays, strict=True)}
        yield row | {name: value for name, value in values.items() if value == value}


def frame_rows(frame: "pd.DataFrame") -> Iterator[TableRow]:
    """Yields the rows of a pandas DataFrame, without entries for values that are not numbers."""
    present = frame.notna().to_numpy()
    for row, mask in zip(frame.to_dict("records"), present, strict=True):
        yield dict(itertools.compress(row.items(), mask))


def plot_facets(
    values: xr.DataArray,
    x: str = "layer",
    hue: str = "",
    draw: Callable = figures.band,
    style: Callable[[int, int], dict[str, Any]] = lambda index, count: {},
    columns: int | None = None,
    ylabel: str | None = None,
    **options: Any,
):
    """Plots a panel for each point of all axes but seeds, x and hue; a curve over x for each hue.

    Args:
        values: Over seeds, x, hue and the axes of the panels, whose titles name them.
        x, hue: Names of axes; "" for none.
        draw: Function like `figures.band`.
        style: (place of a curve, number of curves) → options of `draw`.
        columns: Largest number of panels in a row; by default all panels, up to four.
        ylabel: Label on the y axis of the first panel.
        options: See `figures.figure`.

    Returns:
        The figure and its axes.
    """
    count = count_panels(values, x, hue)
    fig, axes = figures.panels(count, columns or min(count, 4), **options)
    for ax, (point, panel) in zip(axes.flat, iterate_points(values, "seed", hue, x), strict=False):
        curves = list(iterate_points(panel, "seed", x))
        label_step = -(-len(curves) // MOST_LABELS)
        for index, (coordinates, curve) in enumerate(curves):
            if curve.notnull().any():
                name = "".join(describe_value("", v) for v in coordinates.values())
                name = "" if index % label_step else name
                seeds = curve.transpose("seed", x)
                draw(ax, curve[x].values, seeds.values, name, index, **style(index, len(curves)))
        ax.set(xlabel=name_axis(x), title=describe_point(point))
        figures.integer_ticks(ax)
    for row in axes if ylabel else ():
        row[0].set_ylabel(ylabel)
    return fig, axes


def count_panels(values: xr.DataArray, x: str = "layer", hue: str = "") -> int:
    """Counts the panels of `plot_facets`."""
    return math.prod(n for axis, n in values.sizes.items() if axis not in ("seed", x, hue))


@figures.styled
def plot_axes(rows: Sequence[TableRow], axes: Sequence[str], column: str):
    """Plots a column of the table over the first axis; means over seeds.

    There is a curve for each value of the second axis, and a panel for each point of the others.

    Args:
        rows: Rows of the table.
        axes: Names of its first columns.
        column: "column,name=value,...": the column, and which rows; "last" is the last value.

    Returns:
        The figure; None where it would have more than `MOST_PANELS`.
    """
    import pandas as pd  # here: it takes half a second, which `--help` need not

    table = pd.DataFrame(rows)
    column, *conditions = column.split(",")
    for name, value in (condition.split("=") for condition in conditions):
        value = table[name].iloc[-1] if value == "last" else value
        table = table[table[name].astype(str) == str(value)]
    x, hue, *_ = [*axes, ""]
    groups = [name for name in (*axes, "seed") if name in table]
    values = table.groupby(groups)[column].mean().to_xarray()
    if "seed" not in values.dims:
        values = values.expand_dims("seed")
    if count_panels(values, x, hue) > MOST_PANELS:
        return None
    return plot_facets(values, x, hue, ylabel=name_axis(column), sharey=True)[0]
