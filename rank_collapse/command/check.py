"""One page about checkpoints: `rank-collapse check FOLDER_OR_NAME ...`.

    rank-collapse check my-bert
    rank-collapse check hf:gpt2 hf:EleutherAI/pythia-70m@step1000 --text my.txt --out two.html
    rank-collapse check my-run/checkpoint --tokenizer my-bert
    rank-collapse check my-run/checkpoint --ids 5,8,13 --ids 7,7,1,2 --json
    rank-collapse check my-vit --inputs images.npy
    rank-collapse check random:bert-base-cased       (the architecture of BERT, random weights)

The page opens with a sentence about the numbers. On a few texts it shows by layer: residual ratio,
token cosine and effective rank before the final norm (for the full model, for the input of its
attention, and for its attention alone); spikes, with the layers whose residual ratio one token
decides; entropy and sinks of attention; and the norm of the sum of all paths of each length. The
command also writes the same numbers as a table (.csv) and with their means (.json). Weights are
read layer by layer.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse import report
from rank_collapse.command import checkpoint, inputs
from rank_collapse.command.checked import ALONE, ATTENTION_LABELS, NETWORKS, READ, WHOLE, Checked
from rank_collapse.command.checkpoint import to_json
from rank_collapse.measures.rounding import rounding_limit
from rank_collapse.measures.table import MEASURES
from rank_collapse.pretrained.published import RANDOM_WEIGHTS
from rank_collapse.pretrained.report import tabulate_lengths
from rank_collapse.report import figures, page as page_html
from rank_collapse.report.path_lengths import path_length_figure
from rank_collapse.runs.drawn import draw_files

MEANING = {
    f"residual ratio, {WHOLE}": MEASURES["residual_ratio"].meaning,
    f"residual ratio, {READ}": "the same of N(X); after the last layer of the output",
    f"residual ratio, {ALONE}": "the same weights without skips and MLPs (SAN)",
    "attention entropy, nats": MEASURES["attention_entropy"].meaning,
    "attention on the first token": MEASURES["first_column"].meaning,
    "attention on the token with most": MEASURES["largest_column"].meaning,
} | {name.replace("_", " "): measure.meaning for name, measure in MEASURES.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `check`."""
    parser.add_argument("sources", metavar="FOLDER_OR_NAME", nargs="+", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "rank_collapse.html", "the page; also writes .csv and .json")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Run `check`, and return its exit code.

    Args:
        flags: Parsed flags, from `add_arguments`.
        command: Words of the command line, for the page.
    """
    opened = [inputs.open_source(name) for name in dict.fromkeys(flags.sources)]
    checkpoint.check_output(flags)
    batches = [inputs.read_inputs(flags, source) for source in opened]
    inputs.check_comparable(opened, batches)
    checks = [checkpoint.measure_checkpoint(*pair) for pair in zip(opened, batches, strict=True)]
    about = [check.describe(command) for check in checks]
    lines = [
        text | {"layers": check.layer_means()} for check, text in zip(checks, about, strict=True)
    ]

    def make_files(out: Path) -> dict[Path, bytes]:
        numbers = json.dumps(to_json(about if len(about) > 1 else about[0]), indent=1) + "\n"
        html = render_page(checks, about[0]["command"])
        return {out: html.encode(), out.with_suffix(".json"): numbers.encode()}

    sentences = [
        *(f"{check.opened.name}: {check.write_verdict()}" for check in checks),
        *dict.fromkeys(check.inputs.description for check in checks),
    ]
    checkpoint.write_outputs(flags, lines, yield_rows(checks), make_files, sentences)
    return 0


def yield_rows(checks: Sequence[Checked]) -> Iterator[tuple[Any, ...]]:
    """Yield all numbers, one a row: weights, network, measure, text, and layer or path length.

    Args:
        checks: The checks. If there are several, each row begins with the checkpoint's name.
    """
    has_sources = len(checks) > 1
    head = ("weights", "network", "measure", "text", "layer_or_length", "value")
    yield ("source", *head) if has_sources else head
    for check in checks:
        measures = _list_measures(check)
        num_states = check.report.path_size.shape[1]
        for (network, measure), values in measures.items():
            first = num_states - values.shape[1]  # 1 for a layer's attention
            for (text, index), value in np.ndenumerate(values):
                row = (check.opened.weights, network, measure, text, first + index, float(value))
                yield (check.opened.name, *row) if has_sources else row


def _list_measures(check):
    """List {(network, measure): values by text and layer [b, l] or length}."""
    measures: dict[tuple[str, str], np.ndarray] = {}
    for network, profile in check.networks.items():
        for measure, array in {**profile.measures, **profile.notes}.items():
            measures[network, measure] = array
    for name in ATTENTION_LABELS:
        measures[WHOLE, f"attention_{name}"] = check.mean_attention(name)
    measures[WHOLE, "path_size"] = check.report.path_size
    return measures


def render_page(checks: Sequence[Checked], command: str) -> str:
    """Render the page as HTML, a section for each checkpoint.

    Args:
        checks: Measured checkpoints.
        command: Command that made the page.
    """
    return report.render(
        f"Rank collapse in {', '.join(Path(check.opened.name).name for check in checks)}",
        " ".join(map(write_introduction, checks)),
        [
            build_section(check, f"checkpoint-{i}" if i else "checkpoint", command)
            for i, check in enumerate(checks)
        ],
        "Means over texts. States by layer are those before the final norm, where there is one. "
        "Where a layer has made all tokens equal but for rounding, its bound is shown (≤).",
    )


def write_introduction(check: Checked) -> str:
    """Return a checkpoint's verdict, the inputs on which it was measured, and the layers where one
    token decides."""
    notes = [f" {row}: {layers}." for row, layers in check.find_one_token_layers().items()]
    return (
        f"{check.opened.name}: {check.write_verdict()} "
        f"{check.inputs.counts}: {check.inputs.description}" + "".join(notes)
    )


def build_section(check: Checked, name: str, command: str) -> report.Section:
    """Build a checkpoint's part of the page.

    Args:
        check: Results for one checkpoint.
        name: Anchor of the section.
        command: Command that made the page.
    """
    folded = {
        "How long are the paths?": tabulate_lengths(check.length_laws),
        "Massive activations": check.spike_rows(),
        "Measures": [{"measure": m, "what it is": MEANING[m]} for m in check.layer_means()],
    }
    return report.Section(
        name=name,
        title=check.opened.name,
        body=page_html.render_table(headline_rows(check)),
        figures=[(draw_files(figure)[".png"], caption) for figure, caption in plot_figures(check)],
        table=layer_rows(check),
        folded=[(title, page_html.render_table(rows)) for title, rows in folded.items() if rows],
        command=command,
    )


def headline_rows(check: Checked) -> list[dict[str, str]]:
    """List the headline numbers, each with a reference to compare it with.

    Args:
        check: Results for one checkpoint.
    """
    bounds, references = check.upper_bounds(), check.find_references()
    rows, is_random = [], check.opened.source.has_random_weights
    heading = f"this checkpoint, {RANDOM_WEIGHTS}" if is_random else "this checkpoint"
    for name, value in check.headline_numbers().items():
        sign = "≤ " if name in bounds else ""
        text = "none" if value is None else f"{sign}{value:.3g}"
        reference = references.get(name, "")
        rows.append({"quantity": name, heading: text, "to compare with": reference})
    return rows


def layer_rows(check: Checked) -> list[dict[str, str]]:
    """List all measures, a row for each layer: a deep network makes the table longer, not wider."""
    rows = []
    for layer in range(check.opened.source.config.depth + 1):
        row = {"layer": str(layer)}
        for measure, values in check.layer_means().items():
            network = measure.removeprefix("residual ratio, ")
            row[measure] = "—" if np.isnan(values[layer]) else f"{values[layer]:.3g}"
            if network in NETWORKS:
                row[measure] = check.format_ratio(network, layer)
        rows.append(row)
    return rows


def plot_figures(check: Checked) -> list[tuple[figures.Figure, str]]:
    """Plot the figures of a checkpoint; returns them with their captions.

    Args:
        check: Results for one checkpoint.
    """
    return [
        (
            residual_figure(check),
            f"Residual ratio by layer, also of {READ}, N(x), and of the same weights without skips "
            f"and MLPs ({ALONE}); in grey what rounding makes of equal tokens. "
            "Right: the largest token's share of the squared norm, and of the residual's; "
            "where that is above 1/2, the residual ratio is of one token. Bands over texts.",
        ),
        (
            path_length_figure(check.length_laws),
            "How long are the paths? Each path counted once; weighted by the share of each layer's "
            "attention branch in the stream (rollout); and by the size ‖C_k‖ of the exact sum over "
            "all paths of length k. Bands over texts. `rank-collapse depth` adds the loss.",
        ),
        (
            attention_figure(check),
            "Entropy of attention, and its weight on the first token (a sink) and on the token "
            "that gets most; means over heads and queries, bands over texts.",
        ),
    ]


@figures.styled
def residual_figure(check: Checked) -> figures.Figure:
    """Plot the residual ratio by layer, and the largest token's share."""
    limit = rounding_limit(check.opened.source.weights.dtype)
    networks = check.networks
    model_profile, read_profile = networks[WHOLE], networks[READ]
    curves = {name: profile["residual_ratio"] for name, profile in networks.items()}
    if np.allclose(model_profile["residual_ratio"], read_profile["residual_ratio"], rtol=1e-3):
        del curves[READ]
        curves = {f"{WHOLE}, and {READ}" if n == WHOLE else n: a for n, a in curves.items()}
    fig, ((ratios, spikes),) = figures.figure(1, 2, width=4.2, height=3.4)
    for index, (name, values) in enumerate(curves.items()):
        layers = np.arange(values.shape[1])
        figures.log_band(ratios, layers, np.maximum(values, limit / 100), name, index)
    ratios.set(yscale="log", ylabel="‖res(X)‖₁,∞ / ‖X‖₁,∞", title="residual ratio")
    if any(profile.rounding.any() for profile in networks.values()):
        ratios.axhspan(limit / 100, limit, color=figures.LIGHT_GREY, linewidth=0)
    figures.band(spikes, layers, model_profile["spike_share"], "of ‖X‖²", 3)
    figures.band(spikes, layers, model_profile["residual_spike"], "of ‖res(X)‖²", 4)
    spikes.set(ylim=(0, 1.05), title="largest token's share")
    spikes.axhline(0.5, color="#9A9A9A", lw=1)
    figures.finish_axes((ratios, spikes), "layer")
    return fig


@figures.styled
def attention_figure(check: Checked) -> figures.Figure:
    """Plot entropy and sinks of attention by layer."""
    fig, axes = figures.figure(1, 2, width=3.3, height=3.0)
    for index, (name, label) in enumerate(ATTENTION_LABELS.items()):
        ax, values = axes[0, min(index, 1)], check.mean_attention(name)
        figures.band(ax, np.arange(1, values.shape[1] + 1), values, label, index)
        ax.set(ylim=(0, 1.05 if index else 1.2 * values.max()))
    figures.finish_axes(tuple(axes[0]), "layer")
    return fig
