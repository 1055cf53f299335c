"""Figures of runs inside tests: drawn once for every layout, after that as a digest of their data.

Drawing is most of a tiny run's time, and says the same again of the same axes with other numbers.
So the first figure of a layout (titles, labels, legends, kinds of artists) is drawn as users see
it, and any other is the digest of all that it shows: equal figures are equal files, and others not.
"""

import hashlib
from typing import Any

import numpy as np


def _words(figure: Any) -> list[str]:
    """What the figure says, and the kinds of artists that it has."""
    words = [type(figure).__name__, figure.get_suptitle()]
    for ax in figure.axes:
        words += [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()]
        words += [ax.get_yscale(), *sorted({type(a).__name__ for a in ax.get_children()})]
        legend = ax.get_legend()
        words += [t.get_text() for t in legend.get_texts()] if legend else []
    return words


def _numbers(figure: Any) -> Any:
    """Every array that the figure shows."""
    for ax in figure.axes:
        yield from (ax.get_xlim(), ax.get_ylim())
        for line in ax.lines:
            yield line.get_xydata()
        for collection in ax.collections:
            yield collection.get_offsets()
            yield from (path.vertices for path in collection.get_paths())
            if collection.get_array() is not None:
                yield collection.get_array()
        for patch in ax.patches:
            yield patch.get_transform().transform(patch.get_path().vertices)
        yield from (image.get_array() for image in ax.images)
        yield from (text.get_position() for text in ax.texts)


def digest(figure: Any) -> bytes:
    """SHA-256 of all that a figure shows."""
    sums = hashlib.sha256("\n".join(_words(figure)).encode())
    for ax in figure.axes:
        sums.update("\n".join(t.get_text() for t in ax.texts).encode())
    for values in _numbers(figure):
        sums.update(np.ma.filled(np.ma.asarray(values, float), np.nan).tobytes())
    return sums.digest()


class FiguresAsData:
    """Stands in for `runs.drawn.drawn`."""

    def __init__(self, drawn: Any):
        """Draws by `drawn`, the first time."""
        self.drawn, self.layouts, self.files = drawn, set(), {}

    def __call__(self, figure: Any) -> dict[str, bytes]:
        """The figure's files: as users see them, or its digest."""
        layout, content = tuple(_words(figure)), digest(figure)
        if content not in self.files:
            if layout in self.layouts:
                self.files[content] = {s: s.encode() + content for s in (".png", ".pdf")}
            else:
                self.files[content] = self.drawn(figure)
        self.layouts.add(layout)
        return self.files[content]
