"""The figure of profiles: measures of hidden states by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rank_collapse.report import figures


@figures.styled
def plot(profile: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> figures.Figure:
    """A panel per measure: its value by layer; of a batch the mean over examples and a deviation.

    `rc.plot(rc.profile(trace)).savefig("profile.png")`. Several profiles share the panels:
    `rc.plot({"trained": p, "random": q})`. Logarithmic where values span more than a decade;
    layers whose residual is decided by rounding (`Profile.rounding`) in any of them are shaded.

    Args:
        profile: {measure: [l] or [l, b]}, from `rc.profile`; or several, as a list or by label.

    Raises:
        ValueError: No measure, arrays that are not [l] or [l, b], or a `Profile` whose axis of
            layers is not known.
    """
    labelled = profile.items() if isinstance(profile, Mapping) else enumerate(profile)
    given: dict[Any, Any] = {str(label): one for label, one in labelled}
    if not all(isinstance(one, Mapping) for one in given.values()):
        given = {None: profile}
    panels: dict[str, list] = {}
    for place, (label, one) in enumerate(given.items()):
        for name, own in _by_layer(one).items():
            panels.setdefault(name, []).append((place, label, *own))
    if not panels:
        raise ValueError(f"profile={profile!r} has no measures by layer")
    fig, axes = figures.panels(len(panels), 3)
    for index, (ax, (name, shown)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        for place, label, values, rounded in shown:
            color = index if label is None else place
            figures.band(ax, np.arange(len(values)), values.T, label, color)
            for layer in np.flatnonzero(rounded):
                ax.axvspan(layer - 0.5, layer + 0.5, color="#E3E3E3", linewidth=0)
        values = np.concatenate([values.ravel() for _, _, values, _ in shown])
        positive = values[np.isfinite(values) & (values > 0)]
        if not np.any(values < 0) and positive.max(initial=0) > 10 * positive.min(initial=np.inf):
            ax.set_yscale("log")
        ax.set_xlabel("layer")
        ax.set_ylabel(name.replace("_", " "))
    figures.integer_ticks(*axes.flat)
    if len(given) > 1:
        axes[0, 0].legend()
    return fig


def _by_layer(profile):
    """{measure: (values [l, b], Bool [l], whether rounding decides any of the layer's)}."""
    arrays = {name: np.asarray(_on_host(a), float) for name, a in profile.items()}
    if not arrays or {a.ndim for a in arrays.values()} - {1, 2}:
        shapes = {name: a.shape for name, a in arrays.items()}
        raise ValueError(f"profile={shapes} has no measures by layer, each [l] or [l, b]")
    axis, rounding = getattr(profile, "layer_axis", 0), getattr(profile, "rounding", None)
    rounded = () if rounding is None else _rows(_on_host(rounding), axis).any(axis=1)
    return {name: (_rows(a, axis), rounded) for name, a in arrays.items()}


def _on_host(a):
    """A tensor of torch as NumPy's array, without its derivative; others as they are."""
    return a.detach().cpu().numpy() if hasattr(a, "detach") else a


def _rows(a, axis):
    return np.moveaxis(a, axis, 0).reshape(np.shape(a)[axis], -1)
