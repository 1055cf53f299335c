"""Finds the first layer at which two runs differ by more than rounding: `rank-collapse agree A B`.

    rank-collapse agree a.npz b.safetensors              (recordings: see docs/agree.md)
    rank-collapse agree FOLDER OTHER_FOLDER              (checkpoints, on the same tokens)
    rank-collapse agree FOLDER FOLDER --dtype=float32,bfloat16
    rank-collapse agree FOLDER FOLDER --attention=eager,sdpa --text=my.txt
    rank-collapse agree FOLDER FOLDER --with=torch,jax
    rank-collapse agree FOLDER b.safetensors --ids=5,8,13

For each sublayer it shows the relative error that comes in, the error that the sublayer adds, and
the error that rounding explains. It prints one sentence and writes a page with a figure and a table
(.html, .csv, .json). Checkpoints are run by transformers (pip install torch transformers), or by
rank_collapse itself.

Exit code: 0 if the runs agree to rounding, 1 if they differ, 2 after a mistake or without an
answer.
"""

import argparse
import csv
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse import __version__, report
from rank_collapse.agree.comparison import Agreement, compare_recordings
from rank_collapse.agree.recording import SUFFIXES, open_recording
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.printed import print_lines
from rank_collapse.report.agreement import agreement_figure
from rank_collapse.runs import files
from rank_collapse.runs.drawn import check_drawing, draw_files

