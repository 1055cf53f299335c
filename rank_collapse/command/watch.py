"""A training run while it runs: `rank-collapse watch FILE_OR_FOLDER`.

    rank-collapse watch results/sort/a          (a run of experiments, with --monitor)
    rank-collapse watch run/metrics.jsonl       (of rank_collapse.torch.watch or runs.metrics)
    rank-collapse watch trainer-output          (trainer_state.json of transformers)

Each line of metrics.jsonl is a JSON object: "step", optionally "seed", and numbers or lists with
one number per layer, such as those of `rc.monitor`. Any program can write it, for example with
rank_collapse.runs.metrics. The picture is figures/metrics.png in the run's folder. A run of several
networks has a file for each, metrics/<network>.jsonl, and a picture, figures/metrics-<network>.png.
One line reports each passed threshold, and a loss that is not a number. Ends with the run, as its
summary, its last step or `metrics.finish` says, or after --patience minutes without a new line.

In a Trainer's file "residual_ratio/layer_3", a number as `rank_collapse.torch.watch` passes it to
a logger, is "layer_3.residual_ratio".

Exit code: 0 no threshold was passed, 3 one was, 2 a mistake in the command, such as a threshold on
a metric that the file never had.
"""

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rank_collapse.command.checkpoint import check_drawing
from rank_collapse.extras import MissingPackage
from rank_collapse.measures.table import COLLAPSE
from rank_collapse.printed import one_line
from rank_collapse.report.alarms import Threshold, alarms, of_metric
from rank_collapse.report.metrics import MOST_PANELS, metrics_figure, names_of
from rank_collapse.runs import metrics
from rank_collapse.runs.drawn import drawn
from rank_collapse.runs.files import RunError, make_folder, write_atomically

PASSED = 3
STATE = "trainer_state.json"
# What reading another's JSON raises: no JSON, other types, numbers beyond floats, a file that left.
_MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    OSError,
)
_NO_METRIC = re.compile(r"step|epoch|total_flos|runtime|per_second")
_LAYER = re.compile(r"(.+)/(layer_\d+)")
pause = time.sleep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("run", metavar="FILE_OR_FOLDER", help="of the run")
    parser.add_argument("--once", action="store_true", help="read what is there, draw it and end")
    parser.add_argument("--stop", action="store_true", help="end at the first passed threshold")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="minutes without a new line after which to end (0: never)",
    )
    for side in ("below", "above"):
        text = f"name=value: passed when the metric is {side} it, at any layer; may be repeated"
        parser.add_argument(f"--{side}", action="append", default=[], help=text)


