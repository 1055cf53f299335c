"""The figure of a coordinate check: quantities over depth, step by step."""

from collections.abc import Mapping, Sequence
from typing import Any

from rank_collapse.report import figures


@figures.styled
def coordinates_figure(
    checks: Mapping[str, Mapping[str, Any]],
    depths: Sequence[int],
    widths: Sequence[int],
    meaning: Mapping[str, str],
) -> figures.Figure:
    """A row of panels for each check: quantities over depth, both logarithmic, over seeds the
    geometric mean and a deviation; steps from dark to light, widths by their dashes.

    Args:
        checks: {title: {quantity: [widths, depths, seeds, steps]}}.
        depths, widths: The axes; no widths where these were not varied.
        meaning: {quantity: what its panel says}.
    """
    places = [(title, name) for title, own in checks.items() for name in own]
    fig, axes, own = figures.grid(places, width=2.6, height=2.3)
    for ax, (title, name) in zip(own, places, strict=True):
        values = checks[title][name]
        steps = values.shape[-1]
        for step, shade in enumerate(figures.shades(steps)):
            for index, by_depth in enumerate(values[..., step]):
                label = f"step {step + 1}" if step in (0, steps - 1) and not index else None
                style = {"color": shade, "linestyle": ("-", "--", ":", "-.")[index % 4]}
                figures.log_band(ax, depths, by_depth.T, label, **style)
        ax.set_xscale("log")
        ax.set_xticks(depths, labels=map(str, depths), minor=False)
        ax.set_xticks([], minor=True)
        ax.set_yscale("log")
        ax.set_title("\n".join(filter(None, (title, name.replace("_", " ")))))
        ax.set_ylabel(meaning.get(name, name), fontsize=7)
    if widths:
        fig.suptitle(f"widths {', '.join(map(str, widths))}: solid, dashed, dotted, in this order")
    axes[0, 0].legend()
    figures.outer_labels(axes, "layers L")
    return fig
