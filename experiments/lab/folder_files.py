"""The files of a run folder: their names, and those that are read without opening the run.

    <folder>/config.json    flags and layout (compared on resume), execution, versions, devices,
                            git revision of all processes that wrote, names of the arrays
             results.csv    tidy rows, one per seed, layer, path length, ...
             arrays.npz     named arrays, also the cache from which an interrupted run resumes
             arrays.json    names of their dimensions, and what they are (`lab.dimensions`)
             checkpoints/   states of an unfinished computation, <step>.npz
             figures/       *.png, and *.pdf unless --nopdf
             models.safetensors
                            trained weights, where asked for (`rank_collapse.training.model_file`)
             summary.json   the run's headline numbers; its presence means the run is complete
             metrics.jsonl  scalars of a watched training, a line for each step
                            (`rank_collapse.runs.metrics`)
             models/, metrics/   the same two of a run of several networks, a file for each
             log.txt

Every file except metrics and log.txt is written under a temporary name and renamed, so a file is
either complete or absent. The checksums of arrays.npz show damage; names in config.json, with
shapes in summary.json, show an array that was removed. Files made from the arrays are made again if
they are missing, and results.csv also if it differs from them.
"""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path

from experiments.lab.provenance import JsonObject
from experiments.lab.shared_flags import FORMER_NAMES
from experiments.verdicts import TableRow
from rank_collapse.printed import escape_cell, unescape_cell
from rank_collapse.runs import metrics
from rank_collapse.runs.files import (
    RunError,
    damaged_file_error,
    describe_difference,
    read_object,
)

CONTENTS = (
    "config.json",
    "results.csv",
    "arrays.npz",
    "arrays.json",
    "summary.json",
    "log.txt",
    "models.safetensors",
    "report.html",
    metrics.NAME,
)
# What is made of the arrays, the summary first.
PRODUCTS = (
    "summary.json",
    "results.csv",
    "figures",
    "arrays.json",
    "models.safetensors",
    "models",
    "report.html",
)
LAYOUT = 4  # one more whenever names or shapes of what the experiments keep change
FOLDERS = ("checkpoints", "figures", "models", "points", metrics.FOLDER)


def table_bytes(rows: Iterable[TableRow]) -> bytes:
    """Writes rows as CSV: one column per key, in order of first appearance; without formulas."""
    rows = [{name: escape_cell(value) for name, value in row.items()} for row in rows]
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def read_rows(table: bytes) -> list[dict[str, str]]:
    """Reads the rows of a table that `table_bytes` wrote, with the texts as they were."""
    rows = csv.DictReader(io.StringIO(table.decode()))
    return [{name: unescape_cell(cell) for name, cell in row.items()} for row in rows]


def read_config(path: Path) -> JsonObject:
    """Reads the settings that determine the results of a run folder, by the present names of the
    flags.

    Raises:
        RunError: A damaged config.json.
    """
    content = read_object(path / "config.json")
    config = content.get("config")
    if not isinstance(config, dict) or "execution" not in content:  # of another program
        raise damaged_file_error(path / "config.json", "it has no config of a run")
    return {FORMER_NAMES.get(name, name): value for name, value in config.items()}


def read_summary(path: str | os.PathLike) -> JsonObject:
    """Reads the headline numbers of a complete run, without opening (locking) its folder.

    Raises:
        RunError: The run is not complete.
    """
    try:
        return read_object(Path(path) / "summary.json")
    except RunError as error:
        raise RunError(f"{path} has no summary: the run is not complete ({error})") from error


def check_config(path: Path, config: JsonObject) -> None:
    """Refuses a folder that was made with another config, or by another version.

    Args:
        path: The folder.
        config: As JSON stores it, that of the run that is to be there.

    Raises:
        RunError: The folder was made with another config, or by another version.
    """
    if changes := describe_difference(read_config(path), config):
        raise RunError(
            f"{path} was made with another config: {changes}; "
            "use another --run_name or --output_dir, or --overwrite, which deletes these "
            "results"
        )
    layout = read_object(path / "config.json").get("layout", 1)
    if layout != LAYOUT:
        raise RunError(
            f"{path} was made by another version of rank_collapse, with other arrays "
            f"(layout {layout} there, {LAYOUT} here); use that version, another --run_name or "
            "--output_dir, or --overwrite, which deletes these results"
        )
