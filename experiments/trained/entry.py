"""How the trained experiments stand in the report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison


def make_entry(title: str, quick: Sequence[str], paper: Sequence[str]) -> Entry:
    """The entry of one trained experiment."""
    return Entry(
        title=title,
        claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the "
        "whole model's accuracy, and the accuracy of a path falls with its length.",
        presets={"quick": quick, "paper": paper},
        compare=compare,
        reading=reading,
        captions={
            "paths": "Accuracy by path length: sampled sets (error bars: seeds and repeats), the "
            "exact sum over all paths of a length and up to a length (bands: seeds), levels "
            "measured here and published.",
            "loss": "Training loss, mean and standard deviation over seeds.",
        },
    )


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Whole model and baseline beside the values the published plotting code holds."""
    whole = summary["whole"][summary["metric"]]["mean"]
    baseline = max(v["mean"] for v in summary["baselines"].values())
    published = summary["published"]
    rows = [
        Comparison(
            "token accuracy of the whole model", whole, published["whole"],
            whole >= published["whole"] - 0.01,
            "published: a constant in the plotting code; quick runs train for fewer epochs or on "
            "other data than the paper's",
        ),
        Comparison("best baseline, measured on the data", baseline, published["baseline"]),
    ]  # fmt: skip
    for size, values in sorted(summary["sets"].items(), key=lambda item: int(item[0])):
        best = int(np.argmax(values["mean"]))
        rows.append(
            Comparison(
                f"best path length of sets of {size}, its accuracy {values['mean'][best]:.2f}",
                summary["lengths"][best],
                "short",
                summary["lengths"][best] <= 2
                and values["mean"][best] - values["std"][best] > baseline,
                "agrees if it is at most 2 and its accuracy, less one standard deviation, is above "
                f"the baseline of {baseline:.2f}: a length that guesses carries nothing",
            )
        )
    return rows


def reading(summary: dict[str, Any]) -> str:
    """What the numbers say against the paper."""
    metric = summary["metric"]
    whole = summary["whole"][metric]["mean"]
    exact, up_to = summary["exact"]["mean"], summary["up_to"]["mean"]
    best = int(np.argmax(exact))
    enough = int(np.argmax(np.array(up_to) >= whole - 0.02))
    return (
        f"Whole model {whole:.3f}. The exact sum over all paths of one length is best at length "
        f"{best} ({exact[best]:.3f}) and {exact[-1]:.3f} at the longest; all paths of length at "
        f"most {enough} together come within 0.02 of the whole model."
    )
