"""run_stability's part of the report: laws, dependency and gradients beside what papers state."""

import math
from collections.abc import Sequence
from typing import Any

from experiments.shell.entry import Entry
from experiments.stability.cases import AT_MOST, CLAIMS
from experiments.stability.results import UPDATES
from rank_collapse.report.claims import Claim, of_interval
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """What papers state of dependency and gradients, and the one law beside what was measured."""
    designs = summary["designs"]
    rows = [
        Comparison(
            f"{name}: 1 − token cosine after {found['law']['layers_seen']} layers",
            found["law"]["one_minus_cosine_last"], found["law"]["expected_last"],
            "beside it the one law's; largest ratio of the two over layers "
            f"{found['law']['largest_ratio']:.3g}, at layer "
            f"{found['law']['largest_ratio_below_layer']}",
        )
        for name, found in designs.items()
    ]  # fmt: skip
    if {"post", "pre"} <= designs.keys():
        post, pre = designs["post"], designs["pre"]
        rows.append(
            Comparison(
                "last branch's share β_NN² of the output, post and pre",
                f"{post['last_branch']:.3f}, {pre['last_branch']:.3f}",
                "Post-LN leans on its last branches, Pre-LN spreads",
                f"Liu et al. 2020; {post['heat_depth']} layers; centre of mass "
                f"{post['centre_of_mass']:.2f} and {pre['centre_of_mass']:.2f} of N; exact shares "
                f"differ by {post['exact_minus_published']:.3f} and "
                f"{pre['exact_minus_published']:.3f} at most",
            )
        )  # fmt: skip
    post = designs.get("post", {})
    if post.get("query_over_value_slope") is not None:
        rows.append(
            Comparison(
                "post: exponent of ‖∂W_Q‖/‖∂W_V‖ in 1 − token cosine, by layer",
                post["query_over_value_slope"], "1: they vanish with it",
                f"Noci et al. 2022; the ratio falls from {post['query_over_value_first']:.2g} in "
                f"the first layer to {post['query_over_value_last']:.2g} in the last",
            )
        )  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Claim]:
    """The exponent of the output change: in the range where the stated law is the nearest."""
    laws = summary["law_exponents"]
    found = []
    for name, numbers in summary["designs"].items():
        if numbers["claim"] is None:
            continue
        law, source = CLAIMS[name]
        least, most = nearest_range(laws[law], list(laws.values()))
        least, bound = (-math.inf, "at most ") if name in AT_MOST else (least, "")
        for update in UPDATES:
            interval = numbers[f"interval_{update}"]
            found.append(
                of_interval(
                    numbers[f"exponent_{update}"], interval and tuple(interval),
                    summary["seeds"], (least, most),
                    statement=f"An update changes the output by {bound}{law}. "
                    f"[{name}, {update} updates]",
                    section=source, statistic="exponent of the output change in N",
                    null="nearer to another of the three laws, "
                    + ", ".join(f"{other}: {slope:.3f}" for other, slope in laws.items()),
                    why=f"the one law expects {numbers['exponent_expected']:.3f} of random updates",
                )
            )  # fmt: skip
    return found


def nearest_range(value: float, others: Sequence[float]) -> tuple[float, float]:
    """The range of numbers to which `value` is the nearest of all; as far up as down, at most."""
    below = [(o + value) / 2 for o in others if o < value]
    above = [(o + value) / 2 for o in others if o > value]
    least = max(below, default=-math.inf)
    return least, min(above, default=2 * value - least)


def reading(summary: dict[str, Any]) -> str:
    """Against the papers, in a few sentences."""
    designs = summary["designs"]
    slopes = [
        f"{name} {found['exponent_random']:.2f} and {found['exponent_gradient']:.2f}"
        for name, found in designs.items()
    ]
    worst = max(designs, key=lambda name: designs[name]["law"]["largest_ratio"])
    return (
        "Exponents of the output change in N, of random updates and of steps along the gradient: "
        f"{', '.join(slopes)}. The one law of token cosines is furthest off in "
        f"{worst}, by a factor of {designs[worst]['law']['largest_ratio']:.3g}."
    )


ENTRY = Entry(
    title="Residual designs and depth: stability and rank collapse as one law",
    claim="Post-LN leans on its last branches, so that updates change its output by O(N), Pre-LN's "
    "by O(log N), and Admin by O(log N) or O(1) (Liu et al. 2020, theorem 2); in "
    "Post-LN tokens become equal and gradients of queries and keys vanish (Noci et al. 2022).",
    presets={
        "quick": ("--designs=post,admin_log,admin_const", "--depths=3,6,12", "--nolog_residual",
                  "--layer_depths=3,6,12", "--num_seeds=4", "--d_model=32"),
        "paper": (),
    },
    claims=claims,
    compare=compare,
    reading=reading,
    captions={
        "one_law": "Left: 1 − mean token cosine by layer of the deepest networks (markers, bands "
        "over seeds) and the law that predicts it from the gains alone (lines). Middle and right: "
        "output change and gradients of W_Q, measured against expected from the same recursion, "
        "geometric means over seeds (gradients where 1 − cosine is above 1e-5: below it float32 "
        "rounds them).",
        "dependency": "Dependency of the stream after branch i on branch j: β_ij from variances, "
        "as published, and the exact share of variance.",
        "output_change": "Change of the output after an update of every matrix by the same "
        "relative size, against the number of branches; dotted the law's expectation, black the "
        "three published laws. Right: fitted exponents, 95 % over seeds.",
        "gradients": "Gradient norms by layer of the deepest networks, dotted what the law "
        "expects; last: those of queries over those of values against 1 − token cosine.",
        "by_layer": "Residual ratio, token cosine and residual by layer of the same networks.",
    },
)  # fmt: skip
