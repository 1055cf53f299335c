"""run_architectures' part of the report: residual ratios beside the published curves."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.architectures.results import NAMES
from experiments.shell.entry import Entry
from rank_collapse import pretrained
from rank_collapse.network.surgery import VARIANTS
from rank_collapse.report.page import Comparison


def compare(summary: Mapping[str, Any]) -> list[Comparison]:
    """Residual ratios beside the published ones, and what the paths say."""
    rows = []
    for label, model in summary.items():
        for kind, means in model["means"].items():
            published = model["published"].get(kind)
            for variant in VARIANTS:
                ours = means.get(f"residuals/{variant}/published/residual_ratio")
                if ours is not None:
                    rows += _variant_rows(label, kind, variant, ours, published)
            if "lengths/size" in means:
                rows.append(
                    Comparison(
                        f"{label}, {NAMES[kind]}: error of the sum over all paths",
                        max(np.atleast_1d(means["lengths/error"]).tolist()),
                        0.0,
                        bool(np.max(means["lengths/error"]) < 1e-5),
                        f"(1+{model['heads']})^{model['depth']} paths, relative to the output",
                    )
                )
    return rows


def _variant_rows(label, kind, variant, ours, published):
    """Layer 1 and the last layer; collapse means below 0.01, as in the published figure."""
    rows = []
    for layer in (1, len(ours) - 1):
        theirs = published[variant][layer] if published else None
        agrees = None
        if theirs is not None:
            agrees = (ours[layer] < 0.01) == (theirs < 0.01) or abs(ours[layer] - theirs) < 0.1
        note = "agrees: both or neither below 0.01, or within 0.1" if published else ""
        what = f"{label}, {NAMES[kind]}, {variant}: residual ratio, layer {layer}"
        rows.append(Comparison(what, ours[layer], theirs, agrees, note))
    return rows


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
            said.append(text)
    return ". ".join(said) + "."


ENTRY = Entry(
    title="BERT, ALBERT and XLNet at initialisation",
    claim="Attention without skips and MLPs loses rank within a few layers in all three "
    "architectures; skips prevent it, and MLPs alone slow it at most (published figures of the "
    "relative residual by layer; unseeded initialisations, other texts).",
    presets={
        "quick": ("--num_texts=8", "--max_tokens=64", "--parts=residuals"),
        "paper": ("--num_seeds=4",),
    },
    compare=compare,
    reading=reading,
    captions={
        f"residuals_{name}": f"{name} at initialisation: relative residual by layer, mean ± one "
        "standard deviation over texts; the published curves in grey."
        for name in pretrained.PUBLISHED
    },
)
