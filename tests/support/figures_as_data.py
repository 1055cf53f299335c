"""Figures of runs in tests: each kind is laid out once, and files are digests of the data.

Drawing is most of a tiny run's time, and says nothing new about equal axes with other numbers.
So only the first figure of a kind (titles, labels, legends, kinds of artists) is laid out, which
sets its texts. The files of every figure are the digest of all that it shows: equal figures have
equal files, and others do not. A test of the full suite draws all figures as users see them.
"""

import hashlib
from typing import Any

import numpy as np

from rank_collapse.runs.drawn import OPTIONS


def _words(figure: Any) -> list[str]:
    """Lists the figure's texts and the kinds of its artists."""
    words = [type(figure).__name__, figure.get_suptitle()]
    for ax in figure.axes:
        words += [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()]
        words += [ax.get_yscale(), *sorted({type(a).__name__ for a in ax.get_children()})]
        legend = ax.get_legend()
        words += [t.get_text() for t in legend.get_texts()] if legend else []
    return words


def _numbers(figure: Any) -> Any:
    """Yields every array that the figure shows."""
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
    """Computes the SHA-256 of all that a figure shows."""
    checksum = hashlib.sha256("\n".join(_words(figure)).encode())
    for ax in figure.axes:
        checksum.update("\n".join(t.get_text() for t in ax.texts).encode())
    for values in _numbers(figure):
        checksum.update(np.ma.filled(np.ma.asarray(values, float), np.nan).tobytes())
    return checksum.digest()


LAID_OUT = set()


def as_data(figure: Any) -> dict[str, bytes]:
    """Stands in for `runs.drawn.draw_files`."""
    words, content = tuple(_words(figure)), digest(figure)
    if words not in LAID_OUT:
        figure.draw_without_rendering()
    LAID_OUT.add(words)
    return {suffix: suffix.encode() + content for suffix in OPTIONS}
