"""Files of figures: the same each time, and refused without matplotlib."""

import sys

import numpy as np
from matplotlib.figure import Figure

from rank_collapse.extras import MissingPackage
from rank_collapse.runs import drawn
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


def test_a_figure_is_drawn_alike_each_time_with_text_as_text():
    figure = Figure(figsize=(1, 1), layout="constrained")
    figure.text(0.1, 0.1, "x")
    figure.text(0.8, 0.9, "y")
    first = drawn.draw_files(figure)
    width, height = np.frombuffer(first[".png"][16:24], ">u4")
    box = figure.get_tightbbox().padded(0.1)
    assert_close([width, height], [box.width * 150, box.height * 150], atol=1)
    assert first[".pdf"].startswith(b"%PDF") and b"CreationDate" not in first[".pdf"]
    assert b"/Type3" not in first[".pdf"] and b"/CIDFontType2" in first[".pdf"]
    assert drawn.draw_files(figure) == first and figure.get_layout_engine() is None
    assert drawn.draw_files(figure, [".png"]) == {".png": first[".png"]}


def test_figures_without_matplotlib_are_refused_with_what_works(monkeypatch):
    drawn.check_drawing("--out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"^--out needs matplotlib, .*\(the extra 'report'\); leave it out$"
    is_refused(message, drawn.check_drawing, "--out", "leave it out", error=MissingPackage)
