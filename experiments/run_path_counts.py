"""Path counts: how many of a network's paths have each length.

Reproduces the figure "distribution of path lengths" in Dong, Cordonnier and Loukas (2021). A
network with L layers, H heads and skips has (1+H)^L paths. C(L,k) H^k of them have length k, so the
share of this length is Binomial(L, H/(1+H)). Counts paths in exact integers and compares the counts
with the binomial law.

    python -m experiments.run_path_counts
    python -m experiments.run_path_counts --heads=16 --layers=24      (any architecture)

If paths are weighted by the contribution of each layer, most of the weight is on short paths. For
five language models the shares of the attention branches are published (arXiv 2602.16837); the
figure shows the law of their weighted path lengths next to the counts.

Takes 2 seconds on a CPU. Expect the paths of GPT-3 (H = L = 96) to have lengths from 91 to 96.
"""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    open_run,
    plots,
    shared_flags,
)
from experiments.verdicts import Comparison, TableRow
from rank_collapse.paths.enumeration import count_paths
from rank_collapse.paths.lengths import path_length_law
from rank_collapse.printed import format_count
from rank_collapse.report import figures

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
# Shares of attention branches by layer, of five language models; the file names their source.
SHARES = Path(__file__).parent / "attention_shares.json"
MAX_DEPTH = 1000  # beyond it the integers have thousands of digits
COLUMNS = 3  # panels in a row

FLAGS = cli.make_flags("path_counts", shows="log10_paths,length=last")
shared_flags.define_numbers(
    FLAGS, "heads", [], "Heads of architectures of your own, in pairs with --layers.", lower_bound=1
)
shared_flags.define_numbers(FLAGS, "layers", [], "Layers of the same architectures.", lower_bound=1)

Sizes = dict[str, tuple[int, int]]  # {architecture: (heads, layers)}
Tables = dict[str, list[TableRow]]  # {architecture: rows of `path_table`}


def make_sizes(options: Options) -> Sizes:
    """Selects the published architectures, or the architectures of the flags.

    Args:
        options: The flags.

    Raises:
        ValueError: Lists of different lengths, or more layers than `MAX_DEPTH`.
    """
    heads, layers = options.heads, options.layers
    if len(heads) != len(layers):
        raise ValueError(f"--heads has {len(heads)} values, but --layers has {len(layers)}")
    if max(layers, default=0) > MAX_DEPTH:
        raise ValueError(f"--layers={max(layers)} is above {MAX_DEPTH}")
    pairs = zip(heads, layers, strict=True)
    return {describe_size(h, l): (h, l) for h, l in pairs} or ARCHITECTURES


def describe_size(heads: int, layers: int) -> str:
    """Names an architecture by its size: "1 head, 5 layers"."""
    return f"{format_count(heads, 'head')}, {format_count(layers, 'layer')}"


def measure(options: Options, sizes: Sizes, folder: RunFolder) -> Tables:
    """Counts the paths of all networks: integers in closed form. The run keeps only the table of
    them."""
    return {name: path_table(*size) for name, size in sizes.items()}


def path_table(heads: int, layers: int) -> list[TableRow]:
    """Counts the C(L, k) H^k paths of each length k, one row each.

    Args:
        heads: H.
        layers: L.

    Returns:
        Rows with the number of paths, its logarithm, its share of all (1+H)^L, and the share by the
        law.
    """
    counts, law = count_paths(layers, heads), binomial(layers, heads)
    total = sum(counts)
    return [
        {
            "length": length,
            "paths": count,
            "log10_paths": math.log10(count),
            "share": float(Fraction(count, total)),
            "binomial": law[length],
        }
        for length, count in enumerate(counts)
    ]


def binomial(layers: int, heads: int) -> list[float]:
    """Computes Binomial(L, H/(1+H)) at 0 .. L, from the law of the layers skipped."""
    from scipy import stats  # takes a second to import, which `--help` need not

    return stats.binom(layers, 1 / (1 + heads)).pmf(np.arange(layers, -1, -1)).tolist()


def make_rows(tables: Tables, sizes: Sizes) -> Iterator[TableRow]:
    """Makes a row for each architecture and length."""
    for name, (heads, layers) in sizes.items():
        for row in tables[name]:
            yield {"architecture": name, "heads": heads, "layers": layers} | row


def select_column(rows: list[TableRow], name: str) -> np.ndarray:
    """Selects one column as numbers."""
    return np.array([row[name] for row in rows])


