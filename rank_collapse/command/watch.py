"""Reads the metrics of a training run so far: `rank-collapse watch FILE_OR_FOLDER`.

    rank-collapse watch results/sort/a          (a run of experiments, with --monitor)
    rank-collapse watch run/metrics.jsonl       (of rank_collapse.torch.watch or runs.metrics)
    rank-collapse watch trainer-output          (trainer_state.json of transformers)
    watch -n 30 rank-collapse watch run         (every 30 seconds)

Each line of metrics.jsonl is a JSON object: "step", optionally "seed", and numbers or lists with
one number per layer, such as those of `rc.monitor`. Any program can write it. It prints one line
for each passed threshold, and draws a picture named after the file, figures/metrics.png in the
run's folder. Metrics that passed a threshold come first in it. A run of several networks has a file
for each, metrics/<network>.jsonl, and a picture, figures/metrics-<network>.png.
In a Trainer's file "residual_ratio/layer_3" is layer 3 of "residual_ratio".

Exit code: 0 if no value is beyond a threshold, 3 if one is, 2 for a mistake, such as a threshold on
a metric that the file does not have.
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rank_collapse.extras import MissingPackage
from rank_collapse.measures.table import COLLAPSE
from rank_collapse.printed import format_count, print_lines
from rank_collapse.regular import read_regular
from rank_collapse.report.alarms import Threshold, find_alarms, metric_thresholds
from rank_collapse.report.metrics import MOST_PANELS, metric_names, metrics_figure
from rank_collapse.runs import metrics
from rank_collapse.runs.drawn import check_drawing, draw_files
from rank_collapse.runs.files import RunError, damaged_file_error, make_subfolder, write_atomically

PASSED = 3
STATE = "trainer_state.json"
_NO_METRIC = re.compile(r"step|epoch|total_flos|runtime|per_second")
_LAYER = re.compile(r"(.+)/layer_(\d{1,4})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `watch`."""
    parser.add_argument(
        "run", metavar="FILE_OR_FOLDER", help="file with the metrics of a run, or its folder"
    )
    for side in ("below", "above"):
        text = f"name=value: report a metric that is {side} the value at any layer; may be repeated"
        parser.add_argument(f"--{side}", action="append", default=[], help=text)


def run(flags: argparse.Namespace, command: Sequence[str]) -> int:
    """Run `watch`, and return its exit code.

    Args:
        flags: Parsed flags, from `add_arguments`.
        command: Words of the command line.
    """
    flag_thresholds, files = parse_thresholds(flags), find_files(Path(flags.run))
    flag_names = {threshold.name for threshold in flag_thresholds}
    thresholds = [
        *flag_thresholds,
        *(usual for usual in COLLAPSE if usual.finite or usual.name not in flag_names),
    ]
    rows = {file: read_rows(file) for file in files}
    passed = 0
    for file, file_rows in rows.items():
        network = network_name(file)
        for alarm in find_alarms(file_rows, thresholds):
            passed += 1
            print_lines(f"{network}: {alarm}" if network else alarm)
    try:
        check_drawing("the picture")
        pictures = [draw_picture(file, file_rows, thresholds) for file, file_rows in rows.items()]
        paths = [str(picture) for picture in pictures if picture is not None]
        pictures_text = ", ".join(paths) if paths else "no metric yet"
    except MissingPackage as error:
        pictures_text = f"no picture: {error}"
    print_lines(f"{format_count(passed, 'threshold')} passed; {pictures_text}")
    _check_metrics(itertools.chain.from_iterable(rows.values()), flag_thresholds)
    return PASSED if passed else 0


def _check_metrics(rows, flag_thresholds):
    """Raise an error for a threshold of the flags on a metric that no row has."""
    names = {name for row in rows for name in row}
    guarded = {t.name for name in names for t in metric_thresholds(name, flag_thresholds)}
    missing = sorted({threshold.name for threshold in flag_thresholds} - guarded)
    if missing:
        available = ", ".join(sorted(names - {"step", "seed"})) or "none"
        raise RunError(f"a threshold names {missing[0]!r}, but the run has the metrics {available}")


def parse_thresholds(flags: argparse.Namespace) -> list[Threshold]:
    """Parse the thresholds of the flags.

    Args:
        flags: Parsed flags, from `add_arguments`.

    Raises:
        ValueError: A flag that is not name=value.
    """
    thresholds = []
    for flag in ("below", "above"):
        for text in getattr(flags, flag):
            name, _, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not name or not math.isfinite(value):
                raise ValueError(f"--{flag}={text} is not name=value")
            thresholds.append(Threshold(name, value, above=flag == "above"))
    return thresholds


