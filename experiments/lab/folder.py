"""Run folders: all files of one run of an experiment, and how a run resumes.

    <folder>/config.json    flags and layout (compared on resume), execution, versions, devices,
                            git revision
             results.csv    tidy rows, one per seed, layer, path length, ...
             arrays.npz     named arrays, also the cache from which an interrupted run resumes
             checkpoints/   states of an unfinished computation, <step>.npz
             figures/       *.png and *.pdf
             models.safetensors
                            trained weights, where asked for (`rank_collapse.training.model_file`)
             summary.json   the run's headline numbers; its presence means the run is complete
             metrics.jsonl  scalars of a watched training, a line for each step (see `metrics`)
             models/, metrics/   the same two of a run of several networks, a file for each
             log.txt

Every file but metrics and log.txt is written to a temporary name and renamed, so that one that is
there is whole. arrays.npz is a zip file, whose checksums show damage; what is made of the arrays is
made again where it is missing.

    with RunFolder("results/sort/a", {"depth": 6, "seed": 0}) as run:
        curves = run.cached("curves", lambda: {"loss": train()})   # computed once, then read
        summary = run.publish(
            rows=lambda: rows_of(curves),                          # each only where its file is
            figures={"loss": lambda: loss_figure(curves)},         # missing
            summary=lambda: {"loss": float(curves["loss"].mean())},
        )
"""

import copy
import csv
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab import provenance
from experiments.lab.checkpoints import Checkpoints
from rank_collapse.runs import metrics, states
from rank_collapse.runs.drawn import OPTIONS, drawn
from rank_collapse.runs.files import (
    RunError,
    damaged,
    delete,
    difference,
    lease,
    load_arrays,
    make_folder,
    read_object,
    write_arrays,
    write_atomically,
    writing,
)

CONTENTS = (
    "config.json",
    "results.csv",
    "arrays.npz",
    "summary.json",
    "log.txt",
    "models.safetensors",
    "report.html",
    metrics.NAME,
)
PAUSE, SHARE = 2.0, 0.1  # seconds between two writes at least, and share of the time they may take
LAYOUT = 3  # one more whenever names or shapes of what the experiments keep change
FOLDERS = ("checkpoints", "figures", "models", "points", metrics.FOLDER)


