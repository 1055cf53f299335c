"""What run_architectures says in the report: residual ratios beside the published curves."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.architectures.results import NAMES
from experiments.shell.paper import said
from rank_collapse.network.surgery import VARIANTS, variants_of
from rank_collapse.report.claims import ABOVE_ZERO, MOST, Claim, of_curve, test_mean
from rank_collapse.report.page import Comparison

READ_OFF = 1e-3  # to which the published curves could be read off the figures
FEWEST_DRAWS = 20  # with which one curve in twenty can be shown to be no draw


def compare(summary: Mapping[str, Any]) -> list[Comparison]:
    """Residual ratios beside the published ones, at layer 1 and at the last."""
    rows = []
    for label, model in summary.items():
        for kind, means in model["means"].items():
            published = model["published"].get(kind)
            for variant, surgery in variants_of(model["family"]):
                ours = means.get(f"residuals/{variant}/{surgery}/residual_ratio")
                spread = model["ranges"][kind].get(f"{variant}/{surgery}")
                text = ", as the text says" if surgery == "text" else ""
                for layer in () if ours is None else (1, len(ours) - 1):
                    what = f"{label}, {NAMES[kind]}, {variant}{text}: residual ratio, layer {layer}"
                    theirs = published[variant][layer] if published else None
                    low, high = spread[0][layer], spread[1][layer]
                    note = f"{low:.4g} to {high:.4g} over seeds" if low < high else ""
                    rows.append(Comparison(what, ours[layer], theirs, note))
            if "lengths/size" in means:
                rows.append(
                    Comparison(
                        f"{label}, {NAMES[kind]}: error of the sum over all paths",
                        max(np.atleast_1d(means["lengths/error"]).tolist()), 0.0,
                        f"(1+{model['heads']})^{model['depth']} paths, relative to the output",
                    )
                )  # fmt: skip
    return rows


def claims(summary: Mapping[str, Any]) -> list[Claim]:
    """The published curves against ours at initialisation, and what the curves are to show.

    A checkpoint is one network, of which nothing can be said with an interval.
    """
    found = []
    for label, model in summary.items():
        curves, published = model["curves"].get("init", {}), model["published"].get("init", {})
        for variant in curves:
            if variant in published:
                found.append(
                    of_curve(
                        published[variant], curves[variant], READ_OFF,
                        statistic="standard deviations from the mean of all curves at the layer "
                        "farthest from it; 0 to the farthest of our initialisations",
                        null="farther than every initialisation",
                        **said("curves", f"{label} at initialisation, {variant}"),
                    )
                )  # fmt: skip
        if {"SAN", "SAN+skip"} <= curves.keys():
            san, skip = np.array(curves["SAN"]), np.array(curves["SAN+skip"])
            half = (skip.shape[1] - 1) // 2
            fall = np.log10(skip[:, -1] / skip[:, half]) / (skip.shape[1] - 1 - half)
            where = f"{label} at initialisation"
            found += [
                test_mean(
                    (1 - san[:, -1] / san[:, 0]).tolist(), MOST, null="half or less",
                    statistic="share of the input's residual ratio that SAN has lost after the "
                    "last layer", **said("collapse", where),
                ),
                test_mean(
                    (skip[:, -1] - san[:, -1]).tolist(), ABOVE_ZERO, null="0",
                    statistic="residual ratio after the last layer, SAN+skip less SAN",
                    **said("skips", where),
                ),
                test_mean(
                    fall.tolist(), (-1e-12, math.inf), null="below 0: it goes on falling",
                    statistic="change of log10 of SAN+skip's residual ratio in a layer, over the "
                    "second half", **said("skips stop", where),
                ),
            ]  # fmt: skip
    return found


def reading(summary: Mapping[str, Any]) -> str:
    """What the numbers say against the paper, in a sentence or two."""
    said = []
    for label, model in summary.items():
        for kind, means in model["means"].items():
            curves = {v: means.get(f"residuals/{v}/published/residual_ratio") for v in VARIANTS}
            if curves["SAN"] is None:
                continue
            below = next((l for l, r in enumerate(curves["SAN"]) if r < 0.01), None)
            depth = "never" if below is None else f"at layer {below}"
            text = (
                f"{label} ({NAMES[kind]}): SAN falls below 0.01 {depth}; after the last layer "
                f"SAN+skip keeps {curves['SAN+skip'][-1]:.2g} and the Transformer "
                f"{curves['Transformer'][-1]:.2g}"
            )
            if "lengths/cosine_up_to" in means:
                close = np.array(means["lengths/cosine_up_to"])
                enough = int(np.argmax(close > 0.99))
                text += (
                    f"; paths of length up to {enough} give the output to a cosine of "
                    f"{close[enough]:.3f}"
                )
            depths = model.get("depths", {}).get(kind, {})
            if "same loss" in depths:
                text += (
                    f", up to {depths['same next token']} the same next token and up to "
                    f"{depths['same loss']} the same loss"
                )
            said.append(text)
    return ". ".join(said) + "."
