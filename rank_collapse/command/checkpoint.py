"""The output of a command about a checkpoint: its numbers by layer, its verdict, its files."""

import argparse
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse import pretrained
from rank_collapse.checks import refuse_if
from rank_collapse.command.checked import Checked
from rank_collapse.command.inputs import MAX_TOKENS, NUM_TEXTS, Inputs, Opened
from rank_collapse.command.progress import StepReporter, report_layers
from rank_collapse.printed import escape_cell, print_lines
from rank_collapse.runs import files
from rank_collapse.runs.drawn import check_drawing

MOST_TOKENS = 10**6

SOURCE = (
    "checkpoint folder as Hugging Face saves it; hf:NAME or hf:NAME@REVISION of its hub; "
    "random:NAME, random weights of the architecture NAME, a folder or one of "
    f"{', '.join(pretrained.PUBLISHED)}"
)


def add_arguments(parser: argparse.ArgumentParser, out: str, out_help: str) -> None:
    """Add the flags that choose the measurements and the output files.

    Args:
        parser: Parser of the command.
        out: Default of --out.
        out_help: Help text of --out.
    """
    for name, text in {
        "--text": "texts, one per paragraph, or a .tsv file (default: a text of this package)",
        "--tokenizer": "folder with tokenizer files (default: the checkpoint folder; without "
        "tokenizer files there, token ids are random)",
        "--token_ids": "file of token ids, one text per line; it replaces --text",
        "--inputs": "input of a model of images or sound: a .npy file with images [b, channels, "
        "height, width] or features [b, frames, bins] (default: random)",
    }.items():
        parser.add_argument(name, help=text)
    ids = "token ids of one text, such as 5,8,13; they replace --text; may be repeated"
    parser.add_argument("--ids", help=ids, action="append")
    texts = f"largest number of texts (default: {NUM_TEXTS}; with token ids, all)"
    parser.add_argument("--num_texts", type=int, help=texts)
    limit = f"most tokens of a text (default: {MAX_TOKENS}; token ids are not cut)"
    parser.add_argument("--max_tokens", type=int, help=limit)
    parser.add_argument("--out", default=out, help=f"{out_help} (default: %(default)s)")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print the numbers, write no file")
    printed.add_argument("--csv", action="store_true", help="print the table, write no file")


def check_output(flags: argparse.Namespace) -> None:
    """Check the flags before anything is measured.

    Args:
        flags: Parsed flags, from `add_arguments`.

    Raises:
        ValueError: --out names no .html file in an existing folder, or there are no texts.
        RunError: The folder of --out cannot be written to.
        MissingPackage: A picture has to be drawn, and the package that draws is missing.
    """
    out = Path(flags.out)
    if not out.absolute().parent.is_dir() or out.is_dir() or out.suffix != ".html":
        raise ValueError(f"--out {out} is not an .html file in an existing folder")
    for name in ("num_texts", "max_tokens"):
        value = getattr(flags, name)
        refuse_if(
            value is not None and not 1 <= value <= MOST_TOKENS,
            f"--{name} {value} is not from 1 to {MOST_TOKENS}",
        )
    if not (flags.json or flags.csv):
        files.check_writable(out.absolute().parent)
        check_drawing(f"--out {out}", "--json and --csv do without")


def measure_checkpoint(opened: Opened, inputs: Inputs) -> Checked:
    """Measure a checkpoint, and report its progress on standard error.

    Args:
        opened: An open checkpoint.
        inputs: Tokens or vectors that the checkpoint reads.
    """
    done = report_layers(opened, inputs, StepReporter())
    model_inputs = {"x": inputs.x, "mask": inputs.mask}
    report = pretrained.checkpoint_report(opened.source, model_inputs, done=done)
    return Checked(opened, inputs, report)


def write_outputs(
    flags: argparse.Namespace,
    lines: Iterable[Mapping[str, object]],
    rows: Iterable[Sequence[Any]],
    make_files: Callable[[Path], Mapping[Path, bytes]],
    sentences: Iterable[str],
) -> None:
    """Print or write the measurements.

    Args:
        flags: Parsed flags; --json, --csv and --out choose the outputs.
        lines: Objects that --json prints, one a line; numbers may be arrays.
        rows: Rows of the table, its head first.
        make_files: Makes the further files of --out, by path.
        sentences: Lines to print after all files are written.
    """
    if flags.json:
        for line in lines:
            print_lines(json.dumps(to_json(line)))
        return
    table_text = io.StringIO()
    writer = csv.writer(table_text, lineterminator="\n")
    writer.writerows(map(escape_cell, row) for row in rows)
    if flags.csv:
        print_lines(*table_text.getvalue().splitlines())
        return
    out = Path(flags.out)
    table = {out.with_suffix(".csv"): table_text.getvalue().encode()}
    contents = make_files(out) | table
    for path, content in contents.items():
        files.write_atomically(path, content)
    paths = [str(path) for path in contents if path != out]
    written = f"written to {', '.join([str(out), *paths[:-1]])} and {paths[-1]}"
    print_lines(*sentences, written)


def to_json(value: object) -> Any:
    """Convert a value to JSON: arrays to lists, and numbers that are not finite to None (null)."""
    if isinstance(value, Mapping):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [to_json(part) for part in (value.tolist() if hasattr(value, "tolist") else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
