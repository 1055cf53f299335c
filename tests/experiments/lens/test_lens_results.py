"""Results of run_lens: what cannot fail is not tested."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
import xarray as xr

from experiments.lens import influence, lens_figures, lens_results
from experiments.trained import opened_networks
from rank_collapse import pretrained
from rank_collapse.report import figures
from tests.support.closeness import assert_close

SETTINGS = opened_networks.UNTRAINED["llama"] | {"initializer_range": 0.5}


@pytest.fixture(scope="module")
def llama():
    return pretrained.random_like(SETTINGS, jax.random.key(0))


def make_network(label, depth, **fields):
    settings = SETTINGS | {"num_hidden_layers": depth}
    source = pretrained.open_random(settings, jax.random.key(0))
    return opened_networks.Network(label, source, {}, None, **fields)


def test_what_cannot_fail_is_not_tested_and_nothing_is_claimed_of_initial_weights():
    opened = [
        make_network("drawn at init", 8, is_initialised=True),
        make_network("deep", 8),
        make_network("shallow", 5),  # three attentions after the state
    ]
    axes = {
        "start": [lens_results.EARLY],
        "network": [network.label for network in opened],
        "direction": [*influence.DIRECTIONS],
        "position": [*influence.POSITIONS],
        "seed": np.arange(8),
    }
    shape = [len(values) for values in axes.values()]
    names = ("mean_length_frozen", "mean_length_exact", "cosine")
    values = xr.DataArray(np.arange(np.prod(shape), dtype=float).reshape(shape), axes, [*axes])
    results = xr.Dataset({name: values + i / 10 for i, name in enumerate(names)})
    tested = {(row.key, row.setting): row for row in lens_results.judge_claims(results, opened)}
    assert {*tested} == {
        ("frozen lengths", "deep"),
        ("exact lengths", "deep"),
        ("frozen direction", "deep"),
        ("frozen direction", "shallow"),
    }
    draws = values.sel(start=0.13, network="deep", direction="random", position="later")
    row = tested["exact lengths", "deep"]
    assert_close(row.estimate, float(np.median(draws)) + 0.1)
    other = results.assign_coords(start=[0.5])
    assert not list(lens_results.judge_claims(other, opened))


@pytest.mark.parametrize("missing", [[], [0], [0, 1], [0, 1, 2]])
def test_a_mean_over_texts_leaves_out_those_without_a_number(missing):
    """One text has no interval, and no text has no line."""
    network = make_network("deep", 8)
    axes = {
        "start": [lens_results.EARLY],
        "network": ["deep"],
        "direction": [lens_results.PLACE["direction"]],
        "position": [lens_results.PLACE["position"]],
        "seed": np.arange(3),
    }
    draws = np.array([0.25, 0.5, 1.0])
    draws[missing] = np.nan
    values = xr.DataArray(draws.reshape(1, 1, 1, 1, 3), axes, [*axes])
    results = xr.Dataset(dict.fromkeys(lens_results.SUMMARIES, values))
    lines = list(lens_results.compare_results(results, [network]))
    present = draws[~np.isnan(draws)]
    assert len(lines) == len(lens_results.SUMMARIES) * (len(present) > 0)
    for line in lines:
        assert line.measured == present.mean()
        assert line.note.startswith("95 % ") == (len(present) > 1)


def test_lengths_and_sizes_are_sums_over_lengths_where_there_is_a_number():
    """Of the deeper network all lengths count; a direction that is missing has neither."""
    opened, draw = [make_network("deep", 6), make_network("shallow", 4)], np.random.default_rng(0)
    parts = {
        label: {
            f"{name}_{kind}/{direction}/{position}": draw.uniform(size=(2, count))
            for name in ("share", "size")
            for kind in influence.KINDS
            for direction in ("random", "next")
            for position in influence.POSITIONS
        }
        for label, count in (("deep", 5), ("shallow", 3))
    }
    missing = {name for name in parts["shallow"] if "/next/" in name}
    for name in missing:
        parts["shallow"][name] = np.full((2, 3), np.nan)
    joined = lens_results.join_networks(parts, opened, lens_results.EARLY)
    for label, arrays in parts.items():
        for kind in influence.KINDS:
            for direction in ("random", "next"):
                point = {"network": label, "direction": direction, "position": "later"}
                share, size = (
                    arrays[f"{name}_{kind}/{direction}/later"] for name in ("share", "size")
                )
                lengths = share @ np.arange(share.shape[1])
                assert_close(joined[f"mean_length_{kind}"].sel(point), lengths)
                assert_close(joined[f"cancelled_{kind}"].sel(point), size.sum(axis=1))
    assert joined.from_layer.sel(network="deep").values.tolist() == [2.0, 2.0]  # 0.13 of 6


def draw_results(labels, starts=(lens_results.EARLY,)):
    """Draws results over two texts, without ranks."""
    axes = {
        "start": [*starts],
        "network": [*labels],
        "direction": [*influence.DIRECTIONS],
        "position": [*influence.POSITIONS],
        "seed": np.arange(2),
    }
    draw, shape = np.random.default_rng(0), [len(values) for values in axes.values()]
    results = xr.Dataset(
        {name: ([*axes], draw.uniform(size=shape)) for name in lens_results.SUMMARIES}, axes
    )
    lengths = draw.uniform(size=(*shape, 3))
    for name in ("share", "size"):
        for kind in influence.KINDS:
            results[f"{name}_{kind}"] = ([*axes, "length"], lengths)
    results["from_layer"] = (("start", "network", "seed"), 2 * np.ones((*shape[:2], 2)))
    return results


def test_the_finding_is_of_trained_networks_and_later_tokens():
    """Means over texts, from the least to the largest of the networks."""
    labels = ("a", "b", "drawn at init")
    opened = [make_network(label, 8, is_initialised=" " in label) for label in labels]
    results = draw_results(labels, (0.5, lens_results.EARLY))
    finding = lens_results.make_finding(results, opened)
    chosen = results.sel(start=lens_results.EARLY, network=["a", "b"], **lens_results.PLACE)

    def order(name):
        return [f"{value:.2f}" for value in np.sort(chosen[name].mean("seed").values)]

    exact, frozen, cosine = map(order, ("mean_length_exact", "mean_length_frozen", "cosine"))
    assert finding.figure == "cosine" and finding.sentence == (
        "Of the influence on later tokens, parts of the exact Jacobian have mean lengths from "
        f"{exact[0]} to {exact[1]} attentions in 2 networks, frozen ones from {frozen[0]} to "
        f"{frozen[1]}. The cosine of the two sums is {cosine[0]} to {cosine[1]}."
    )
    assert lens_results.make_finding(results, opened[2:]) is None
    assert lens_results.make_finding(results.sel(start=[0.5]), opened) is None


def test_without_ranks_there_are_no_rows_lines_and_figure_of_them():
    results, opened = draw_results(("a",)), [make_network("a", 8)]
    table = list(lens_results.make_rows(results))
    assert len(table) == 12 + 36 and not any("rank" in row or "distance" in row for row in table)
    assert not any("rank" in c.quantity for c in lens_results.compare_results(results, opened))
    assert lens_figures.ranks_figure(results, opened) is None


def test_effective_ranks_are_means_over_the_texts_that_reach_the_distance():
    results, opened = draw_results(("a",)), [make_network("a", 8)]
    results = results.isel(seed=[0, 0, 1]).assign_coords(seed=range(3))
    ranks = np.array([[1.0, np.nan], [2.0, np.nan], [6.0, 5.0]])
    results["rank"] = (("start", "network", "seed", "distance"), ranks[None, None])
    results = results.assign_coords(distance=[0, 16])
    lines = [c for c in lens_results.compare_results(results, opened) if "rank" in c.quantity]
    assert [line.measured for line in lines] == [3.0, 5.0]
    assert [line.published for line in lines] == [opened[0].source.config.d_model] * 2
    (ax,) = lens_figures.ranks_figure(results, opened).axes
    width = opened[0].source.config.d_model
    assert_close(ax.lines[0].get_xydata(), [[0, 3 / width], [16, 5 / width]])


def test_curves_of_parts_leave_out_texts_without_a_number_and_lengths_beyond_the_depth():
    """At the first start, along a random direction to later tokens; exact beside frozen."""
    opened, draw = [make_network("a", 8)], np.random.default_rng(1)
    results = draw_results(("a",), (lens_results.EARLY, 0.5))
    for number, name in enumerate(("share", "size")):
        for kind in influence.KINDS:
            values = draw.uniform(size=results[f"{name}_{kind}"].shape)
            values[..., 1, :], values[..., 2] = np.nan, np.nan  # the second text; the last length
            results[f"{name}_{kind}"] = (results[f"{name}_{kind}"].dims, values)
        drawing = (lens_figures.shares_figure, lens_figures.sizes_figure)[number]
        (ax,) = (ax for ax in drawing(results, opened).axes if ax.lines)
        lines = {line.get_label(): line.get_xydata() for line in ax.lines}
        chosen = results.isel(start=0, seed=0).sel(network="a", **lens_results.PLACE)
        for kind in influence.KINDS:
            expected = chosen[f"{name}_{kind}"].values[:2]
            assert_close(lines[kind], [[0, expected[0]], [1, expected[1]]])


def test_more_networks_than_colours_have_dashed_lines():
    """Ranks over the width of each network, at the first start that has ranks."""
    labels = [f"network {index}" for index in range(len(figures.COLORS) + 2)]
    opened = [
        opened_networks.Network(
            label, SimpleNamespace(config=SimpleNamespace(d_model=index + 1)), {}, None
        )
        for index, label in enumerate(labels)
    ]
    results = draw_results(labels, (0.5, lens_results.EARLY))
    values = np.full((2, len(labels), 2, 2), np.nan)
    values[1] = np.arange(1, 3) * (np.arange(len(labels))[:, None, None] + 1)
    results["rank"] = (("start", "network", "seed", "distance"), values)
    (ax,) = lens_figures.ranks_figure(results.assign_coords(distance=[0, 4]), opened).axes
    dashes = [line.get_linestyle() for line in ax.lines]
    assert dashes == ["-"] * len(figures.COLORS) + ["--"] * 2
    for line in ax.lines:
        assert_close(line.get_xydata(), [[0, 1], [4, 2]])


def test_directions_without_a_number_have_no_curve():
    """Curves are by the layer of each start; the legend has each name once."""
    opened = [make_network("a", 8), make_network("b", 8)]
    results = draw_results(("a", "b"), (lens_results.EARLY, 0.5))
    results["cosine"] = results.cosine.where(
        (results.direction != "next") | (results.network == "b")
    )
    results["from_layer"] = results.from_layer * xr.DataArray([1, 2], {"start": results.start})
    fig = lens_figures.cosine_figure(results, opened)
    first, second = (
        [line for line in ax.lines if len(line.get_xdata()) == 2][:-1] for ax in fig.axes
    )
    names = [f"{d}, {p}" for d in influence.DIRECTIONS for p in influence.POSITIONS]
    assert [line.get_label() for line in second] == names
    assert [line.get_label() for line in first] == names[:4]
    assert [line.get_linestyle() for line in second] == ["--", "-"] * 3
    expected = results.cosine.sel(network="a", direction="state", position="later").mean("seed")
    assert_close(first[3].get_xydata(), np.stack([[2, 4], expected], axis=1))
    (legend,) = fig.legends
    assert [text.get_text() for text in legend.get_texts()] == names
