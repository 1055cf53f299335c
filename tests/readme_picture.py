"""Draws docs/skip_gain.png from the README's own example: `python tests/readme_picture.py`."""

import re
from pathlib import Path

import numpy as np

from rank_collapse.report import figures

REPOSITORY = Path(__file__).resolve().parent.parent
SWEEP = re.compile(r"<!-- test: sweep -->\n```python\n(.*?)```", re.DOTALL)


@figures.styled
def picture(gains, curves):
    """Residual ratio by layer, a curve for each gain of the skip."""
    fig, axes = figures.figure(width=6.5, height=3.2)
    ax = axes[0, 0]
    for index, (gain, curve) in enumerate(zip(gains, curves, strict=True)):
        curve = np.asarray(curve)
        shown = np.where(curve > 1e-7, curve, np.nan)  # float32 sees no smaller residual
        figures.band(ax, np.arange(len(curve)), shown[None], f"skip gain {gain:g}", index)
    ax.set(yscale="log", xlabel="layer", ylabel="‖res(X)‖₁,∞ / ‖X‖₁,∞")
    ax.legend()
    figures.integer_ticks(ax)
    return fig


if __name__ == "__main__":
    scope = {}
    exec(SWEEP.search((REPOSITORY / "README.md").read_text("utf-8"))[1], scope)
    fig = picture(scope["gains"], scope["curves"])
    fig.savefig(REPOSITORY / "docs" / "skip_gain.png", dpi=150, bbox_inches="tight")
