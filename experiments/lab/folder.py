"""Run folders: all files of one run of an experiment, and how a run resumes.

    with RunFolder("results/sort/a", {"depth": 6, "seed": 0}) as run:
        curves = run.cached("curves", lambda: {"loss": train()})   # computed once, then read
        run.save_figure("loss", draw_loss(curves))                 # where its files are missing
        run.save_table(list_losses(curves))
        run.finish({"loss": float(curves["loss"].mean())})

`folder_files` says which files these are.
"""

import collections
import contextlib
import copy
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from experiments.lab import provenance
from experiments.lab.folder_files import (
    CONTENTS,
    FOLDERS,
    LAYOUT,
    PRODUCTS,
    check_config,
    read_config,
    table_bytes,
)
from experiments.lab.provenance import LATER, REDRAWN, JsonObject
from experiments.verdicts import TableRow
from rank_collapse.printed import escape_text
from rank_collapse.regular import read_regular
from rank_collapse.report.figures import Figure
from rank_collapse.runs import states
from rank_collapse.runs.drawn import OPTIONS, draw_files
from rank_collapse.runs.files import (
    RunError,
    check_no_links,
    damaged_file_error,
    delete_files,
    delete_temporary,
    load_arrays,
    lock_folder,
    make_folder,
    make_subfolder,
    open_log,
    read_object,
    write_arrays,
    write_atomically,
)

PAUSE, SHARE = 2.0, 0.1  # seconds between two writes at least, and share of the time they may take


