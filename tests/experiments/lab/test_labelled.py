"""Labelled arrays of results, and the legends of their curves."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from experiments.lab import labelled
from tests.support.closeness import assert_close


def test_a_variable_that_lacks_a_name_has_nan_there():
    arrays = {"loss/b": np.ones(2), "ratio/a": np.zeros(2), "ratio/b": np.full(2, 3.0)}
    dataset = labelled.make_dataset(arrays, ("variant",))
    assert list(dataset) == ["loss", "ratio"] and dataset.loss.dims == ("seed", "variant")
    by_variant = {name: dataset.sel(variant=name) for name in "ab"}
    assert by_variant["a"].loss.isnull().all() and (by_variant["b"].loss == 1).all()
    assert (by_variant["a"].ratio == 0).all() and (by_variant["b"].ratio == 3).all()


@pytest.mark.parametrize("count", [3, 12, 300])
def test_many_curves_have_a_short_legend(count):
    values = xr.DataArray(np.ones((2, count, 3)), dims=("seed", "gain", "layer"))
    values = values.assign_coords(gain=np.arange(count), layer=np.arange(3))
    ax = labelled.plot_facets(values, hue="gain")[1][0, 0]
    _, names = ax.get_legend_handles_labels()
    assert names[0] == "0" and len(names) == min(count, 12)


def make_results():
    """Makes results over seeds, gains in no order, variants and layers; a number is its place."""
    axes = {"gain": [4.0, 0.5], "variant": ["post", "san"], "seed": [0, 1, 2], "layer": [0, 1]}
    shape = [len(values) for values in axes.values()]
    values = np.arange(24, dtype=float).reshape(shape)
    return xr.Dataset({"ratio": (tuple(axes), values)}, axes)


def test_levels_of_names_are_axes_in_their_order():
    arrays = {
        f"a/{variant}/{gain}": 100 * i + 10 * j + np.arange(6.0).reshape(2, 3)
        for i, variant in enumerate(("san", "post"))
        for j, gain in enumerate(("2", "0.5"))
    }
    arrays |= {"b/2": np.arange(2.0), "b/1": np.arange(2.0) + 5}
    dataset = labelled.make_dataset(arrays, ("variant", "gain", "layer"), b=("steps",))
    assert dataset.a.dims == ("seed", "variant", "gain", "layer")
    assert dataset.gain.values.tolist() == [2.0, 0.5] and dataset.steps.values.tolist() == [2, 1]
    assert dataset.steps.dtype.kind == "i" and "layer" not in dataset.coords
    values = dataset.a.sel(variant="post", gain=0.5).values
    np.testing.assert_array_equal(values, 110 + np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(dataset.b.sel(steps=1), [5, 6])


def test_datasets_of_points_are_joined_in_the_order_of_the_points():
    parts = {
        (placement, gain): xr.Dataset({"a": ("seed", np.array([i + j, i - j]))})
        for i, placement in enumerate(("post", "none"))
        for j, gain in enumerate((2.0, 1.0))
    }
    parts["none", 1.0] = parts["none", 1.0].assign(b=("seed", np.array([7, 8])))
    joined = labelled.join_datasets(parts, ("norm", "gain"))
    assert joined.norm.values.tolist() == ["post", "none"]
    assert joined.gain.values.tolist() == [2.0, 1.0]
    assert joined.a.sel(norm="none", gain=1.0).values.tolist() == [2, 0]
    assert joined.a.sel(norm="post", gain=1.0).values.tolist() == [1, -1]
    assert joined.b.sel(norm="none", gain=1.0).values.tolist() == [7, 8]
    assert joined.b.sel(norm="none", gain=2.0).isnull().all()
    alone = parts["post", 2.0]
    assert labelled.join_datasets({(): alone}, ()) is alone


def test_points_are_of_all_axes_but_those_that_are_named():
    results = make_results()
    points = list(labelled.iterate_points(results.ratio, "seed", "layer"))
    assert [point for point, _ in points] == [
        {"gain": gain, "variant": variant} for gain in (4.0, 0.5) for variant in ("post", "san")
    ]
    for (_, values), start in zip(points, (0, 6, 12, 18), strict=True):
        np.testing.assert_array_equal(values, start + np.arange(6.0).reshape(3, 2))
    means = labelled.apply_along(lambda a: a[..., 1] - a[..., 0], results.ratio, "gain")
    assert means.dims == ("variant", "seed", "layer") and (means == 12).all()


def test_an_axis_of_one_value_is_named_where_the_value_is_unusual():
    values = make_results().ratio
    single = values.isel(variant=[0], layer=0, drop=True)
    assert labelled.is_named(values, "gain") and not labelled.is_named(single, "variant")
    assert not labelled.is_named(values, "absent")
    usual = single.rename(gain="skip_gain").isel(skip_gain=[0])
    assert labelled.is_named(usual, "skip_gain")
    assert not labelled.is_named(usual.assign_coords(skip_gain=[1.0]), "skip_gain")
    assert labelled.drop_single_axes(single).dims == ("gain", "seed")
    assert labelled.drop_single_axes(single, ("variant",)).dims == ("gain", "variant", "seed")
    # one point in all: its axes are all that a setting has
    alone = single.isel(gain=[0])
    assert labelled.drop_single_axes(alone).dims == ("gain", "variant", "seed")
    assert labelled.drop_single_axes(usual).dims == ("skip_gain", "seed")


def test_points_in_words():
    assert labelled.describe_point({"norm_placement": "post", "weight_scale": 0.55}) == (
        "Post-LN, weight scale 0.55"
    )
    assert labelled.describe_point({"depth": 12, "variant": "san", "causal": True}) == (
        "depth 12, attention alone, causal True"
    )


def test_rows_of_a_statement_are_of_its_points():
    values = make_results().ratio.isel(layer=1, drop=True)
    rows = list(labelled.statement_rows("loops grow", values, "text"))
    settings = [row.setting for row in rows]
    assert settings == [
        f"text, gain {gain}, {word}" for gain in (4, 0.5) for word in ("Post-LN", "attention alone")
    ]
    single = list(
        labelled.statement_rows("loops grow", values.isel(variant=[1], gain=0, drop=True))
    )
    assert [row.setting for row in single] == ["attention alone"] and single[0].draws == 3


def test_comparisons_are_means_beside_the_published_number_of_their_point():
    values = make_results().ratio.isel(layer=1, drop=True)
    published = xr.DataArray([0.25, np.nan], {"gain": [0.5, 4.0]}, ("gain",))
    values = values.where(~((values.gain == 4) & (values.variant == "san")))
    lines = list(
        labelled.compare_means("rank", values, published, "a note", lambda v: 2 * v, source="here")
    )
    assert [(c.quantity, c.measured, c.published, c.note, c.source) for c in lines] == [
        ("gain 4, Post-LN: rank", 6.0, None, "a note", "here"),
        ("gain 0.5, Post-LN: rank", 30.0, 0.25, "a note", "here"),
        ("gain 0.5, attention alone: rank", 42.0, 0.25, "a note", "here"),
    ]
    (first, *_) = labelled.compare_means("rank", values.where(values != 1), note="of two seeds")
    assert (first.measured, first.note) == (4, "of two seeds")  # a draw without a number
    (first, *_) = labelled.compare_means("rank", values, "alike", interval=True)
    ends = stats.t.interval(0.95, 2, 3.0, stats.sem([1.0, 3.0, 5.0]))
    assert (first.published, first.source) == ("alike", "published")
    assert first.note == f"95 % {ends[0]:.3g} to {ends[1]:.3g}" and first.measured == 3
    # a draw without a number, one draw or equal draws know no interval, nor that of another point
    partial = values.where(values.gain == 4).fillna(xr.where(values.seed == 0, 1.0, np.nan))
    noted = labelled.compare_means("rank", partial, note="alone", interval=True)
    assert [c.note[:4] for c in noted] == ["95 %", "alon", "alon", "alon"]


def test_rows_of_a_table_are_the_points_that_have_a_number():
    results = make_results()
    results = results.assign(
        part=results.ratio.where(results.layer == 1), empty=results.ratio.where(False)
    )
    axes = ("variant", "gain", "seed", "layer")
    rows = list(labelled.table_rows(results, axes, ("part", "ratio", "absent")))
    assert len(rows) == 24 and [*rows[1]] == [*axes, "part", "ratio"]
    for row in rows:
        point = {name: row[name] for name in axes}
        assert row["ratio"] == results.ratio.sel(point).item()
        assert row.get("part") == (row["ratio"] if row["layer"] == 1 else None)
    assert [(r["variant"], r["gain"], r["seed"], r["layer"]) for r in rows[:3]] == [
        ("post", 4.0, 0, 0),
        ("post", 4.0, 0, 1),
        ("post", 4.0, 1, 0),
    ]
    assert len(list(labelled.table_rows(results, axes, ("part",)))) == 12
    assert not list(labelled.table_rows(results, axes, ("empty",)))


def test_rows_of_a_product_repeat_what_lacks_the_first_axes():
    arrays = {
        "length": np.array([3, 1]),
        "share": np.array([[0.5, np.nan, 0.25], [1, 2, 3]]).T[:, :2],
        "law": np.array([7.0, 8.0]),
        "paths": [10**30, 2],
    }
    rows = list(labelled.product_rows(arrays, ("seed", "length"), ("share", "law", "paths")))
    assert rows[:3] == [
        {"seed": 0, "length": 3, "share": 0.5, "law": 7.0, "paths": 10**30},
        {"seed": 0, "length": 1, "share": 1.0, "law": 8.0, "paths": 2},
        {"seed": 1, "length": 3, "law": 7.0, "paths": 10**30},
    ]
    assert len(rows) == 6


def test_panels_are_points_and_curves_are_the_values_of_the_hue():
    results = make_results()
    _, axes = labelled.plot_facets(
        results.ratio, hue="gain", ylabel="ratio", columns=1, style=lambda i, n: {"lw": i + n}
    )
    assert axes.shape == (2, 1) and labelled.count_panels(results.ratio, hue="gain") == 2
    assert labelled.count_panels(results.ratio) == 4
    for ax, (variant, title) in zip(
        axes.flat, {"post": "Post-LN", "san": "attention alone"}.items(), strict=True
    ):
        assert ax.get_title() == title and ax.get_xlabel() == "layer"
        assert ax.get_ylabel() == "ratio"
        for line, gain in zip(ax.lines, (4.0, 0.5), strict=True):
            expected = results.ratio.sel(gain=gain, variant=variant).mean("seed")
            assert_close(line.get_ydata(), expected)
            assert line.get_label() == f"{gain:g}" and line.get_xdata().tolist() == [0, 1]
            assert line.get_linewidth() == 2 + (gain == 0.5)


def test_panels_stand_four_in_a_row_and_curves_may_have_gaps():
    values = xr.DataArray(np.arange(24.0).reshape(2, 6, 2), dims=("seed", "depth", "layer"))
    values = values.assign_coords(depth=np.arange(6), layer=[0, 1])
    values = values.where((values.depth > 1) | ((values.depth == 1) & (values.layer == 1)))
    _, axes = labelled.plot_facets(values, sharex=True)
    shown = [ax for ax in axes.flat if ax.get_visible()]
    assert axes.shape == (2, 4) and len(shown) == 6
    assert axes[0, 0].get_shared_x_axes().joined(axes[0, 0], axes[1, 1])
    assert (shown[1].get_xticks() % 1 == 0).all()  # layers are whole numbers
    assert [len(ax.lines) > 0 for ax in shown] == [False, *[True] * 5]


def test_a_column_over_the_axes_is_of_the_rows_that_it_names():
    rows = [
        {"depth": depth, "tied": tied, "seed": seed, "layer": layer, "size": size}
        for depth in (8, 2)
        for tied in ("a", "b")
        for seed in (0, 1)
        for layer in (0, depth)
        for size in [depth + 10 * seed + 100 * (layer > 0) + 1000 * (tied == "b")]
    ]
    fig = labelled.plot_axes(rows, ("depth", "tied"), "size,layer=0")
    (ax,) = fig.axes
    for line, tied in zip(ax.lines, (0, 1000), strict=True):
        assert line.get_xdata().tolist() == [2, 8]
        assert line.get_ydata().tolist() == [7 + tied, 13 + tied]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("depth", "size")
    (ax,) = labelled.plot_axes(rows, ("depth",), "size,layer=0,tied=b").axes
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1007.0, 1013.0]]
    # "last" is the last value of the table
    (ax,) = labelled.plot_axes(rows[-2:], ("depth",), "size,layer=last").axes
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1112.0]]
    (ax,) = labelled.plot_axes(rows[::-1], ("depth",), "size,layer=last").axes
    assert [line.get_ydata().tolist() for line in ax.lines] == [[507.0, 513.0]]  # of layer 0
    # means over seeds, and one scale for all panels
    skewed = [
        {"a": a, "b": 0, "c": c, "seed": seed, "size": size}
        for a in (0, 1)
        for c in (0, 1)
        for seed, size in enumerate((0.0, 0.0, 3.0))
    ]
    panels = labelled.plot_axes(skewed, ("a", "b", "c"), "size").axes
    assert [ax.lines[0].get_ydata().tolist() for ax in panels] == [[1.0, 1.0]] * 2
    assert panels[0].get_shared_y_axes().joined(*panels)
    many = [{"a": 0, "b": 0, "c": c, "seed": 0, "size": 1.0} for c in range(25)]
    assert labelled.plot_axes(many, ("a", "b", "c"), "size") is None
    assert labelled.plot_axes(many[1:], ("a", "b", "c"), "size") is not None
    unseeded = [{key: row[key] for key in ("depth", "size")} for row in rows if row["seed"] == 0]
    assert labelled.plot_axes(unseeded, ("depth",), "size") is not None
