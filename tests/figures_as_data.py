"""Figures of runs inside tests: laid out once for every kind, and kept as a digest of their data.

Drawing is most of a tiny run's time, and says the same again of the same axes with other numbers.
So the first figure of a kind (titles, labels, legends, kinds of artists) is laid out, where its
texts are set, and every figure's files are the digest of all that it shows: equal figures are equal
files, and others not. As users see them, all are drawn by a test of the full suite.
"""

import hashlib
from typing import Any

import numpy as np

from rank_collapse.runs.drawn import OPTIONS


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


LAID_OUT = set()


def as_data(figure: Any) -> dict[str, bytes]:
    """Stands in for `runs.drawn.draw_files`."""
    words, content = tuple(_words(figure)), digest(figure)
    if words not in LAID_OUT:
        figure.draw_without_rendering()
    LAID_OUT.add(words)
    return {suffix: suffix.encode() + content for suffix in OPTIONS}
