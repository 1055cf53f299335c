"""How the trained experiments stand in the report."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.shell.entry import Entry
from experiments.shell.paper import said
from experiments.trained.results import warnings_of
from rank_collapse.report.claims import BELOW_ZERO, MOST, Claim, test_mean
from rank_collapse.report.page import Comparison

PUBLISHED_SIZE = "20"  # paths in the larger of the published sets


def make_entry(title: str, task: str, quick: Sequence[str], paper: Sequence[str]) -> Entry:
    """The entry of one trained experiment; `task` is named in its claims."""
    return Entry(
        title=title,
        claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the "
        "whole model's accuracy, and the accuracy of a path falls with its length.",
        presets={"quick": quick, "paper": paper},
        claims=lambda summary: list(claims(summary, task)),
        compare=compare,
        reading=reading,
        captions={
            "paths": "Accuracy by path length. Left: sampled sets, which attend from their own "
            "states, beside the exact sum over all paths of the length in the whole model's "
            "attention. Right: the network without paths longer than k, the sums of the k + 1 "
            "shortest and of the k + 1 longest lengths. Bars and bands: standard deviation over "
            "seeds.",
            "shares": "What each length adds in the whole model's attention: exact Shapley values "
            "of the accuracy, and covariance shares of the logits.",
            "loss": "Training loss, mean and standard deviation over seeds.",
        },
    )


def claims(summary: dict[str, Any], task: str) -> Iterator[Claim]:
    """Whether short paths suffice, beat long ones, do the task alone, and lengths fall."""
    depth, heads, seen = summary["depth"], summary["heads"], summary["by_seed"]
    mean_length = depth * heads / (1 + heads)
    yield test_mean(
        seen["carried_length"], (-math.inf, mean_length),
        statistic="mean length at which the accuracy comes, as longer paths are let in one length "
        "after the other",
        null=f"{mean_length:.3g}, the mean length of a path, or more",
        **said("short suffice", f"{task}, self-consistent truncation"),
    )  # fmt: skip
    yield test_mean(
        seen["enough"], (-math.inf, mean_length),
        statistic="length up to which all paths are needed to come within one standard error of "
        "the whole model",
        null=f"{mean_length:.3g}, the mean length of a path, or more",
        **said("short suffice", f"{task}, self-consistent truncation, all of its accuracy"),
    )  # fmt: skip
    whole, baseline = (np.asarray(seen[name]) for name in ("whole", "baseline"))
    learned = whole > baseline
    gain = (whole - baseline)[learned]
    apart = int((~learned).sum())
    why = f"{apart} of {len(learned)} seeds, no better than the best baseline, are left out"
    why = why if apart else ""
    half = depth // 2 - 1
    less_long = np.asarray(seen["short_less_long"])[learned, half] / gain
    yield test_mean(
        less_long.tolist(), MOST, null="half or less", why=why,
        statistic=f"accuracy of the {half + 1} shortest lengths together less that of the "
        f"{half + 1} longest, same offset, as a share of what the whole model has above the best "
        "baseline", **said("short suffice", f"{task}, frozen sums"),
    )  # fmt: skip
    sets = seen["sets"].get(PUBLISHED_SIZE)
    lengths = list(summary["lengths"])
    if sets and 1 in lengths and len(lengths) > 2:
        above = np.asarray(sets, float)[:, lengths.index(1) :] - baseline[:, None]
        where = f"{task}, {PUBLISHED_SIZE} sampled paths, recomputed"
        yield test_mean(
            (above[learned, 0] / gain).tolist(), MOST, null="half or less", why=why,
            statistic="accuracy of sets of length 1 above the best baseline, as a share of what "
            "the whole model has above it", **said("one short", where),
        )  # fmt: skip
        away = np.arange(above.shape[1]) - (above.shape[1] - 1) / 2
        slope = np.maximum(above, 0) @ away / (away @ away)
        yield test_mean(
            np.where((above > 0).any(axis=1), slope, np.nan).tolist(), BELOW_ZERO, null="0",
            statistic="slope of the accuracy above the best baseline over lengths 1 .. L, of seeds "
            "where some length is above it", **said("falls", where),
        )  # fmt: skip


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Whole model and baseline beside the published plotting code's, and what no path gives."""
    metric, published = summary["metric"], summary["published"]
    whole, offset = summary["whole"][metric], summary["offset"]
    baseline = max(v["mean"] for v in summary["baselines"].values())
    rows = [
        Comparison(
            "token accuracy of the whole model", _interval(whole), published["whole"],
            "published: a constant in the plotting code; quick runs train for fewer epochs or on "
            "other data than the paper's",
        ),
        Comparison("best baseline, measured on the data", baseline, published["baseline"]),
        Comparison(
            "no path at all: the offset alone, frozen", _interval(offset),
            note="biases through the whole model's 1/σ: what every exact sum begins with",
        ),
    ]  # fmt: skip
    for size, values in sorted(summary["sets"].items(), key=lambda item: int(item[0])):
        best = int(np.argmax(values["mean"]))
        length = summary["lengths"][best]
        rows.append(
            Comparison(
                f"best length of sets of {size} sampled paths", length,
                note=f"its accuracy {values['mean'][best]:.3f}; the best baseline has "
                f"{baseline:.3f}; of length {length} there are "
                f"{summary['paths_there_are'][length]} different paths",
            )
        )  # fmt: skip
    return rows


def _interval(values):
    if "interval" not in values:
        return f"{values['mean']:.3f}"
    low, high = values["interval"]
    return f"{values['mean']:.3f} ({low:.3f} to {high:.3f})"


def reading(summary: dict[str, Any]) -> str:
    """What the numbers say, each with its semantics."""
    whole = summary["whole"][summary["metric"]]["mean"]
    exact, kept = summary["exact"]["mean"], summary["truncated"]["mean"]
    enough = [e for e in summary["by_seed"]["enough"] if e is not None]
    best = int(np.argmax(exact))
    text = (
        f"Whole model {whole:.3f}. Without paths longer than 0 .. {len(kept) - 1}, attention "
        f"recomputed: {', '.join(f'{a:.3f}' for a in kept)}"
    )
    if enough:
        text += (
            f"; within one standard error of the whole from K = {np.mean(enough):.3g} on (mean "
            f"over {len(enough)} seeds), where the mean length of a path is "
            f"{summary['depth'] * summary['heads'] / (1 + summary['heads']):.3g}"
        )
    text += (
        f". In the whole model's attention (frozen) no path at all gives "
        f"{summary['offset']['mean']:.3f}, the best single length, {best}, {exact[best]:.3f}"
    )
    return ". ".join([text, *warnings_of(summary)]) + "."
