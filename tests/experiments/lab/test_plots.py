"""Where panels of experiments' figures lie."""

from experiments.lab import plots


def test_panels_lie_where_their_places_say():
    _, axes, panels = plots.place_grid([("b", 2), ("a", 2), ("b", 1)])
    assert axes.shape == (2, 2)
    assert panels == [axes[0, 0], axes[1, 0], axes[0, 1]]  # as they come first, not sorted
