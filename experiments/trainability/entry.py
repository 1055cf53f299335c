"""How run_trainability stands in the report."""

import math
from typing import Any

from experiments.shell.entry import Entry
from experiments.trainability.results import PUBLISHED, title_of
from rank_collapse.report.claims import Claim, of_share
from rank_collapse.report.page import Comparison

TABLE = "Liu et al. 2020, table 1"


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Seeds that failed, beside the BLEU of networks as deep that trained or did not."""
    rows = []
    for cell in summary["cells"]:
        low, high = cell["interval"]
        known, bleu = _published(cell)
        note = f"{TABLE}: translation, encoder and decoder, with warm-up" if known else ""
        if known and cell["design"] == "admin_log":
            note += "; theirs profiled"
        rows.append(
            Comparison(
                f"{cell['part']}: {title_of(cell)}: seeds that fail",
                f"{cell['failed']} of {cell['seeds']} ({low:.2f} to {high:.2f}), accuracy "
                f"{cell['accuracy']:.3f}",
                None if not known else "failed" if bleu is None else f"trained, BLEU {bleu}", note,
            )
        )  # fmt: skip
    return rows


def claims(summary: dict[str, Any]) -> list[Claim]:
    """Whether most seeds fail where the paper's network did, and train where it trained."""
    found = []
    for cell in summary["cells"]:
        known, bleu = _published(cell)
        if known:
            fails = bleu is None
            found.append(
                of_share(
                    cell["failed"], cell["seeds"], (0.5, math.inf) if fails else (-math.inf, 0.5),
                    statement=f"The network {'fails' if fails else 'trains'}. [{title_of(cell)}]",
                    section=TABLE, statistic="share of seeds that fail", null="the other half",
                    why=f"{cell['failed']} of {cell['seeds']}; theirs: translation, with warm-up",
                )
            )  # fmt: skip
    return found


def _published(cell):
    """(whether the paper has a network of this depth and design, its BLEU or None if it failed)."""
    table = PUBLISHED.get("admin" if cell["design"].startswith("admin") else cell["design"], {})
    known = cell["part"] == "designs" and cell["depth"] in table
    return known, table.get(cell["depth"])


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
    },
)  # fmt: skip
