"""What a figure shows: its titles, and the edges of a band."""

from rank_collapse.report import figures


def new_axes():
    return figures.figure()[1][0, 0]


def edges_of(ax):
    """Returns (lower, upper) edge of a band by its horizontal place."""
    vertices = ax.collections[0].get_paths()[0].vertices
    by_place = {}
    for x, y in vertices:
        by_place.setdefault(float(x), []).append(float(y))
    return {x: (min(ys), max(ys)) for x, ys in by_place.items()}


def titles(fig):
    return [ax.get_title() for ax in fig.axes if ax.get_visible()]