def find_files(path: Path) -> list[Path]:
    """Find the files of a run: the file itself; in a folder ours, or else the newest of a Trainer.

    Args:
        path: File or folder of the run.

    Raises:
        RunError: There is no such file.
    """
    if path.is_file():
        return [path]
    ours = [path / metrics.NAME, *sorted((path / metrics.FOLDER).glob("*.jsonl"))]
    theirs = [path / STATE, *path.glob(f"checkpoint-*/{STATE}")]
    our_files = [file for file in ours if file.is_file()]
    newest = max(filter(Path.is_file, theirs), key=lambda f: f.stat().st_mtime_ns, default=None)
    if not our_files and newest is None:
        if not path.exists():
            raise RunError(f"{path} does not exist")
        raise RunError(
            f"{path} has no {metrics.NAME}, which rank_collapse.torch.watch(model, log=FILE) and "
            f"experiments with --monitor write, and no {STATE} of a Trainer"
        )
    return our_files or [newest]


def read_rows(file: Path) -> list[dict[str, object]]:
    """Read the rows of a file of ours or of a Trainer.

    Raises:
        RunError: The file cannot be read, or no line of it has metrics.
    """
    if file.name == STATE:
        return trainer_rows(file)
    rows = metrics.read(file)
    if not rows and file.stat().st_size:
        raise RunError(f'{file} has no line of metrics, such as {{"step": 1, "loss": 2.0}}')
    return rows


def network_name(file: Path) -> str:
    """Return the network's name in a run of several networks; "" in a run of one."""
    return file.stem if file.parent.name == metrics.FOLDER else ""


def picture_name(file: Path) -> str:
    """Return the name of a file's picture, without its ending, unique in the run's folder.

    - Metrics of a network in a run of several: metrics-NETWORK.
    - State of a Trainer: the file's name without .json.
    - Any other file: its name without .jsonl. If another file's picture would take this name, or
      nothing would remain, it is the file's whole name.

    Args:
        file: Path of a file with metrics.
    """
    network = network_name(file)
    if network:
        return f"{metrics.FOLDER}-{network}"
    if file.name == STATE:
        return file.stem
    name = file.name.removesuffix(".jsonl")
    if not name:
        return file.name
    same_named = [file.with_name(name)]  # files whose pictures would take this name
    prefix = f"{metrics.FOLDER}-"
    if name.startswith(prefix):  # as the picture of a network
        same_named.append(file.parent / metrics.FOLDER / file.name.removeprefix(prefix))
    is_taken = any(other != file and other.is_file() for other in same_named)
    return file.name if is_taken else name


def draw_picture(
    file: Path, rows: Sequence[object], thresholds: Sequence[Threshold]
) -> Path | None:
    """Write the picture of a file; return None where it has no metric yet.

    Args:
        file: Path of a file with metrics.
        rows: Rows of the file.
        thresholds: Thresholds, which are drawn as lines.
    """
    names = metric_names(rows)
    if not names:
        return None
    network = network_name(file)
    folder = file.parent.parent if network else file.parent
    if folder.name.startswith("checkpoint-"):
        folder = folder.parent
    picture = folder / "figures" / f"{picture_name(file)}.png"
    make_subfolder(picture.parent)
    write_atomically(picture, draw_files(metrics_figure(rows, thresholds))[".png"])
    if len(names) > MOST_PANELS:
        text = f"{picture} shows {MOST_PANELS} of {len(names)} metrics"
        print_lines(text, file=sys.stderr)
    return picture


def trainer_rows(file: Path) -> list[dict[str, object]]:
    """Read the history of a Trainer as `metrics.read` has rows, in order of steps.

    Args:
        file: trainer_state.json.

    Raises:
        RunError: The file is not a Trainer's history.
    """
    rows: dict[int, dict[str, object]] = {}
    try:
        for entry in json.loads(read_regular(file))["log_history"]:
            step = int(entry["step"])
            rows.setdefault(step, {"step": step}).update(_select_metrics(entry))
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise damaged_file_error(file, error) from None
    return [rows[step] for step in sorted(rows)]


def _select_metrics(entry):
    """Select the numbers of an entry of the history; "name/layer_k" as an array [l] by name."""
    values, layers = {}, {}
    for name, value in entry.items():
        if type(value) not in (int, float) or _NO_METRIC.search(name):
            continue
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(match[1].replace("/", "."), {})[int(match[2])] = float(value)
        else:
            values[name.replace("/", ".")] = float(value)
    for name, by_layer in layers.items():
        values[name] = np.array([by_layer.get(k, np.nan) for k in range(max(by_layer) + 1)])
    return values
