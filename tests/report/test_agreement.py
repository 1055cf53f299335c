"""The figure of two runs: a panel for each part, gaps where numbers are the same, the fault."""

import numpy as np

from rank_collapse.report.agreement import agreement_figure

COLUMNS = {
    "layer": np.array([2, 2, 5, 5]),
    "part": np.array(["attention", "mlp"] * 2),
    "error_in": np.array([0.0, 1e-7, 2e-7, 3e-7]),
    "predicted": np.array([1e-7, 1e-7, 2e-7, 2e-7]),
    "added": np.array([1e-7, 2e-7, 3e-3, 4e-7]),
}


def read_lines(ax):
    return {line.get_label(): np.asarray(line.get_ydata()) for line in ax.lines}


def test_each_part_has_a_panel_with_its_rows():
    attention, mlp = agreement_figure(COLUMNS, (5, "attention")).axes[:2]
    assert (attention.get_title(), mlp.get_title()) == ("attention", "MLP")
    np.testing.assert_array_equal(read_lines(mlp)["comes in"], [1e-7, 3e-7])
    np.testing.assert_array_equal(read_lines(attention)["comes in"], [np.nan, 2e-7])
    np.testing.assert_array_equal(read_lines(attention)["the sublayer adds"], [1e-7, 3e-3])
    np.testing.assert_array_equal(read_lines(mlp)["rounding explains"], [1e-7, 2e-7])
    assert "the runs part" in read_lines(attention) and "the runs part" not in read_lines(mlp)
    assert attention.get_yscale() == mlp.get_yscale() == "log"
    assert attention.get_xlabel() == mlp.get_xlabel() == "layer"
    assert attention.get_ylabel() == "relative error, median over tokens" and not mlp.get_ylabel()
    for ax in (attention, mlp):
        assert all(list(line.get_xdata()) == [2, 5] for line in ax.lines[:3])
    legend = [text.get_text() for text in attention.get_legend().get_texts()]
    assert legend == ["comes in", "rounding explains", "the sublayer adds", "the runs part"]
    styles = [line.get_linestyle() for line in attention.lines]
    assert styles == [":", "--", "-", "-."] and list(attention.lines[3].get_xdata()) == [5, 5]
    assert len({line.get_color() for line in attention.lines}) == 4
    assert len({line.get_marker() for line in mlp.lines}) == 3
    assert attention.get_shared_y_axes().joined(attention, mlp)
    assert tuple(attention.figure.get_size_inches()) == (8, 3)


def test_without_a_fault_nothing_is_marked():
    assert all("the runs part" not in read_lines(ax) for ax in agreement_figure(COLUMNS).axes)


def test_states_alone_have_one_panel():
    columns = {name: array[:2] for name, array in COLUMNS.items()} | {"part": ["layer"] * 2}
    (ax,) = agreement_figure(columns, (2, "layer")).axes
    assert ax.get_title() == "state after the layer" and "the runs part" in read_lines(ax)
