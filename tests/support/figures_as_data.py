"""Figures of runs in tests: each kind is laid out once, and files say what the figure shows.

Drawing is most of a tiny run's time, and says nothing new about equal axes with other numbers.
So only the first figure of a kind (titles, labels, legends, kinds of artists) is laid out, which
sets its texts. The PNG of a figure is the text of all that it shows, which golden files keep, and
its PDF is the digest of the same numbers to the bit: equal figures have equal files, and others do
not. A test of the full suite draws all figures as users see them.
"""

import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from rank_collapse.runs.drawn import OPTIONS
from tests.support.golden import format_numbers


def _words(figure: Any) -> list[str]:
    """Lists the figure's texts and the kinds of its artists."""
    words = [type(figure).__name__, figure.get_suptitle()]
    for ax in figure.axes:
        words += [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()]
        words += [ax.get_yscale(), *sorted({type(a).__name__ for a in ax.get_children()})]
        legend = ax.get_legend()
        words += [t.get_text() for t in legend.get_texts()] if legend else []
    return words


def _artists(ax: Any) -> Iterator[tuple[str, Any]]:
    """Yields (style in words, array) of every artist that shows numbers."""
    yield "limits x", ax.get_xlim()
    yield "limits y", ax.get_ylim()
    for line in ax.lines:
        style = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_marker()}"
        label = line.get_label()
        yield f"line {'' if label.startswith('_') else label!r} {style}", line.get_xydata()
    for collection in ax.collections:
        is_mapped = collection.get_array() is not None  # then colours are set when it is drawn
        colors = " ".join(map(to_hex, [] if is_mapped else collection.get_facecolor()[:1]))
        kind = f"{type(collection).__name__} {colors}".strip()
        yield f"{kind} offsets", collection.get_offsets()
        paths = [path.vertices for path in collection.get_paths()]
        yield f"{kind} {len(paths)} paths", np.concatenate([*paths, np.empty((0, 2))])
        if is_mapped:
            yield f"{kind} array", collection.get_array()
    for patch in ax.patches:
        vertices = patch.get_transform().transform(patch.get_path().vertices)
        if patch.get_transform().contains_branch(ax.transData):
            vertices = ax.transData.inverted().transform(vertices)
        yield f"{type(patch).__name__} {to_hex(patch.get_facecolor())}", vertices
    for image in ax.images:
        yield f"image {image.get_cmap().name} limits", image.get_clim()
        yield "image", image.get_array()
    for text in ax.texts:
        yield f"text {text.get_text()!r}", text.get_position()


def _as_floats(values: Any) -> np.ndarray:
    return np.ma.filled(np.ma.asarray(values, float), np.nan)


def digest(figure: Any) -> bytes:
    """Computes the SHA-256 of all that a figure shows."""
    checksum = hashlib.sha256("\n".join(_words(figure)).encode())
    for ax in figure.axes:
        for style, values in _artists(ax):
            checksum.update(style.encode() + _as_floats(values).tobytes())
    return checksum.digest()


def _describe_scale(axis: Any) -> str:
    """Names a scale, with its base unless it is 10, and with the end of the linear part."""
    transform, words = axis.get_transform(), [axis.get_scale()]
    if getattr(transform, "base", 10) != 10:
        words.append(f"base {transform.base:g}")
    if hasattr(transform, "linthresh"):
        words.append(f"linear to {transform.linthresh:g}")
    return " ".join(words)


def describe(figure: Any) -> str:
    """Writes all that a figure shows as text: titles, axes, legends, and the data of artists."""
    lines = [f"figure {figure.get_suptitle()!r}"]
    for ax in figure.axes:
        if not ax.get_visible():
            continue
        lines.append(f"axes {ax.get_title()!r}")
        lines.append(f"x {_describe_scale(ax.xaxis)} {ax.get_xlabel()!r}")
        lines.append(f"y {_describe_scale(ax.yaxis)} {ax.get_ylabel()!r}")
        for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
            if type(axis.get_major_formatter()).__name__ in ("FixedFormatter", "FuncFormatter"):
                ticks = [t.get_text() for t in axis.get_ticklabels()]
                lines.append(f"ticks {name} {ticks}")
        if legend := ax.get_legend():
            entries = [text.get_text() for text in legend.get_texts()]
            lines.append(f"legend {legend.get_title().get_text()!r} {entries}")
        for style, values in _artists(ax):
            lines.append(f"{style}: {format_numbers(_as_floats(values))}")
    for legend in figure.legends:
        lines.append(f"legend {[text.get_text() for text in legend.get_texts()]}")
    return "\n".join(lines) + "\n"


LAID_OUT = set()


def as_data(figure: Any, suffixes: Collection[str] = tuple(OPTIONS)) -> dict[str, bytes]:
    """Stands in for `runs.drawn.draw_files`."""
    words, content = tuple(_words(figure)), digest(figure)
    if words not in LAID_OUT:
        figure.draw_without_rendering()
    LAID_OUT.add(words)
    files = {".png": describe(figure).encode(), ".pdf": b".pdf" + content}
    return {suffix: files[suffix] for suffix in suffixes}
