"""How run_trainability stands in the report."""

import math
from typing import Any

from experiments.shell.entry import Entry
from experiments.trainability.results import PUBLISHED, title_of
from rank_collapse.report.claims import Claim, of_share
from rank_collapse.report.page import Comparison

SOURCE = "Liu et al. 2020, table 1: WMT'14 English-German, encoder and decoder, with warm-up"


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Seeds that failed, beside the BLEU of networks as deep that trained or did not."""
    rows = []
    for cell in summary["cells"]:
        low, high = cell["interval"]
        known, bleu = published(cell)
        rows.append(
            Comparison(
                f"{cell['part']}: {title_of(cell)}: seeds that fail",
                f"{cell['failed']} of {cell['seeds']} ({low:.2f} to {high:.2f}), accuracy "
                f"{cell['accuracy']:.3f}",
                (f"BLEU {bleu}" if bleu else "failed") if known else None,
                SOURCE if known else "",
            )
        )  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Claim]:
    """Most seeds fail where the paper's network did, and few where it trained."""
    tested = []
    for cell in summary["cells"]:
        known, bleu = published(cell)
        if not known:
            continue
        outcome = "trains" if bleu else "fails"
        tested.append(
            of_share(
                cell["failed"], cell["seeds"],
                (-math.inf, 0.5) if bleu else (0.5, math.inf),
                statement=f"{cell['design']} of {cell['depth']} layers {outcome}.",
                section="Liu et al. 2020, table 1",
                statistic=f"share of seeds that fail, {title_of(cell)}",
                null="half of the seeds or more" if bleu else "half of the seeds or fewer",
                why="theirs: translation, encoder and decoder, warm-up of thousands of steps"
                + ("; its ω profiled, here by the closed form" * (cell["design"] == "admin_log")),
            )
        )  # fmt: skip
    return tested


def published(cell: dict[str, Any]) -> tuple[bool, float | None]:
    """(whether the paper trained this design and depth, its BLEU or None where it failed)."""
    table = PUBLISHED.get("admin" if cell["design"].startswith("admin") else cell["design"], {})
    known = cell["part"] == "designs" and cell["depth"] in table
    return known, table.get(cell["depth"]) if known else None


def reading(summary: dict[str, Any]) -> str:
    """Who fails where, and what their networks had been like."""
    cells = [c for c in summary["cells"] if c["part"] == "designs"]
    if not cells:
        return "Only the grids were run."
    warmup = min(c["warmup"] for c in cells)
    deepest = max(c["depth"] for c in cells)
    at = [c for c in cells if (c["depth"], c["warmup"]) == (deepest, warmup)]
    said = "; ".join(
        f"{c['design']} fails in {c['failed']} of {c['seeds']} seeds (last residual ratio "
        f"{c['residual_ratio_before']:.1g} before training and {c['residual_ratio_after']:.1g} "
        f"after it; gradient of W_Q before it {c['query_over_value_gradient_before']:.1g} of W_V's)"
        for c in at
    )
    return f"With {deepest} layers and {warmup or 'no'} steps of warm-up: {said}."


ENTRY = Entry(
    title="Trainability of deep networks",
    claim="Liu et al. 2020, table 1: Post-LN Transformers of 12 and 18 layers diverge on WMT'14 "
    "English-German, Pre-LN and Admin train. Noci et al. 2022: tokens that have collapsed to rank "
    "one take the gradients from queries and keys.",
    presets={
        "quick": ("--parts=designs", "--depths=18", "--designs=post,depth_scaled", "--warmup=0",
                  "--num_seeds=4", "--n_steps=100", "--seq_len=8", "--num_labels=5",
                  "--hidden_dim=24", "--width=2", "--d_ff=48", "--batch_sz=16"),
        "paper": (),
    },
    claims=claims,
    compare=compare,
    reading=reading,
    captions={
        "failed": "Share of seeds whose loss is not finite or whose network still guesses after "
        "training, with 95 % intervals (Wilson).",
        "losses": "Training loss, mean and standard deviation over seeds.",
        "why": "Residual ratio of the hidden states and gradient norms by layer, before training "
        "(solid, with bands over seeds) and after it (dashed, medians), of the same networks. A "
        "network that has learned has small gradients too, but tokens that differ.",
        "during": "The last layer's residual ratio and the root mean square over layers of the "
        "gradient to W_Q, while the same networks train.",
        "batch": "The same share by batch size.",
        "border": "Accuracy of Post-LN by gain of all skips, learning rate and warm-up.",
    },
)  # fmt: skip