@figures.styled
def path_counts_figure(tables: Tables):
    """Share of paths (vertical axis) by path length (horizontal axis). Each panel shows one model
    with H heads in each of its L layers. Bars are exact counts, and dots are the binomial
    distribution."""
    fig, axes = figures.panels(len(tables), COLUMNS, width=3.3, height=2.1)
    for ax, (name, rows) in zip(axes.flat, tables.items(), strict=False):
        lengths, share, law = (select_column(rows, n) for n in ("length", "share", "binomial"))
        ax.bar(lengths, share, width=0.85, color=figures.color(5), label="counted")
        ax.plot(lengths, law, ".", color=figures.color(1), markersize=3.5, label="binomial")
        ax.set_title(name, fontsize=9)
        figures.integer_ticks(ax)
    plots.outer_labels(axes, "path length", "share of paths")
    axes[0, 0].legend(loc="upper left")
    return fig


def weigh_lengths() -> dict[str, tuple[int, np.ndarray]]:
    """Computes {model: (heads, the law of its path lengths)} from the published shares."""
    models = json.loads(SHARES.read_text("utf-8"))["models"]
    return {
        name: (model["num_heads"], path_length_law(np.array(model["shares"])))
        for name, model in models.items()
    }


@figures.styled
def weighted_lengths_figure():
    """Share of paths (vertical axis) by path length (horizontal axis); each panel shows one of five
    language models. Grey bars: each path counts once, as in the paper. Coloured bars: each path has
    a weight, a product with one factor for each layer. If the path takes a head, the factor is the
    published share of attention divided by the number of heads. If the path takes the skip, the
    factor is the share of the skip. With these weights the mean length is about four to five in all
    five models, although they have 30 to 70 layers."""
    models = weigh_lengths()
    fig, axes = figures.panels(len(models), COLUMNS, width=3.3, height=2.1)
    for ax, (name, (heads, law)) in zip(axes.flat, models.items(), strict=False):
        lengths = np.arange(len(law))
        counted = binomial(len(law) - 1, heads)
        ax.bar(lengths, counted, width=0.85, color="0.7", label="counted")
        ax.bar(lengths, law, width=0.85, color=figures.color(0), label="weighted")
        ax.set_title(f"{name}, {format_count(len(law) - 1, 'layer')}", fontsize=9)
        figures.integer_ticks(ax)
    plots.outer_labels(axes, "path length", "share of paths")
    axes[0, 0].legend()
    return fig


def compare_results(tables: Tables, sizes: Sizes) -> Iterator[Comparison]:
    """Compares exact counts with the binomial law, an identity; and mean lengths by count and by
    weight.

    Args:
        tables: {architecture: rows of `path_table`}.
        sizes: {architecture: (heads, layers)}.
    """
    differences = [
        np.abs(select_column(rows, "share") - select_column(rows, "binomial")).max()
        for rows in tables.values()
    ]
    text = "largest difference of a share of paths from the binomial law"
    yield Comparison(text, float(max(differences)), 0, source="expected")
    for name, (heads, layers) in sizes.items():
        shares = select_column(tables[name], "share")
        size = f" (H={heads}, L={layers})" * (name in ARCHITECTURES)
        yield Comparison(
            f"{name}{size}: mean path length",
            float(shares @ np.arange(layers + 1)),
            layers * heads / (1 + heads),
            f"the published law is L H/(1+H); 10^{layers * math.log10(1 + heads):.1f} paths, "
            f"{shares[: layers // 2 + 1].sum():.2g} of them at most L/2 long",
        )
    for name, (heads, law) in weigh_lengths().items():
        depth, reached = len(law) - 1, np.cumsum(law)
        yield Comparison(
            f"{name} (H={heads}, L={depth}): mean path length by weight",
            float(law @ np.arange(depth + 1)),
            depth * heads / (1 + heads),
            f"median {np.argmax(reached >= 0.5)}, "
            f"{reached[3]:.2g} of the weight at most 3 long, "
            f"99 % at most {np.argmax(reached >= 0.99)}",
            source="mean by count",
        )


EXPERIMENT = Experiment(
    order=20,
    title="Paths by length",
    brief="number of paths by length in BERT, GPT-3 and other models, or for any H and L",
    claim="The output of a network with L layers of H heads is a sum over (1+H)^L paths, "
    "because a path takes one of the H heads or the skip in each layer. The length of a "
    "path is the number of heads on it. The length of a random path has the distribution "
    "Binomial(L, H/(1+H)). So most paths are long. Long paths nevertheless contribute "
    "least to the output (published figure of path length distributions).",
    presets={"quick": "", "reported": "", "tiny": "--heads=2 --layers=2"},
    figures=describe_figures(path_counts_figure, weighted_lengths_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_sizes) as run:
        for point in run.measure(measure):
            tables, sizes = point.results, point.setup
            point.save_table(make_rows(tables, sizes))
            point.save_figure("path_counts", path_counts_figure, tables)
            point.save_figure("weighted_lengths", weighted_lengths_figure)
            point.save_comparisons(compare_results(tables, sizes))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
