"""The figure of path lengths."""

import numpy as np

from rank_collapse.report.path_lengths import path_length_figure, plot_length_laws
from tests.support.closeness import assert_close
from tests.support.shown_figures import new_axes

LAW = np.array([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3]])


def test_path_lengths_begin_at_0_and_the_needed_one_is_dashed():
    ax = new_axes()
    plot_length_laws(ax, {"norms": LAW, "losses": LAW[:1]}, 0)
    norms, losses, needed = ax.lines
    assert_close(norms.get_xydata(), [[0, 0.3], [1, 0.4], [2, 0.3]])
    assert_close(losses.get_ydata(), LAW[0])
    assert norms.get_color() != losses.get_color() and norms.get_label() == "norms"
    assert list(needed.get_xdata()) == [0, 0] and needed.get_linestyle() == "--"
    assert (ax.get_title(), ax.get_ylabel()) == ("how long are the paths?", "share of paths")
    assert ax.get_ylim()[0] == 0 and ax.get_xlabel() == "path length: number of heads"
    assert [t.get_text() for t in ax.get_legend().get_texts()][-1] == "the loss needs"
    assert len(path_length_figure({"norms": LAW}).axes[0].lines) == 1