class RunFolder(Checkpoints):
    """One run's folder, locked for as long as the object is open. A context manager.

    Args:
        path: The folder; made with its parents. That of a finished run may be read-only.
        config: What determines the results (JSON values). A folder made with another one is
            refused.
        execution: What does not (number of devices, chunk size); recorded, never compared.
        overwrite: Delete what an earlier run left and start afresh.
        read_only: Whether the folder stays as it is, unlocked.

    Attributes:
        path: The folder.
        config: As JSON stores it.
        writable: Whether this object writes.
        resumed: Whether an earlier run of the same config had been here.

    Raises:
        RunError: Folder of another config, in use by another process, not writable, or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        config: Mapping[str, Any],
        *,
        execution: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        read_only: bool = False,
    ):
        self.path, self._prefix, self._lease = Path(path), "", None
        self._written, self._pause, self._unwritten = time.monotonic(), PAUSE, False
        self.config = config = states.as_json(config)
        finished = (self.path / "summary.json").exists() and not overwrite
        self.writable = not (read_only or (finished and not os.access(path, os.W_OK)))
        if self.writable:
            make_folder(self.path)
            self._lease = lease(self.path)
        try:
            if overwrite:
                delete(self.path, (*CONTENTS, *FOLDERS))
            self._clear_unfinished()
            self.resumed = self._check(config)
            if not self.resumed:
                text = {"config": config, "execution": states.as_json(execution or {})}
                text |= {"layout": LAYOUT, "environment": provenance.environment()}
                self._write_json("config.json", text)
            saved = self.path / "arrays.npz"
            self._arrays = load_arrays(saved) if saved.exists() else {}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lease; the folder may then be opened by another process."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    # Small results.

    def log(self, message: str) -> None:
        """Appends a line with the time to log.txt."""
        if self.writable:
            with writing(self.path / "log.txt"), open(self.path / "log.txt", "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def append_metrics(
        self, step: int, values: Mapping[str, Any], *, seed: int, file: str = metrics.NAME
    ) -> None:
        """Appends a line to metrics.jsonl, or to a file in metrics/; see `metrics.append`."""
        metrics.append(self.path / file, step, values, seed=seed)

    def drop_metrics(
        self, seeds: Iterable[int], after: int = -1, *, file: str = metrics.NAME
    ) -> None:
        """Before some seeds are trained from a step on: deletes their lines of later steps."""
        metrics.drop(self.path / file, seeds, after)

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes results.csv, whole: one column per key, in order of first appearance."""
        rows = list(rows)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._write("results.csv", text.getvalue().encode())

    def write_file(self, name: str, data: bytes) -> None:
        """Writes one of `CONTENTS`, or a file in one of `FOLDERS`, beside the results, whole.

        Raises:
            ValueError: Another name, which --overwrite would leave behind.
        """
        if name not in CONTENTS and os.path.dirname(name) not in FOLDERS:
            raise ValueError(f"{name!r} is not one of {CONTENTS}, nor in one of {FOLDERS}")
        self._write(name, data)

    def publish(
        self,
        *,
        rows: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
        figures: Mapping[str, Callable[[], Any]] | None = None,
        files: Mapping[str, Callable[[], bytes]] | None = None,
        summary: Callable[[], Mapping[str, Any]],
        shown: Any = None,
    ) -> dict[str, Any]:
        """Writes the missing tables and figures of a finished run; returns the summary.

        Everything is made from saved arrays, so that a deleted file comes back without computing
        anything again. The summary comes last: its presence marks the run as complete.

        Args:
            rows: Makes the rows of results.csv.
            figures: Draws each figure, by name; None where there is nothing to draw.
            files: Makes the bytes of other files out of `CONTENTS`, by name; the figures are there.
            summary: Makes the headline numbers.
            shown: Which of its parts the run was asked for, where one folder may be asked for more
                or fewer: kept in the summary; if the files there show others, all are made again.
        """
        if not self.writable:
            return self.summary
        if shown is not None and (self.summary or {}).get("shown") != states.as_json(shown):
            delete(self.path, ("summary.json", "results.csv", "figures", *(files or {})))
        if rows is not None and not (self.path / "results.csv").exists():
            self.write_rows(rows())
        for name, draw in (figures or {}).items():
            figure = None if self.has_figure(name) else draw()
            if figure is not None:
                self.save_figure(figure, name)
        for name, make in (files or {}).items():
            if not (self.path / name).exists():
                self.write_file(name, make())
        if self.summary is None:
            self.finish(dict(summary()) | ({} if shown is None else {"shown": shown}))
        return self.summary

    @property
    def complete(self) -> bool:
        """Whether the run was finished, here or by an earlier process."""
        return self.summary is not None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as complete; drops checkpoints and points/."""
        self.drop_checkpoints()  # first: what is complete is not checked again
        delete(self.path, ("points",))
        self._write_json("summary.json", states.as_json(summary))

    @property
    def summary(self) -> dict[str, Any] | None:
        """The headline numbers of a complete run, else None."""
        path = self.path / "summary.json"
        return read_object(path) if path.exists() else None

    # Arrays: results and the cache of parts that are done.

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All saved arrays by name (a copy of the dictionary)."""
        return self._named(self._prefix)

    def _named(self, prefix):
        arrays = self._arrays.items()
        return {k.removeprefix(prefix): v for k, v in arrays if k.startswith(prefix)}

    def save_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Adds (or replaces) named arrays in arrays.npz, which is written whole."""
        begun = time.monotonic()
        self._arrays.update({self._prefix + n: np.asarray(value) for n, value in arrays.items()})
        write_arrays(self.path / "arrays.npz", self._arrays)
        self._written, self._unwritten = time.monotonic(), False
        self._pause = max(PAUSE, (self._written - begun) / SHARE)

    def keep_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Adds named arrays, and writes them where the last time is long enough ago: of many small
        chunks all arrays would be written anew for each. `flush_arrays` writes what is left."""
        self._arrays.update({self._prefix + n: np.asarray(value) for n, value in arrays.items()})
        self._unwritten = True
        if time.monotonic() - self._written > self._pause:
            self.save_arrays({})

    def flush_arrays(self) -> None:
        """Writes arrays that `keep_arrays` has not written yet."""
        if self._unwritten:
            self.save_arrays({})

    def cached(self, part: str, compute: Callable[[], Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """The arrays of one part of the run: read where saved before, else computed and saved.

        Args:
            part: Name of the part; its arrays are stored as "part/name".
            compute: Called without arguments when the part is missing; returns named arrays.
        """
        if self.part(part) is None:
            computed = compute()
            if not computed:
                raise ValueError(f"part {part!r} computed no arrays")
            self.save_arrays({f"{part}/{name}": value for name, value in computed.items()})
        return self.part(part)

    def part(self, part: str) -> dict[str, np.ndarray] | None:
        """The saved arrays of a part, or None where it has not been computed."""
        return self._named(f"{self._prefix}{part}/") or None

    def at(self, prefix: str) -> "RunFolder":
        """The folder, of whose arrays only those are seen whose names begin so."""
        view = copy.copy(self)
        view._prefix = prefix
        return view

    # Figures.

    def save_figure(self, figure: Any, name: str) -> None:
        """Writes figures/<name>.png and .pdf of a matplotlib figure."""
        for suffix, data in drawn(figure).items():
            self._write(f"figures/{name}{suffix}", data)

    def has_figure(self, name: str) -> bool:
        """Whether both files of a figure exist."""
        return all((self.path / "figures" / f"{name}{s}").is_file() for s in OPTIONS)

    # How it is done.

    def _clear_unfinished(self):
        """Deletes what a process that was killed while it wrote has left of a file."""
        with writing(self.path):
            for pattern in (".*.tmp", *(f"{name}/.*.tmp" for name in FOLDERS)):
                for unfinished in self.path.glob(pattern) if self.writable else ():
                    unfinished.unlink()

    def _check(self, config):
        """Whether the folder is of this config (True) or new (False)."""
        path = self.path / "config.json"
        if not path.exists():
            others = {p.name for p in self.path.iterdir()} - {"log.txt"}
            if others.intersection(CONTENTS + FOLDERS):
                raise RunError(
                    f"{self.path} holds results without a config.json; use another folder "
                    "(--overwrite deletes these results)"
                )
            return False
        saved = read_object(path)
        old = saved.get("config")
        if not isinstance(old, dict):
            raise damaged(path, "it has no config")
        if json.dumps(old, sort_keys=True) != json.dumps(config, sort_keys=True):
            raise RunError(
                f"{self.path} was made with another config: {difference(old, config)}; use "
                "another --run_name or --output_dir, or --overwrite, which deletes these results"
            )
        layout = saved.get("layout", 1)
        if layout != LAYOUT:
            raise RunError(
                f"{self.path} was made by another version of rank_collapse, with other arrays "
                f"(layout {layout} there, {LAYOUT} here); use that version, another --run_name or "
                "--output_dir, or --overwrite, which deletes these results"
            )
        return True

    def _write_json(self, name, value):
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name, data):
        path = self.path / name
        with writing(path.parent):
            path.parent.mkdir(exist_ok=True)
        write_atomically(path, data)


def read_summary(path: str | os.PathLike) -> dict[str, Any]:
    """The headline numbers of a complete run, without opening (locking) its folder.

    Raises:
        RunError: The run is not complete.
    """
    try:
        return read_object(Path(path) / "summary.json")
    except RunError as error:
        raise RunError(f"{path} has no summary: the run is not complete ({error})") from error
