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
             SHA256SUMS     of all that a complete run has written, but for log.txt: `manifest`

Every file but metrics and log.txt is written to a temporary name and renamed, so that one that is
there is whole. What was changed since is found when the folder is opened: tables, figures and
summaries are made again from the arrays; of any other file the one to delete is named. They are
made again too where the arrays or SHA256SUMS were deleted; all files are then sealed as they are.

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

from rank_collapse.runs import metrics, provenance, states
from rank_collapse.runs.checkpoints import Checkpoints
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
from rank_collapse.runs.manifest import NAME as SUMS, Manifest, text_sum, whole

CONTENTS = (
    "config.json",
    "results.csv",
    "arrays.npz",
    "summary.json",
    "log.txt",
    "models.safetensors",
    "report.html",
    metrics.NAME,
    SUMS,
)
LAYOUT = 2  # one more whenever names or shapes of what the experiments keep change
FOLDERS = ("checkpoints", "figures", "models", metrics.FOLDER)
_MADE_AGAIN = ("results.csv", "summary.json", "report.html")  # and figures, from the arrays


class RunFolder(Checkpoints):
    """One run's folder, locked for as long as the object is open. A context manager.

    Args:
        path: The folder; made with its parents. That of a finished run may be read-only.
        config: What determines the results (JSON values). A folder made with another one is
            refused.
        execution: What does not (number of devices, chunk size); recorded, never compared.
        overwrite: Delete what an earlier run left and start afresh.
        primary: False in all but one of the processes of a run: nothing is locked or written.
        wait: Seconds for which another process that has the folder is waited for.

    Attributes:
        path: The folder.
        config: As JSON stores it.
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
        primary: bool = True,
        wait: float = 0.0,
    ):
        self.path, self._place = Path(path), ""
        self._lease = None
        self._written: set[str] = set()
        self.config = config = states.as_json(config)
        # A finished run that cannot be written to is read, as by the other processes.
        read_only = not (overwrite or os.access(path, os.W_OK)) and whole(path, "summary.json")
        self.primary = primary = primary and not read_only
        if primary:
            make_folder(self.path)
            self._lease = lease(self.path, wait)
        try:
            if overwrite:
                self._delete(*CONTENTS, *FOLDERS)
            self._clear_unfinished()
            self._sums = Manifest(self.path)
            self._delete_changed()
            self.resumed = self._check(config)  # an earlier run of the same config was here
            if not self.resumed:
                text = {"config": config, "execution": states.as_json(execution or {})}
                text |= {"layout": LAYOUT, "environment": provenance.environment()}
                self._write_json("config.json", text)
                self._seal()
            saved = self.path / "arrays.npz"
            self._arrays = load_arrays(saved) if saved.exists() else {}
            if primary and self.resumed and (self._sums.begun or self._sums.lacks(saved.name)):
                self._begin_again()
            # Kept in memory: the primary's files may be there later than the others look for them.
            self._summary = self._read_json("summary.json")
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
        if self.primary:
            with writing(self.path / "log.txt"), open(self.path / "log.txt", "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")

    def append_metrics(
        self, step: int, values: Mapping[str, Any], *, seed: int, file: str = metrics.NAME
    ) -> None:
        """Appends a line to metrics.jsonl, or to a file in metrics/; see `metrics.append`."""
        if self.primary:
            self._note(file)
            metrics.append(self.path / file, step, values, seed=seed)

    def drop_metrics(
        self, seeds: Iterable[int], after: int = -1, *, file: str = metrics.NAME
    ) -> None:
        """Before some seeds are trained from a step on: deletes their lines of later steps."""
        if self.primary:
            self._note(file)
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
            figures: Draws each figure, by name.
            files: Makes the bytes of other files out of `CONTENTS`, by name; the figures are there.
            summary: Makes the headline numbers.
            shown: Which of its parts the run was asked for, where one folder may be asked for more
                or fewer: kept in the summary; if the files there show others, all are made again.
        """
        if shown is not None and (self.summary or {}).get("shown") != states.as_json(shown):
            self._summary = None
            self._delete("summary.json", "results.csv", "figures", *(files or {}))
        if self.primary:
            if rows is not None and not (self.path / "results.csv").exists():
                self.write_rows(rows())
            for name, draw in (figures or {}).items():
                if not self.has_figure(name):
                    self.save_figure(draw(), name)
            for name, make in (files or {}).items():
                if not (self.path / name).exists():
                    self.write_file(name, make())
        if self._summary is None:
            self.finish(dict(summary()) | ({} if shown is None else {"shown": shown}))
        self._seal()
        return self._summary

    @property
    def complete(self) -> bool:
        """Whether the run was finished, here or by an earlier process."""
        return self.summary is not None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json, which marks the run as complete, and drops the checkpoints."""
        summary = states.as_json(summary)
        self.drop_checkpoints()  # first: what is complete is not checked again
        self._write_json("summary.json", summary)
        self._summary = summary
        self._seal()

    @property
    def summary(self) -> dict[str, Any] | None:
        """The headline numbers of a complete run, else None."""
        return self._summary

    # Arrays: results and the cache of parts that are done.

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All saved arrays by name (a copy of the dictionary)."""
        return self._named(self._place)

    def _named(self, prefix):
        arrays = self._arrays.items()
        return {k.removeprefix(prefix): v for k, v in arrays if k.startswith(prefix)}

    def save_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Adds (or replaces) named arrays in arrays.npz."""
        self._arrays.update({self._place + n: np.asarray(value) for n, value in arrays.items()})
        if self.primary:
            self._note("arrays.npz")
            write_arrays(self.path / "arrays.npz", self._arrays)

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
        return self._named(f"{self._place}{part}/") or None

    def at(self, place: str) -> "RunFolder":
        """The folder, of whose arrays only those are seen whose names begin so."""
        view = copy.copy(self)
        view._place = place
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

    def _delete(self, *names):
        """Deletes some of what a run leaves, and nothing else that may lie in the folder."""
        if self.primary:
            delete(self.path, names)

    def _clear_unfinished(self):
        """Deletes what a process that was killed while it wrote has left of a file."""
        if self.primary:
            with writing(self.path):
                for pattern in (".*.tmp", *(f"{name}/.*.tmp" for name in FOLDERS)):
                    for unfinished in self.path.glob(pattern):
                        unfinished.unlink()

    def _note(self, name):
        """Before a file is written: its checksum is that of `_seal`."""
        self._sums.forget(name)
        self._written.add(name)

    def _seal(self):
        """Writes the checksums of what was written since the folder was opened."""
        if self.primary:
            text = json.dumps(self.config, sort_keys=True)
            self._sums.seal(self._written, text_sum(text))
            self._written.clear()

    def _delete_changed(self):
        """Deletes files that are not as they were written, where they are made again."""
        for name in self._sums.changed() if self.primary else ():
            if name not in _MADE_AGAIN and not name.startswith("figures/"):
                raise damaged(self.path / name, "its checksum does not match")
            self._delete(name)
            self.log(f"{name} was not as it was written: it is made again")

    def _begin_again(self):
        """Deletes what is made of the arrays, where these are gone or nothing says what it was."""
        if made := [n for n in (*_MADE_AGAIN, "figures") if (self.path / n).exists()]:
            self._delete(*made)
            self.log(f"the arrays or {SUMS} were deleted: {', '.join(made)} are made again")
        folders = (self.path, *(self.path / name for name in ("models", metrics.FOLDER)))
        files = {p.relative_to(self.path).as_posix() for f in folders for p in f.glob("[!.]*")}
        self._written |= {name for name in files if name not in ("log.txt", SUMS)}
        self._seal()

    def _check(self, config):
        """Whether the folder is of this config (True) or new (False)."""
        saved = self._read_json("config.json")
        if saved is None:
            known = self._sums.config == text_sum(json.dumps(config, sort_keys=True))
            others = {p.name for p in self.path.iterdir()} - {"log.txt", SUMS}
            if self.primary and not known and others.intersection(CONTENTS + FOLDERS):
                raise RunError(
                    f"{self.path} holds results without a config.json of this config; use another "
                    "folder (--overwrite deletes these results)"
                )
            return False
        old = saved.get("config")
        if not isinstance(old, dict):
            raise damaged(self.path / "config.json", "it has no config")
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

    def _read_json(self, name):
        path = self.path / name
        return read_object(path) if path.exists() else None

    def _write_json(self, name, value):
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name, data):
        if self.primary:
            path = self.path / name
            with writing(path.parent):
                path.parent.mkdir(exist_ok=True)
            self._note(name)
            write_atomically(path, data)


def read_summary(path: str | os.PathLike) -> dict[str, Any]:
    """The headline numbers of a complete run, without opening (locking) its folder.

    Raises:
        RunError: The run is not complete.
    """
    try:
        if not Manifest(path).has("summary.json", absent=True):
            raise damaged(Path(path) / "summary.json", "its checksum does not match")
        return read_object(Path(path) / "summary.json")
    except RunError as error:
        raise RunError(f"{path} has no summary: the run is not complete ({error})") from error
