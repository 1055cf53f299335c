"""One page about checkpoints: `rank-collapse check FOLDER_OR_NAME ...`.

    rank-collapse check bert-base-cased-folder
    rank-collapse check hf:gpt2 hf:EleutherAI/pythia-70m@step1000 --text my.txt --out two.html
    rank-collapse check my-run/checkpoint --tokenizer bert-base-cased-folder
    rank-collapse check my-run/checkpoint --ids 5,8,13 --ids 7,7,1,2 --json
    rank-collapse check bert-base-cased       (published sizes at random initialisation)

By layer, on a few texts: residual ratio, token cosine and effective rank before the final norm, of
the whole network, of what its attention reads, and of its attention alone; spikes, with the layers
where the residual ratio is of one token; entropy and sinks of attention; and the size of all paths
of each length. The same numbers are written beside the page as a table (.csv) and with their means
(.json). Weights are read layer by layer. `python -m experiments.run_architectures` in a clone
measures more.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse import report
from rank_collapse.command import checkpoint
from rank_collapse.command.checkpoint import (
    NETWORKS,
    OF_ATTENTION,
    READ,
    WHOLE,
    Checked,
    of_one_token,
)
from rank_collapse.report import figures
from rank_collapse.runs.drawn import drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("sources", metavar="FOLDER_OR_NAME", nargs="+", help=checkpoint.SOURCE)
    what = "the page, beside it .csv and .json"
    checkpoint.add_arguments(parser, "rank_collapse.html", what)


def run(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    checkpoint.check_output(given, "page", ".html")
    names = dict.fromkeys(given.sources)
    found = [checkpoint.checked(given, name, *checkpoint.opened(name)) for name in names]
    about = [one.about(command) for one in found]
    lines = [lines | {"layers": one.layers()} for one, lines in zip(found, about, strict=True)]

    def written(out: Path) -> dict[Path, bytes]:
        numbers = json.dumps(about if about[1:] else about[0], indent=1) + "\n"
        html = page(found, about[0]["command"])
        return {out: html.encode(), out.with_suffix(".json"): numbers.encode()}

    said = dict.fromkeys(one.made for one in found)
    checkpoint.write(given, lines, rows_of(found), written, said)
    return 0


def rows_of(several: Sequence[Checked]) -> Iterator[tuple[Any, ...]]:
    """All numbers, one a row: of which network, measure, text, and layer or path length; of several
    checkpoints first of which."""
    which = ("source",) if several[1:] else ()
    yield (*which, "network", "measure", "text", "layer_or_length", "value")
    for source, _, found, *_ in several:
        measures = {f"{p}/{m}": a for p in (*NETWORKS, "attention") for m, a in found[p].items()}
        for name, values in (measures | {f"{WHOLE}/path_size": found["sizes"]}).items():
            network, _, measure = name.replace("attention/", f"{WHOLE}/attention_").partition("/")
            first = found["sizes"].shape[1] - values.shape[1]  # a layer's attention: from 1
            for (text, place), value in np.ndenumerate(values):
                row = (network, measure, text, first + place, float(value))
                yield (source, *row) if which else row


def page(several: Sequence[Checked], command: str) -> str:
    """The page as HTML, a section for each checkpoint."""
    notes = [
        f"{one.made}" + "".join(f" {r}: {w}." for r, w in of_one_token(one.found).items())
        for one in several
    ]
    if several[1:]:
        notes = [f"{one.source}: {note}" for one, note in zip(several, notes, strict=True)]
    return report.render(
        f"Rank collapse in {', '.join(one.source for one in several)}",
        "Means over texts, in float32: residual ratios below about 1e-7 are rounding. States by "
        f"layer are those before the final norm, where there is one. {' '.join(notes)}",
        [
            section(one, f"checkpoint-{i}" if i else "checkpoint", command)
            for i, one in enumerate(several)
        ],
    )


def section(one: Checked, name: str, command: str) -> report.Section:
    """A checkpoint's part of the page."""
    found = one.found
    means = one.layers()
    rows = [
        {"layer": layer} | dict(zip(means, map(checkpoint.plain, row), strict=True))
        for layer, row in enumerate(zip(*map(np.ndarray.tolist, means.values()), strict=True))
    ]
    return report.Section(
        name=name,
        title=one.source,
        claim="Pure attention loses rank doubly exponentially with depth; skips keep the residual "
        "(Dong et al. 2021).",
        figures=[
            (
                drawn(by_layer(found))[".png"],
                f"Residual ratio by layer, also of {READ}, N(x), and without skips and MLPs. "
                "Right: the largest token's share of the squared norm, and of the residual's; "
                "where that is above 1/2, the residual ratio is of one token. Bands over texts.",
            ),
            (
                drawn(by_path_length(found["sizes"]))[".png"],
                "Share of the size ‖C_k‖ of all paths of length k, exact sums; bands over texts.",
            ),
            (
                drawn(of_attention(found["attention"]))[".png"],
                "Entropy of attention, and its weight on the first token (a sink) and on the token "
                "that gets most; means over heads and queries, bands over texts.",
            ),
        ],
        comparisons=[report.Comparison(quantity, value) for quantity, value in one.numbers.items()],
        table=rows,
        command=command,
    )


@figures.styled
def by_layer(found: Mapping[str, Any]):
    """Residual ratio by layer, and the largest token's share."""
    shown = {name: np.maximum(found[name]["residual_ratio"], 1e-8) for name in NETWORKS}
    groups = {
        "residual ratio": shown,
        "largest token's share": {
            "of ‖X‖²": found[WHOLE]["spike_share"],
            "of ‖res(X)‖²": found[WHOLE]["residual_spike"],
        },
    }
    fig, ((ratios, spikes),) = figures.curves(
        groups, ylabel="‖res(X)‖₁,∞ / ‖X‖₁,∞", width=4.2, height=3.4
    )
    ratios.set(yscale="log")
    spikes.set(ylim=(0, 1.05))
    spikes.axhline(0.5, color="#9A9A9A", lw=1)
    figures.finish((ratios, spikes), "layer")
    return fig


@figures.styled
def by_path_length(sizes: np.ndarray):
    """Share of the size of all paths by length, from their sizes [b, L + 1]."""
    shown = {"": {"": sizes / sizes.sum(axis=1, keepdims=True)}}
    labels = {"xlabel": "path length k", "ylabel": "share of Σ ‖C_k‖"}
    return figures.curves(shown, width=6.5, height=3.0, **labels)[0]


@figures.styled
def of_attention(found: Mapping[str, Any]):
    """Entropy and sinks of attention by layer."""
    fig, axes = figures.figure(1, 2, width=3.3, height=3.0)
    for index, (name, label) in enumerate(OF_ATTENTION.items()):
        ax = axes[0, min(index, 1)]
        figures.band(ax, np.arange(1, found[name].shape[1] + 1), found[name], label, index)
        ax.set(ylim=(0, 1 if index else 1.2 * found[name].max()))
    figures.finish(tuple(axes[0]), "layer")
    return fig