def run(given: argparse.Namespace, command: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if not (given.every >= 0.1 and given.patience >= 0):
        raise ValueError(
            f"--every {given.every} is below 0.1, or --patience {given.patience} below 0"
        )
    path, thresholds, own = Path(given.run), thresholds_of(given), own_thresholds(given)
    try:
        check_drawing("the picture")
        draws = True
    except MissingPackage as error:
        print(f"no picture: {error}", file=sys.stderr)
        draws = False
    said, came, watched, grown = [], set(), {}, time.monotonic()
    is_file = path.is_file() or path.suffix == ".jsonl"
    folder = path.parent if is_file else path
    if not folder.is_dir():
        raise RunError(f"{folder} does not exist: a folder is not waited for, a file in it is")
    absent = (
        f"{path if is_file else path / metrics.NAME} does not exist: "
        f"rank_collapse.torch.watch(model, log=FILE) and experiments with --monitor write it"
    )
    if not (sources(path) or given.once):
        print(f"waiting: {absent}", flush=True)
    while True:
        folder = folder_of(path)  # at each look: the run may only be about to make it
        complete = (folder / "summary.json").exists()  # before the files: they have all lines then
        for source in sources(path):
            if source not in watched:
                watched[source] = Watched(source, folder, thresholds)
            one = watched[source]
            rows = one.reader.read()
            came.update(name for row in rows for name in row)
            grown = time.monotonic() if rows else grown
            for alarm in alarms(rows, thresholds):
                which = one.network, alarm.metric, alarm.threshold, alarm.seed
                if which not in said:
                    said.append(which)
                    print(f"{one.network}: {alarm}" if one.network else alarm, flush=True)
        waited = (time.monotonic() - grown) / 60
        ended = [one.reader.ended for one in watched.values()]
        complete = complete or (all(ended) and bool(ended))
        last = complete or given.once or (given.stop and said) or (0 < given.patience < waited)
        for one in watched.values() if last else ():
            if getattr(one.reader, "error", None):
                raise one.reader.error
        for one in watched.values() if draws else ():
            one.draw(at_once=last)
        if last:
            break
        pause(given.every)
    if not complete and 0 < given.patience < waited:
        print(f"nothing new for {waited:.3g} minutes")
    if not watched:
        raise RunError(absent)
    for one in watched.values():
        if one.left_out:
            print(f"{one.picture} shows {MOST_PANELS} of {MOST_PANELS + one.left_out} metrics")
    where = ", ".join(str(one.picture) for one in watched.values() if one.drawn)
    ending = f"drawn in {where}" if where else "no metric yet" if draws else "not drawn"
    print(f"{len(said)} thresholds passed; {ending}")
    guarded = {of.name for name in came for of in of_metric(name, thresholds)}
    missing = [t.name for t in own if t.name not in guarded]
    if missing and not said:
        there = ", ".join(sorted(came - {"step", "seed"})) or "none"
        raise RunError(f"no metric {missing[0]!r} for its threshold; the run has {there}")
    return PASSED if said else 0


class Watched:
    """One file of metrics and its picture.

    Args:
        source: Of `sources`.
        folder: Of the run.
        thresholds: Drawn in the picture.

    Attributes:
        network: Which network of a run of several it is of; "".
        reader: Of its lines.
        picture: Where it is drawn.
        drawn: Whether it has been.
        left_out: Metrics for which the picture has no panel.
    """

    def __init__(self, source: Path, folder: Path, thresholds: list[Threshold]):
        self.network, self.reader = network_of(source, folder), reader_of(source)
        self.picture = folder / "figures" / f"metrics{self.network and f'-{self.network}'}.png"
        self.drawn, self.left_out = False, 0
        self._thresholds, self._rows, self._next = thresholds, 0, 0.0

    def draw(self, at_once: bool) -> None:
        """Writes the picture where there are new rows, for at most a tenth of the time."""
        begun = time.monotonic()
        if len(self.reader) == self._rows or (begun < self._next and not at_once):
            return
        rows = self.reader.rows
        names = names_of(rows)
        if not names:
            return
        make_folder(self.picture.parent)
        write_atomically(self.picture, drawn(metrics_figure(rows, self._thresholds))[".png"])
        self.drawn, self._rows, self.left_out = True, len(rows), max(0, len(names) - MOST_PANELS)
        self._next = time.monotonic() + 9 * (time.monotonic() - begun)


def folder_of(path: Path) -> Path:
    """The run's folder, of which a file may have been named."""
    if not path.is_file():
        return path
    return path.parent.parent if network_of(path, path.parent) else path.parent


def network_of(source: Path, folder: Path) -> str:
    """Which network of a run of several it is of; "" where there is one."""
    return source.stem if source.parent.name == metrics.FOLDER else ""


def thresholds_of(given: argparse.Namespace) -> list[Threshold]:
    """Those of the flags, and the usual ones of the metrics that the flags do not name."""
    own = own_thresholds(given)
    named = {threshold.name for threshold in own}
    return own + [usual for usual in COLLAPSE if usual.finite or usual.name not in named]


def own_thresholds(given: argparse.Namespace) -> list[Threshold]:
    """Those of the flags.

    Raises:
        ValueError: A flag that is not name=value.
    """
    own = []
    for flag in ("below", "above"):
        for text in getattr(given, flag):
            name, _, value = text.rpartition("=")
            try:
                own.append(Threshold(name, float(value), flag == "above"))
            except ValueError:
                name = ""
            if not name or not value.isascii() or not math.isfinite(own[-1].value):
                raise ValueError(f"--{flag}={text} is not name=value")
    return own


def sources(path: Path) -> list[Path]:
    """What a folder has: ours, or else a Trainer's; a file itself."""
    if path.is_file():
        return [path]
    several = sorted((path / metrics.FOLDER).glob("*.jsonl"))
    ours = [file for file in (path / metrics.NAME, *several) if file.is_file()]
    return ours or [path / STATE] * (newest_state(path) is not None)


def newest_state(folder: Path) -> Path | None:
    """The newest `trainer_state.json` of a run: its history is the longest."""
    found = (folder / STATE, *folder.glob(f"checkpoint-*/{STATE}"))
    there = [file for file in found if file.is_file()]
    return max(there, key=lambda file: file.stat().st_mtime_ns, default=None)


def reader_of(source: Path) -> Any:
    """What reads one of `sources`."""
    return TrainerState(source) if source.name == STATE else metrics.Reader(source)


class TrainerState:
    """The history of a Trainer, read as a whole at each look; see `metrics.Reader`.

    Attributes:
        error: `RunError` where nothing was ever read: the file may be just being written.
    """

    def __init__(self, path: Path):
        self.path, self.ended, self.error = path, False, None
        self._rows: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that was read, in order of steps."""
        return [self._rows[step] for step in sorted(self._rows)]

    def read(self) -> list[dict[str, Any]]:
        """Rows that are new, or have more metrics, since the last call."""
        known, rows = self._rows, {}
        try:
            for step, name, value in self._history():
                name = _LAYER.sub(r"\2.\1", name).replace("/", ".")
                rows.setdefault(step, {"step": step})[name] = float(value)
        except _MALFORMED as error:
            if not known:
                self.error = RunError(f"{self.path} has no metrics: {one_line(error, 200)}")
            return []
        self._rows, self.error = rows, None
        return [row for row in self.rows if len(row) > len(known.get(row["step"], ()))]

    def _history(self) -> Iterator[tuple[int, str, float]]:
        file = newest_state(self.path.parent)
        state = json.loads(file.read_bytes())
        self.ended = 0 < state.get("max_steps", 0) <= state.get("global_step", 0)
        for entry in state["log_history"]:
            for name, value in entry.items():
                if type(value) in (int, float) and not _NO_METRIC.search(name):
                    yield int(entry["step"]), name, value
