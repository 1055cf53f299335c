"""The figure of profiles: measures of hidden states by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rank_collapse.checks import refuse_if
from rank_collapse.measures.profiles import Profile
from rank_collapse.report import figures


@figures.styled
def plot(
    profile: Profile | Mapping[str, Any] | Sequence[Profile | Mapping[str, Any]],
) -> figures.Figure:
    """Plot a panel for each measure, with its value by layer; for a batch, its mean and deviation.

    `rc.plot(rc.profile(trace)).savefig("profile.png")`. Several profiles share the panels:
    `rc.plot({"trained": p, "random": q})`. Axes are logarithmic where values span more than a
    decade. Layers in which rounding decides the residual of any profile (`Profile.rounding`) are
    shaded.

    Args:
        profile: Profile from `rc.profile`, or {measure: [l] or [l, b]}; or several profiles, as a
            list or by label.

    Raises:
        ValueError: No measure, or arrays that are not [l] or [l, b].
    """
    profiles = _label_profiles(profile)
    panels: dict[str, list] = {}
    for place, (label, entry) in enumerate(profiles.items()):
        for name, curve in _by_layer(entry).items():
            panels.setdefault(name, []).append((place, label, *curve))
    if not panels:
        raise ValueError(f"profile={profile!r} has no measures by layer")
    fig, axes = figures.panels(len(panels), 3)
    for index, (ax, (name, curves)) in enumerate(zip(axes.flat, panels.items(), strict=False)):
        for place, label, values, rounded in curves:
            color = index if label is None else place
            figures.band(ax, np.arange(len(values)), values.T, label, color)
            for layer in np.flatnonzero(rounded):
                ax.axvspan(layer - 0.5, layer + 0.5, color=figures.LIGHT_GREY, linewidth=0)
        values = np.concatenate([values.ravel() for _, _, values, _ in curves])
        positive = values[np.isfinite(values) & (values > 0)]
        if not np.any(values < 0) and positive.max(initial=0) > 10 * positive.min(initial=np.inf):
            ax.set_yscale("log")
        ax.set_xlabel("layer")
        ax.set_ylabel(name.replace("_", " "))
    figures.integer_ticks(*axes.flat)
    if len(profiles) > 1:
        axes[0, 0].legend()
    return fig


def _label_profiles(profile):
    """Returns {label: `Profile`}; one profile has no label."""
    if isinstance(profile, Profile):
        return {None: profile}
    if not isinstance(profile, Mapping):
        profile = dict(enumerate(profile))
    kinds = [isinstance(one, Profile | Mapping) for one in profile.values()]
    if not all(kinds):
        return {None: Profile(profile)}
    return {
        str(label): one if isinstance(one, Profile) else Profile(one)
        for label, one in profile.items()
    }


def _by_layer(profile):
    """Returns {measure: (values [l, b], Bool [l], whether rounding decides any of the layer's)}."""
    refuse_if(not profile.measures, f"{profile} has no measures by layer, each [l] or [l, b]")
    _, columns = profile.columns()
    rows = {name: a.reshape(len(a), -1) for name, a in columns.items()}
    rounded = rows["rounding"].any(axis=1) if "rounding" in rows else ()
    return {name: (rows[name].astype(float), rounded) for name in profile.measures}
