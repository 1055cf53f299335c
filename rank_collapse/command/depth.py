"""How much of its depth a language model uses: `rank-collapse depth FOLDER`.

    rank-collapse depth hf:gpt2
    rank-collapse depth my-run/checkpoint --text my.txt --out depth.html
    rank-collapse depth my-run/checkpoint --token_ids ids.txt --json

`rc.depth_report` of a few texts: layers used by each definition of the literature, and by layer
what they are computed of. Beside the page are a table by layer (.csv) and all numbers (.json).
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rank_collapse import __version__, report
from rank_collapse.command import checkpoint, inputs
from rank_collapse.pretrained.depth import DepthReport, depth_report
from rank_collapse.runs.drawn import drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("source", metavar="FOLDER_OR_NAME", help=checkpoint.SOURCE)
    checkpoint.add_arguments(parser, "depth.html", "the page, beside it .csv and .json")


def run(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    one = inputs.opened(given.source)
    checkpoint.check_output(given)
    if one.source.unembedding is None:
        raise ValueError(f"{one.name} is no language model: it has no unembedding")
    used = inputs.inputs_of(given, one)
    found = depth_report(one.source, used.x, mask=used.mask, **checkpoint.progress(one, used))
    layers, text = found.by_layer(), str(found)
    line = shlex.join(["python", "-m", "rank_collapse", *command])
    about = {"source": one.name, "command": line, "tokens": used.made}
    about |= {"rank_collapse": __version__, "verdict": verdict(found)}
    used_by = {"used": found.used, "lengths": found.lengths}
    about |= {
        key: {name: one._asdict() for name, one in own.items()} for key, own in used_by.items()
    }

    def written(out: Path) -> dict[Path, bytes]:
        counted = [*_counted(found.used, "layers"), *_counted(found.lengths, "heads on a path")]
        section = report.Section(
            "depth",
            one.name,
            line,
            figures=[(drawn(found.figure())[".png"], "By layer; bands over texts.")],
            table=counted,
        )
        intro = f"{verdict(found)} {used.counts}: {used.made}"
        page = report.render(f"Depth used by {one.name}", intro, [section])
        numbers = json.dumps(checkpoint.plain(about | {"layers": layers}), indent=1) + "\n"
        return {out: page.encode(), out.with_suffix(".json"): numbers.encode()}

    rows = [("layer", *layers), *zip(range(found.depth + 1), *layers.values(), strict=True)]
    checkpoint.write(given, [about | {"layers": layers}], rows, written, [text, used.made])
    return 0


def verdict(found: DepthReport) -> str:
    """One sentence made of the numbers."""
    layers = {name: one.layers for name, one in found.used.items() if one.layers is not None}
    least, most = min(layers, key=layers.__getitem__), max(layers, key=layers.__getitem__)
    heads = "; ".join(f"{name} {one.length}" for name, one in found.lengths.items())
    return (
        f"Of {found.depth} layers the definitions count from {layers[least]} (“{least}”) to "
        f"{layers[most]} (“{most}”); of heads on a path: {heads}."
    )


def _counted(definitions, what):
    """Rows of the table: how many of what by which definition, and its source."""
    for name, (count, *about) in definitions.items():
        number = "none" if count is None else f"{count} {what}"
        yield {"by": name, "used": number} | dict(zip(("definition", "source"), about, strict=True))
