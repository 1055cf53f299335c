"""Path counts: how many of a network's paths have each length.

Reproduces the figure "distribution of path lengths" of Dong, Cordonnier and Loukas (2021): a
network of L layers with H heads and skips has (1+H)^L paths, C(L,k) H^k of them of length k, so a
share Binomial(L, H/(1+H)) of them. Counted in exact integers, with the binomial law beside.

    python -m experiments.run_path_counts
    python -m experiments.run_path_counts --heads=16 --layers=24      (any architecture)

Takes 2 seconds on a CPU. Expect the mass of GPT-3 (H = L = 96) at lengths 91 to 96.
"""

import re
from functools import partial

from absl import flags

from experiments.path_counts.counts import path_table
from experiments.path_counts.entry import ENTRY
from experiments.path_counts.figures import figures_of
from experiments.path_counts.results import rows_of, summary_of
from experiments.shell import cli

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
MAX_DEPTH = 100_000

FLAGS = cli.make_flags("path_counts", shows="log10_paths,length=last")
define = cli.definer(FLAGS)
define("list", "heads", [], "Heads of architectures of your own, in pairs with --layers.")
define("list", "layers", [], "Layers of the same architectures.")


def main(options: flags.FlagValues) -> None:
    sizes = architectures(options.heads, options.layers)
    with cli.open_run(options, "path_counts") as run:
        tables = {name: path_table(*size) for name, size in sizes.items()}
        summary = run.publish(
            rows=partial(rows_of, tables, sizes),
            figures=figures_of(tables),
            summary=partial(summary_of, tables, sizes),
        )
        for name, numbers in summary.items():
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


__all__ = ["ENTRY", "FLAGS", "main"]

if __name__ == "__main__":
    cli.run(main, FLAGS)