class RunFolder(contextlib.ExitStack):
    """One run's folder, locked while the object is open. A context manager.

    Args:
        path: The folder; made with its parents.
        config: Settings that determine the results (JSON values). A folder made with another config
            is refused.
        execution: Settings that do not determine them (number of devices, chunk size), and the
            command; recorded, never compared. The folder has those of the last process that
            measured: its command alone asks for all draws.
        overwrite: Delete the results of an earlier run and start afresh.
        read_only: Whether the folder is only read, without a lock.
        figure_files: Endings of the files of each figure; others are neither drawn nor missed.

    Attributes:
        path: The folder.
        writable: Whether this object writes.
        resumed: Whether the folder already had a run of the same config.

    Raises:
        RunError: Folder of another config, in use by another process, not writable, or damaged.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        config: JsonObject,
        *,
        execution: JsonObject | None = None,
        overwrite: bool = False,
        read_only: bool = False,
        figure_files: Collection[str] = tuple(OPTIONS),
    ):
        super().__init__()
        self.path, self._prefix, self._config = Path(path), "", states.as_json(config)
        # {prefix: {name after it: array}} of every beginning of a name that ends at a "/".
        self._arrays: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
        self._last_write, self._pause, self._unwritten = time.monotonic(), PAUSE, False
        # Shared by all views: names that config.json lists, and environments that it has.
        self._listed: set[str] = set()
        self._environments: list[JsonObject] = []
        self._noted: set[str] = set()  # lists of config.json that this process has been added to
        self._execution = states.as_json(execution or {})
        self.writable, self._figure_files = not read_only, figure_files
        try:
            if self.writable:
                make_folder(self.path)
                self._lock = self.enter_context(lock_folder(self.path))
                if self._is_of_a_run() and overwrite:
                    delete_files(self.path, (*FOLDERS, *CONTENTS[::-1]))  # the config last
                check_no_links(self.path, FOLDERS)
                delete_temporary(self.path)
            self.resumed = self._is_of_a_run()
            if self.resumed:
                check_config(self.path, self._config)
            else:
                content = {"config": config, "execution": self._execution, "layout": LAYOUT}
                content |= {"environment": provenance.environment()}
                self._write_json("config.json", content)
                self._noted |= {LATER, REDRAWN}
            saved = read_object(self.path / "config.json")
            self._environments += provenance.list_environments(saved)
            if (self.path / "arrays.npz").exists():
                self._read_arrays(saved)
            elif saved.get("arrays") and self.writable:  # which were deleted, to be made again
                self._write_json("config.json", saved | {"arrays": []})
        except BaseException:
            self.close()
            raise

    def log(self, message: str) -> None:
        """Appends a line with the time to log.txt."""
        if self.writable:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {escape_text(message)}\n"
            with open_log(self.path / "log.txt") as file:
                file.write(line.encode())

    # Where the results come from.

    def _note_environment(self, name):
        """Adds the environment of this process to a list before its first write, if it is new.

        Args:
            name: `LATER` before it writes measurements, `REDRAWN` before files made of them.
        """
        if name not in self._noted:
            self._noted.add(name)
            self.add_environments([provenance.environment()], name)
            if name == LATER and self._execution:
                saved = read_object(self.path / "config.json")
                self._write_json("config.json", saved | {"execution": self._execution})

    @property
    def environments(self) -> list[JsonObject]:
        """The environments of all processes that measured what is in the folder, first that of the
        process that began it."""
        return list(self._environments)

    def add_environments(self, environments: Iterable[JsonObject], name: str = LATER) -> None:
        """Adds the new ones among the environments in which results of this folder were made.

        Args:
            environments: Environments from `provenance.environment`.
            name: `LATER`, or `REDRAWN` for those that only made files of the measurements.
        """
        saved = read_object(self.path / "config.json")
        listed = provenance.read_environments(saved, name)
        others = self._environments if name == LATER else [*self._environments, *listed]
        if new := provenance.find_new(environments, others):
            if name == LATER:
                self._environments += new
            self._write_json("config.json", saved | {name: [*listed, *new]})

    # Tables, figures and the summary.

    def delete_products(self) -> None:
        """Deletes the files that are made of the arrays: table, figures, further files and the
        summary."""
        delete_files(self.path, PRODUCTS)

    def save_figure(self, name: str, figure: Figure) -> None:
        """Writes the files of a figure, PNG and PDF, where one of them is missing.

        Args:
            name: Name of the files in figures/, without their ending.
            figure: Figure of matplotlib.
        """
        if self.writable and self.lacks_figure(name):
            for suffix, content in draw_files(figure, self._figure_files).items():
                self._write(f"figures/{name}{suffix}", content)

    def lacks_figure(self, name: str) -> bool:
        """Returns whether a file of a figure is missing."""
        return not all(self.has_file(f"figures/{name}{end}") for end in self._figure_files)

    def save_table(self, rows: Iterable[TableRow]) -> None:
        """Writes results.csv, where it differs from the rows."""
        table = table_bytes(rows)
        is_there = self.has_file("results.csv")
        if self.writable and not (is_there and read_regular(self.path / "results.csv") == table):
            self._write("results.csv", table)

    def save_file(self, name: str, content: bytes) -> None:
        """Writes a further file.

        Args:
            name: Name in `CONTENTS`, or in a folder of `FOLDERS`.
            content: Bytes of the file.
        """
        if self.writable:
            self._write(name, content)

    def has_file(self, name: str) -> bool:
        """Returns whether a file of the folder exists; an empty one is the remainder of a crash."""
        path = self.path / name
        return path.is_file() and path.stat().st_size > 0

    def finish(self, summary: JsonObject) -> None:
        """Writes summary.json, which marks the run as complete; drops checkpoints and points/.

        Args:
            summary: The headline numbers.
        """
        # First: a complete run is not checked again.
        delete_files(self._check_place(), ("checkpoints", "points"))
        check_config(self.path, self._config)  # as it is now: results are read with it
        self._write_json("summary.json", {**summary, "arrays": self._describe_arrays()})

    @property
    def summary(self) -> JsonObject | None:
        """The headline numbers of a complete run, else None."""
        path = self.path / "summary.json"
        return read_object(path) if path.exists() else None

    # Arrays: results, and the cache of finished parts.

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All saved arrays by name (a copy of the dictionary)."""
        return dict(self._arrays.get(self._prefix, {}))

    def part(self, part: str) -> dict[str, np.ndarray] | None:
        """Returns the arrays of one part of the run, such as the measures of one network.

        Args:
            part: Name of the part; its arrays are stored as "part/name".

        Returns:
            {name: array}; None if there are none.
        """
        return dict(self._arrays.get(f"{self._prefix}{part}/", {})) or None

    def at(self, prefix: str) -> "RunFolder":
        """Returns a view of the folder with only the arrays whose names begin with a prefix."""
        view = copy.copy(self)
        view._prefix = prefix
        return view

    def cached(
        self, part: str, compute: Callable[[], Mapping[str, ArrayLike]]
    ) -> dict[str, np.ndarray]:
        """Reads the arrays of one part of the run; computes and saves them where there are none.

        Args:
            part: Name of the part; its arrays are stored as "part/name".
            compute: Function that returns the named arrays, at least one.
        """
        if self.part(part) is None:
            self.check_writable(part)
            self.save_arrays({f"{part}/{name}": value for name, value in compute().items()})
        return self.part(part)

    def check_writable(self, part: str) -> None:
        """Checks that a part that is missing may be computed.

        Args:
            part: Name of the part.

        Raises:
            RunError: The folder is only read.
        """
        if not self.writable:
            raise damaged_file_error(self.path / "arrays.npz", f"it lacks seeds of {part!r}")

    def keep_arrays(self, arrays: Mapping[str, ArrayLike]) -> None:
        """Adds named arrays, and writes the file only if its last write is long enough ago.

        Each write contains all arrays, so many small chunks are written together. `flush_arrays`
        writes the remaining ones.

        Args:
            arrays: Arrays by name, without the prefix of the view.
        """
        self._add_arrays(arrays)
        self._unwritten = True
        if time.monotonic() - self._last_write > self._pause:
            self.save_arrays({})

    def flush_arrays(self) -> None:
        """Writes arrays that `keep_arrays` has not written yet."""
        if self._unwritten:
            self.save_arrays({})

    def save_arrays(self, arrays: Mapping[str, ArrayLike]) -> None:
        """Adds (or replaces) named arrays, and writes arrays.npz."""
        started = time.monotonic()
        self._add_arrays(arrays)
        self._note_environment(LATER)
        delete_files(self._check_place(), ("summary.json",))  # of fewer arrays: no longer complete
        write_arrays(self._check_place() / "arrays.npz", self._arrays[""])
        if not self._listed >= self._arrays[""].keys():  # after the arrays: none is listed too soon
            self._listed |= self._arrays[""].keys()
            saved = read_object(self.path / "config.json")
            self._write_json("config.json", saved | {"arrays": sorted(self._listed)})
        self._last_write, self._unwritten = time.monotonic(), False
        self._pause = max(PAUSE, (self._last_write - started) / SHARE)

    def _add_arrays(self, arrays):
        """Files each array under every beginning of its name that ends at a "/"."""
        for name, values in arrays.items():
            array, name = np.asarray(values), self._prefix + name
            starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == "/")]
            for start in starts:
                self._arrays[name[:start]][name[start:]] = array

    # Checkpoints: the states of an unfinished computation.

    def save_checkpoint(self, step: int, state: PyTree[ArrayLike], name: str = "") -> None:
        """Saves a pytree of arrays (random keys too) at a step, and deletes the earlier ones.

        Call it between jitted chunks, with arrays on the host (`seeds.to_host`).

        Args:
            step, state: See `states.save_state`.
            name: Name of the computation, where a run has several.
        """
        self._note_environment(LATER)
        states.save_state(self._check_place() / "checkpoints" / name, step, state)

    def restore_checkpoint(
        self, like: PyTree[ArrayLike], name: str = ""
    ) -> tuple[int, PyTree[ArrayLike]] | None:
        """Reads (step, state) of the newest saved state; None where there is none.

        Args:
            like: A pytree of the same structure, whose leaves give type, dtype and sharding:
                the state may have been saved under another number of devices.
            name: Name of the computation, where a run has several.

        Raises:
            RunError: The state on disk is damaged, or has other names or shapes than `like`.
        """
        folder = self.path / "checkpoints" / name
        steps = states.list_steps(folder)
        if not steps:
            return None
        try:
            return steps[-1], states.restore_state(folder, steps[-1], like)
        except (ValueError, OSError) as error:
            raise RunError(
                f"{states.state_path(folder, steps[-1])} does not fit this run: {error}; delete "
                "it, and training begins afresh, while finished parts stay"
            ) from error

    def drop_checkpoints(self, but_of: str) -> None:
        """Deletes the saved states of all computations but one."""
        for path in (self.path / "checkpoints").glob("*"):
            if path.name != but_of:
                delete_files(path.parent, [path.name])

    # Opening and writing.

    def _read_arrays(self, saved):
        """Reads arrays.npz; refuses it where arrays that were written or published are missing.

        Args:
            saved: Content of config.json.
        """
        path = self.path / "arrays.npz"
        self._add_arrays(load_arrays(path))
        pairs = (
            (self.summary or {}, self._describe_arrays()),
            (saved, self._arrays[""].keys()),
        )
        for content, present in pairs:
            listed = content.get("arrays")
            if isinstance(listed, list) and (lost := {*map(str, listed)} - {*present}):
                raise damaged_file_error(path, f"it lacks {min(lost)}")
        listed = saved.get("arrays")
        self._listed |= {*map(str, listed)} if isinstance(listed, list) else set()

    def _describe_arrays(self):
        """Lists names and shapes of all arrays: "rms (8, 65)"."""
        return [f"{name} {array.shape}" for name, array in sorted(self._arrays[""].items())]

    def _check_place(self):
        """Returns the folder if it is still the one that was opened; else nothing is written to
        it."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self.path / ".lock")):
                return self.path
        raise RunError(f"{self.path} is no longer the folder of this run: moved or deleted?")

    def _is_of_a_run(self):
        """Returns whether the folder belongs to a run; False for one without results.

        Raises:
            RunError: The folder holds other files: it is neither taken over nor deleted.
        """
        names = {p.name for p in self.path.iterdir()} & {*CONTENTS, *FOLDERS} - {"log.txt"}
        if names:
            read_config(self.path)
        return bool(names)

    def _write_json(self, name, value):
        self._write(name, (json.dumps(states.as_json(value), indent=2) + "\n").encode())

    def _write(self, name, content):
        """Writes a file of the run, and first notes the environment of this process."""
        if name != "config.json":
            self._note_environment(REDRAWN)
        path = self._check_place() / name
        if path.parent != self.path:
            make_subfolder(path.parent)
        write_atomically(path, content)
