"""The figure of a depth report."""

import numpy as np

from rank_collapse.report.depth import PANELS, depth_figure
from tests.oracles.depth_reports import DEPTH, ONE_TEXT
from tests.support.closeness import assert_close

LAW = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])


def test_a_depth_report_has_a_panel_each_the_last_layer_at_the_right():
    depth, rng = 2, np.random.default_rng(0)
    state_measures = {"residual_ratio", "spike_share", "loss_up_to", "lens_kl", "frozen_kl"}
    names = {name for curves, _, _ in PANELS.values() for name in curves} - {"mlp_cosine"}
    measures = {n: rng.uniform(0.1, 1, (3, depth + (n in state_measures))) for n in names}
    later = np.zeros((3, depth, depth))
    later[:, 0, 1] = 1, 2, 6
    fig = depth_figure(measures | {"later": later}, {"norms": LAW}, 2)
    axes = dict(zip(PANELS, fig.axes, strict=False))
    for title, (curves, ylabel, logarithmic) in PANELS.items():
        ax, shown = axes[title], [name for name in curves if name in measures]
        assert (ax.get_title(), ax.get_ylabel()) == (title, ylabel)
        assert ax.get_yscale() == ("log" if logarithmic else "linear")
        for line, name in zip(ax.lines, shown, strict=True):
            assert line.get_label() == curves[name]
            first = 0 if name in state_measures else 1
            np.testing.assert_array_equal(line.get_xdata(), range(first, depth + 1))
            assert_close(line.get_ydata(), measures[name].mean(axis=0))
    assert axes["loss"].get_xlabel() == "layer, or path length k"
    assert axes["attention"].get_xlabel() == "layer"
    assert sum(ax.get_visible() for ax in fig.axes) == len(PANELS) + 2 + 1  # and the colour bar
    mesh = fig.axes[len(PANELS)]
    shown = mesh.collections[0].get_array()
    assert shown[0, 1] == 3 and np.ma.getmaskarray(shown).sum() == 3
    assert_close(mesh.collections[0].get_coordinates()[0, :, 0], [0.5, 1.5, 2.5])
    assert mesh.yaxis_inverted() and mesh.get_ylabel() == "layer that is left out"
    assert (mesh.get_title(), mesh.get_xlabel()) == ("change of later layers", "later layer")
    assert mesh.collections[0].get_clim() == (0, 3)
    for ax in fig.axes[: len(PANELS) + 2]:
        assert all(tick == round(tick) for tick in ax.get_xticks()), ax.get_title()
    assert list(fig.axes[len(PANELS) + 1].lines[-1].get_xdata()) == [2, 2]


def test_a_figure_of_depth_has_values_at_their_layers():
    """A curve of L + 1 numbers begins at layer 0 and one of L at layer 1; both end at L."""
    panels = {ax.get_title(): ax for ax in DEPTH.figure().axes}
    lens, error = (panels[t].get_lines()[0] for t in ("logit lens", "without the layer"))
    assert lens.get_xdata().tolist() == [0, 1, 2, 3] and error.get_xdata().tolist() == [1, 2, 3]
    np.testing.assert_array_equal(error.get_ydata(), ONE_TEXT[0, 1:])
    assert [line.get_xdata()[-1] for line in panels["loss"].get_lines()] == [3, 3]
    assert panels["loss"].get_xlabel() == "layer, or path length k"
    assert panels["logit lens"].get_xlabel() == "layer"
    np.testing.assert_array_equal(DEPTH.by_layer()["error"], [np.nan, *ONE_TEXT[0, 1:]])