COLUMNS = {
    "layer": "layer",
    "part": "part",
    "error_in": "error that comes in",
    "added": "error that is added",
    "predicted": "rounding explains",
    "excess": "added / explained",
    "excess_most": "the same, 95 % of tokens",
    "excess_worst": "the same, worst token",
    "worst_token": "worst token (example, position)",
    "scale": "best factor, less 1",
    "spikes": "spikes",
    "spikes_added": "error added to spikes",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
BACKENDS = ("torch", "jax")
NUM_TEXTS, MAX_TOKENS = 4, 64
_PAIRED = ("dtype", "attention", "backend")  # one value for both folders, or one for each
_FOLDER_FLAGS = (*_PAIRED, "text", "tokenizer", "token_ids", "ids", "num_texts", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `agree`."""
    for name in ("first", "second"):
        parser.add_argument(
            name,
            metavar="FILE_OR_FOLDER",
            help="a recording (.npz, .safetensors) or a checkpoint folder",
        )
    pair = "of checkpoint folders, one for both or two with a comma between"
    parser.add_argument("--dtype", help=f"dtype {pair}: {', '.join(DTYPES)} (default: float32)")
    parser.add_argument(
        "--attention", help=f"attention {pair}: {', '.join(ATTENTION)} (default: eager)"
    )
    parser.add_argument(
        "--with", dest="backend", help=f"framework {pair}: torch or jax (default: torch)"
    )
    parser.add_argument("--text", help="texts, one per paragraph (default: a text of this package)")
    parser.add_argument(
        "--tokenizer", help="folder with tokenizer files (default: the first FOLDER)"
    )
    parser.add_argument(
        "--token_ids", help="file of token ids, one text per line; it replaces --text"
    )
    parser.add_argument("--ids", action="append", help="token ids, such as 5,8,13; may be repeated")
    parser.add_argument(
        "--num_texts", type=int, help=f"largest number of texts (default: {NUM_TEXTS})"
    )
    parser.add_argument(
        "--max_tokens", type=int, help=f"most tokens of a text (default: {MAX_TOKENS})"
    )
    parser.add_argument(
        "--out",
        default="agree.html",
        help="the page; also writes .csv and .json (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the numbers, write no file")


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Run `agree`, and return its exit code.

    Args:
        flags: Parsed flags, from `add_arguments`.
        command: Words of the command line, for the page.
    """
    out = Path(flags.out)
    refuse_if(
        not out.absolute().parent.is_dir() or out.is_dir() or out.suffix != ".html",
        f"--out {out} is not an .html file in an existing folder",
    )
    if not flags.json:
        files.check_writable(out.absolute().parent)
        check_drawing(f"--out {out}", "--json does without")
    sources = [Path(flags.first), Path(flags.second)]
    for source in sources:
        refuse(
            (not source.exists(), f"{source} does not exist"),
            (
                not source.is_dir() and source.suffix not in SUFFIXES,
                f"{source} is neither a recording (.npz, .safetensors) nor a checkpoint folder",
            ),
        )
    replay = None
    with tempfile.TemporaryDirectory() as scratch:
        try:
            paths, replay = _record_folders(flags, sources, Path(scratch))
            agreement = compare_recordings(*map(open_recording, paths), replay)
        except ValueError as error:
            run = replay.run if replay else 0
            raise ValueError(_name_folders(str(error), scratch, sources, run)) from None
    line = shlex.join(["rank-collapse", *command])
    about = agreement.to_dict() | {
        "first_source": flags.first,
        "second_source": flags.second,
        "first_settings": _name_settings(flags, 0),
        "second_settings": _name_settings(flags, 1),
        "command": line,
        "rank_collapse": __version__,
    }
    if flags.json:
        print_lines(json.dumps(about))
        return agreement.exit_code
    contents = {
        out: render_page(agreement, about).encode(),
        out.with_suffix(".csv"): write_table(agreement).encode(),
        out.with_suffix(".json"): (json.dumps(about, indent=1) + "\n").encode(),
    }
    for path, content in contents.items():
        files.write_atomically(path, content)
    written = f"written to {', '.join(map(str, contents))}"
    print_lines(agreement.sentence, *describe(agreement), written)
    return agreement.exit_code


def describe(agreement: Agreement) -> list[str]:
    """Return remarks and the differences of the outputs as sentences.

    Args:
        agreement: The comparison.
    """
    outputs = "; ".join(f"{name}: {value:.3g}" for name, value in agreement.outputs.items())
    remarks = [f"{text[0].upper()}{text[1:]}." for text in agreement.remarks]
    return remarks + ([f"Of the outputs: {outputs}."] if outputs else [])


def write_table(agreement: Agreement) -> str:
    """Return the table of sublayers as CSV.

    Args:
        agreement: The comparison.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in agreement.rows:
        values = row._asdict() | {"worst_token": " ".join(map(str, row.worst_token))}
        writer.writerow([values[name] for name in COLUMNS])
    return text.getvalue()


def render_page(agreement: Agreement, about: dict[str, Any]) -> str:
    """Render the page as HTML.

    Args:
        agreement: The comparison.
        about: The object to write as JSON.
    """
    pictures, table = [], []
    if agreement.rows:
        columns = {
            name: np.array([getattr(row, name) for row in agreement.rows])
            for name in ("layer", "part", "error_in", "added", "predicted")
        }
        fault = agreement.first and (agreement.first["layer"], agreement.first["part"])
        picture = draw_files(agreement_figure(columns, fault))[".png"]
        pictures = [(picture, "Relative errors by layer, medians over tokens without spikes.")]
        table = [
            {label: _format(getattr(row, name)) for name, label in COLUMNS.items()}
            for row in agreement.rows
        ]
    section = report.Section(
        "agree",
        "Sublayers",
        about["command"],
        figures=pictures,
        table=table,
        details=f"rank_collapse {__version__}",
    )
    names = " and ".join(
        f"{about[f'{order}_source']} ({about[f'{order}_settings']})".removesuffix(" ()")
        for order in ("first", "second")
    )
    intro = " ".join([agreement.sentence, *describe(agreement)])
    return report.render(f"Do {names} agree?", intro, [section])


def _name_settings(flags, index):
    """Return what flags with two values ask of one of the folders: "bfloat16, sdpa"."""
    texts = (getattr(flags, name) or "" for name in _PAIRED)
    return ", ".join(text.split(",")[index] for text in texts if "," in text)


def _name_folders(message, scratch, sources, run):
    """Return a message with the folders in the place of their temporary recordings.

    Args:
        message: The message.
        scratch: Folder of the recordings.
        sources: Folders of both runs, recorded as a and b.
        run: Which of them was also recorded on the inputs of the other.
    """
    name = re.compile(re.escape(scratch) + r"/(\w+)\.safetensors")
    return name.sub(lambda match: str(sources[{"a": 0, "b": 1}.get(match[1], run)]), message)


def _format(value):
    """Return a value in the format of the page's table."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else value


def _record_folders(flags, sources, scratch):
    """Record checkpoint folders in temporary files; recordings stay as they are.

    Args:
        flags: Parsed flags.
        sources: Two paths, each of a recording or of a checkpoint folder.
        scratch: Folder for the temporary files.

    Returns:
        (paths of both recordings, path of a recording of one run on the inputs of the other). The
        second is None if there is no such recording.
    """
    if not any(source.is_dir() for source in sources):
        for name in _FOLDER_FLAGS:
            flag = "with" if name == "backend" else name
            refuse_if(
                getattr(flags, name) is not None,
                f"--{flag} is for checkpoint folders, and {flags.first} and {flags.second} are "
                "recordings",
            )
        return sources, None
    from rank_collapse.command import recorded

    options = {
        "dtype": _split(flags.dtype, "dtype", DTYPES, "float32"),
        "attention": _split(flags.attention, "attention", ATTENTION, "eager"),
        "backend": _split(flags.backend, "with", BACKENDS, "torch"),
    }
    tokens = recorded.read_tokens(flags, next(s for s in sources if s.is_dir()))
    paths: list[Path] = []
    forms: list[recorded.Form | None] = []
    for index, source in enumerate(sources):
        if not source.is_dir():
            paths.append(source)
            forms.append(None)
            continue
        form = recorded.Form(**{name: values[index] for name, values in options.items()})
        print_lines(f"{source}: {', '.join(form)}", file=sys.stderr)
        paths.append(scratch / f"{'ab'[index]}.safetensors")
        forms.append(form)
        recorded.record_folder(source, paths[-1], tokens, form)
    return paths, recorded.record_replay(sources, paths, tokens, forms)


def _split(text, flag, allowed, default):
    """Return the values for both runs of a flag.

    Raises:
        ValueError: A value that is not allowed, or more than two values.
    """
    values = (text or default).split(",")
    refuse_if(len(values) > 2, f"--{flag}={text} has more than two values")
    for value in values:
        refuse_if(value not in allowed, f"--{flag}={value} is not one of {', '.join(allowed)}")
    return values if len(values) == 2 else values * 2
