"""Draws a figure of matplotlib as files: PNG to look at, PDF for a paper."""

import io
from collections.abc import Collection

from rank_collapse.extras import import_package

OPTIONS = {".png": {"dpi": 150}, ".pdf": {"metadata": {"CreationDate": None}}}
_MARGIN = 0.1  # inches


def draw_files(figure: object, suffixes: Collection[str] = tuple(OPTIONS)) -> dict[str, bytes]:
    """Draw a figure as {".png": its bytes, ".pdf": its bytes}, the same each time.

    The layout, half of the work, is done once for both; the figure keeps it.

    Args:
        figure: Figure of matplotlib.
        suffixes: Endings of the files to draw.
    """
    import matplotlib as mpl  # here: reading trained models does without

    figure.draw_without_rendering()
    box, files = figure.get_tightbbox().padded(_MARGIN), {}
    # No engine at all: with that of a finished layout every file is drawn twice. Text stays text.
    options_once = {
        "figure.autolayout": False,
        "figure.constrained_layout.use": False,
        "pdf.fonttype": 42,
    }
    with mpl.rc_context(options_once):
        figure.set_layout_engine(None)
        for suffix in suffixes:
            stream = io.BytesIO()
            figure.savefig(stream, format=suffix[1:], bbox_inches=box, **OPTIONS[suffix])
            files[suffix] = stream.getvalue()
    return files


def check_drawing(purpose: str, instead: str = "") -> None:
    """Check that figures can be drawn here.

    Args:
        purpose: Name of the feature that needs figures, for the message.
        instead: Description of an alternative without figures.

    Raises:
        MissingPackage: Without matplotlib.
    """
    import_package("matplotlib", purpose, "report", instead)
