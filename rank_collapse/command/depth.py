"""How much of its depth a language model uses: `rank-collapse depth FOLDER`.

    rank-collapse depth hf:gpt2
    rank-collapse depth my-run/checkpoint --text my.txt --out depth.html
    rank-collapse depth my-run/checkpoint --token_ids ids.txt --json
    rank-collapse depth random:my-run/checkpoint     (the same architecture, random weights)

Writes `rc.depth_report` of a few texts: the number of layers that a model uses by each definition
in the literature, and the measures by layer from which they are computed. The command also writes a
table by layer (.csv) and all numbers (.json).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rank_collapse import report
from rank_collapse.command import checkpoint, inputs
from rank_collapse.command.checked import describe_measurement
from rank_collapse.command.progress import StepReporter, report_layers, report_words
from rank_collapse.pretrained.report import tabulate_lengths
from rank_collapse.pretrained.used_depth import (
    DepthReport,
    depth_report,
    describe_missing_head,
    find_extremes,
)
from rank_collapse.printed import format_count
from rank_collapse.report import page as page_html
from rank_collapse.runs.drawn import draw_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `depth`."""
    parser.add_argument("source", metavar="FOLDER_OR_NAME", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "depth.html", "the page; also writes .csv and .json")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Run `depth`, and return its exit code.

    Args:
        flags: Parsed flags, from `add_arguments`.
        command: Words of the command line, for the page.
    """
    opened = inputs.open_source(flags.source)
    checkpoint.check_output(flags)
    if opened.source.unembedding is None:
        raise ValueError(describe_missing_head(opened.source, opened.name))
    batch = inputs.read_inputs(flags, opened)
    reporter = StepReporter()
    head = report_words(opened.source.unembedding, reporter)
    done = report_layers(opened, batch, reporter)
    measured = depth_report(opened.source, batch.x, mask=batch.mask, unembedding=head, done=done)
    layers, sentence = measured.by_layer(), f"{opened.about}{write_verdict(measured)}"
    about = describe_measurement(opened, batch, command) | {
        "verdict": sentence,
        "used": as_dicts(measured.used),
        "lengths": as_dicts(measured.lengths),
        "path_lengths": tabulate_lengths(measured.length_laws),
        "layers": layers,
    }

    def make_files(out: Path) -> dict[Path, bytes]:
        """Render the page and the JSON file, {path: bytes}."""
        rows = [
            *_definition_rows(measured.used, "layer"),
            *_definition_rows(measured.lengths, "head", " on a path"),
        ]
        lengths = tabulate_lengths(measured.length_laws)
        section = report.Section(
            "depth",
            f"{opened.about}{opened.name}",
            about["command"],
            figures=[(draw_files(measured.figure())[".png"], "By layer; bands over texts.")],
            table=rows,
            folded=[("How long are the paths?", page_html.render_table(lengths))],
        )
        intro = f"{sentence} {batch.counts}: {batch.description}"
        page = report.render(f"Depth used by {opened.name}", intro, [section])
        numbers = json.dumps(checkpoint.to_json(about), indent=1) + "\n"
        return {out: page.encode(), out.with_suffix(".json"): numbers.encode()}

    columns = [*zip(*layers.values(), strict=True)]
    rows = [("weights", "layer", *layers)]
    rows += [(opened.weights, layer, *values) for layer, values in enumerate(columns)]
    sentences = [*f"{opened.about}{measured}".split("\n"), batch.description]
    checkpoint.write_outputs(flags, [about], rows, make_files, sentences)
    return 0


def as_dicts(definitions: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Convert named tuples by name to JSON objects."""
    return {name: definition._asdict() for name, definition in definitions.items()}


def write_verdict(measured: DepthReport) -> str:
    """Return one sentence made of the numbers.

    Args:
        measured: Report of the checkpoint.
    """
    (lowest_name, lowest), (highest_name, highest) = find_extremes(measured.used)
    heads = "; ".join(f"{name} {estimate.length}" for name, estimate in measured.lengths.items())
    return (
        f"Of {format_count(measured.depth, 'layer')} the definitions count from {lowest} "
        f"(“{lowest_name}”) to "
        f"{highest} (“{highest_name}”); of heads on a path: {heads}."
    )


def _definition_rows(definitions, noun, place=""):
    """Yield rows of the table: the number of layers or heads by each definition, and its
    source."""
    for name, (count, definition, source) in definitions.items():
        number = "none" if count is None else f"{format_count(count, noun)}{place}"
        yield {"by": name, "used": number, "definition": definition, "source": source}
