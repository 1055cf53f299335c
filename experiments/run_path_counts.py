"""Path counts: how many of a network's paths have each length.

Reproduces the figure "distribution of path lengths" of Dong, Cordonnier and Loukas (2021): a
network of L layers with H heads and skips has (1+H)^L paths, C(L,k) H^k of them of length k, so a
share Binomial(L, H/(1+H)) of them. Counted in exact integers, with the binomial law beside.

    python -m experiments.run_path_counts
    python -m experiments.run_path_counts --heads=16 --layers=24      (any architecture)

Takes 2 seconds on a CPU. Expect the mass of GPT-3 (H = L = 96) at lengths 91 to 96.
"""

import math
import re
from fractions import Fraction

import numpy as np
from absl import flags

from experiments.shell import cli
from experiments.shell.entry import Entry
from rank_collapse.paths.enumeration import count_paths
from rank_collapse.report import figures
from rank_collapse.report.page import Comparison

# (heads, layers) as published by the authors of each architecture.
ARCHITECTURES = {
    "DistilBERT": (12, 6),
    "MobileBERT": (4, 12),
    "BERT-base, ViT-B": (12, 12),
    "BERT-large, ViT-L": (16, 24),
    "ViT-H": (16, 32),
    "T5-3B": (32, 24),
    "T5-11B": (128, 24),
    "GPT-3": (96, 96),
    "DeiT-T": (3, 12),
}
MAX_EXACT_DEPTH = 1000  # beyond it, logarithms: the integers have thousands of digits
MAX_DEPTH = 100_000

FLAGS = cli.make_flags("path_counts")
flags.DEFINE_list(
    "heads", [], "Heads of architectures of your own, in place of the published ones; with "
    "--layers, in pairs.", flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_list("layers", [], "Layers of the same architectures.", flag_values=FLAGS)


def main(options: flags.FlagValues) -> None:
    chosen = architectures(options.heads, options.layers)
    with cli.open_run(options, "path_counts") as run:
        if run.summary is None or not run.has_figure("path_counts"):
            rows, shares, laws = [], {}, {}
            for name, (heads, layers) in chosen.items():
                table = path_table(heads, layers)
                rows += [
                    {"architecture": name, "heads": heads, "layers": layers} | r for r in table
                ]
                shares[name] = [r["share"] for r in table]
                laws[name] = [r["binomial"] for r in table]
            run.write_rows(rows)
            run.save_figure(figures.path_share_figure(shares, laws), "path_counts")
            run.finish(summarise(chosen, shares, laws))
        for name, numbers in run.summary.items():
            print(
                f"{name:18s} H={numbers['heads']:<4d} L={numbers['layers']:<4d} "
                f"paths 10^{numbers['log10_paths']:.2f}  mean length {numbers['mean_length']:.3f}"
            )
        print(f"written to {run.path}")


def architectures(heads: list[str], layers: list[str]) -> dict[str, tuple[int, int]]:
    """The published architectures, or those of the flags.

    Raises:
        ValueError: Values that are no positive integers, or lists of different lengths.
    """
    if len(heads) != len(layers):
        raise ValueError(f"--heads has {len(heads)} values and --layers {len(layers)}")
    if not heads:
        return ARCHITECTURES

    def integer(flag, text, most):
        if not re.fullmatch(r"\d+", text) or not 1 <= int(text) <= most:
            raise ValueError(f"--{flag}={text} is not an integer from 1 to {most}")
        return int(text)

    pairs = [
        (integer("heads", h, 10**9), integer("layers", l, MAX_DEPTH))
        for h, l in zip(heads, layers, strict=True)
    ]
    return {f"H={h}, L={l}": (h, l) for h, l in pairs}


def path_table(heads: int, layers: int) -> list[dict]:
    """One row per length k: the number of paths (exact, or its logarithm), share, and law."""
    law = binomial(layers, heads)
    if layers > MAX_EXACT_DEPTH:
        total = layers * math.log(1 + heads)
        logs = [log_choose(layers, k) + k * math.log(heads) for k in range(layers + 1)]
        table = [
            {
                "length": k,
                "paths": "",
                "log10_paths": v / math.log(10),
                "share": math.exp(v - total),
            }
            for k, v in enumerate(logs)
        ]
    else:
        counts = count_paths(layers, heads)
        total = sum(counts)
        table = [
            {
                "length": k,
                "paths": c,
                "log10_paths": math.log10(c),
                "share": float(Fraction(c, total)),
            }
            for k, c in enumerate(counts)
        ]
    return [row | {"binomial": p} for row, p in zip(table, law, strict=True)]


def binomial(layers: int, heads: int) -> list[float]:
    """Binomial(L, H/(1+H)) at 0 .. L, through logarithms of factorials."""
    log_head, log_skip = math.log(heads / (1 + heads)), -math.log(1 + heads)
    return [
        math.exp(log_choose(layers, k) + k * log_head + (layers - k) * log_skip)
        for k in range(layers + 1)
    ]


def log_choose(n: int, k: int) -> float:
    """log C(n, k)."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def summarise(chosen: dict, shares: dict, laws: dict) -> dict:
    """Per architecture: number of paths, mean and spread of the length, distance from the law."""
    summary = {}
    for name, (heads, layers) in chosen.items():
        share, length = np.array(shares[name]), np.arange(layers + 1)
        mean = float(share @ length)
        summary[name] = {
            "heads": heads,
            "layers": layers,
            "log10_paths": layers * math.log10(1 + heads),
            "mean_length": mean,
            "std_length": float(np.sqrt(share @ (length - mean) ** 2)),
            "most_common_length": int(share.argmax()),
            "share_at_most_half_depth": float(share[: layers // 2 + 1].sum()),
            "largest_difference_from_binomial": float(np.abs(share - laws[name]).max()),
        }
    return summary


def compare(summary: dict) -> list[Comparison]:
    """Mean length beside the binomial law's, and the number of paths."""
    rows = []
    for name, numbers in summary.items():
        heads, layers = numbers["heads"], numbers["layers"]
        law = layers * heads / (1 + heads)
        rows.append(
            Comparison(
                f"{name} (H={heads}, L={layers}): mean path length",
                numbers["mean_length"],
                law,
                abs(numbers["mean_length"] - law) < 1e-9 * layers,
                f"published: L H/(1+H); 10^{numbers['log10_paths']:.1f} paths, "
                f"{numbers['share_at_most_half_depth']:.2g} of them at most L/2 long",
            )
        )
    return rows


def reading(summary: dict) -> str:
    """One sentence against the paper."""
    furthest = max(n["largest_difference_from_binomial"] for n in summary.values())
    short = max(n["share_at_most_half_depth"] for n in summary.values())
    return (
        "As published, nearly all paths are long: at most "
        f"{short:.1%} of any architecture's paths pass half of the layers or fewer. Exact counts "
        f"and the binomial law differ by at most {furthest:.0e}."
    )


ENTRY = Entry(
    title="Paths by length",
    claim="Path decomposition: a network of L layers and H heads is a sum over (1+H)^L paths, "
    "whose lengths follow Binomial(L, H/(1+H)), so most paths are long, although long paths "
    "contribute least (published figure of path length distributions).",
    presets={"quick": (), "paper": ()},
    compare=compare,
    reading=reading,
    captions={"path_counts": "Share of paths by length: exact counts (bars) and law (dots)."},
)


if __name__ == "__main__":
    cli.run(main, FLAGS)
