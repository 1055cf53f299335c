"""The folder of a sweep: its cells, and which of them are done.

<folder>/config.json, results.csv, summary.json, figures/   of the whole grid, see `merge`
         cells/        a run folder for each
         units/        ensembles of several cells while they are computed

One process writes a cell at a time: it holds the lease of the cell's run folder.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.shell.flag_values import Flags
from experiments.shell.options import command_line, config_of, content_hash, folder_of
from experiments.shell.sweep.child import killed
from experiments.shell.sweep.grid import Axis, Cell, units_of
from rank_collapse.runs import RunError, make_folder, manifest, write_atomically
from rank_collapse.runs.files import delete, lease, read_object
from rank_collapse.runs.folder import CONTENTS, FOLDERS, RunFolder

BRIEFLY = 60.0  # seconds for which another slice, or a process that is ending, has a folder


@dataclass(frozen=True)
class Unit:
    """Cells that one process computes as one ensemble.

    Attributes:
        folder: Of the run that computes them.
        cells: The cells, in the order of the ensemble.
    """

    folder: Path
    cells: tuple[Cell, ...]


class SweepFolder:
    """A sweep on disk.

    Args:
        options: The flags of the sweep.
        axes, cells: The grid.
        shown: What --sweep_shows says.
    """

    def __init__(self, options: Flags, axes: Sequence[Axis], cells: Sequence[Cell], shown: str):
        self.options, self.axes, self.shown = options, list(axes), shown
        self.cells = {cell.name: cell for cell in cells}
        self.path = folder_of(options, options.aside - {"sweep"})
        self._whole: set[str] = set()

    def clear(self) -> None:
        """Deletes what an earlier sweep left.

        Raises:
            RunError: A process is at it, at one of its cells, or at a run that is no sweep.
        """
        make_folder(self.path)
        cells = sorted(path for path in (self.path / "cells").glob("*") if path.is_dir())
        held = []
        try:
            for path in (self.path, *cells):
                held.append(lease(path))
            delete(self.path, ("cells", "units", *CONTENTS, *FOLDERS))
        finally:
            for file in held:
                file.close()

    def run_folder(self, wait: float = 0.0) -> RunFolder:
        """The folder as that of a run, leased.

        Args:
            wait: Seconds for which another process that has it is waited for.

        Raises:
            RunError: It is of something else, in use, or cannot be written to.
        """
        config = config_of(self.options) | {
            "sweep": [[list(a.names), [list(v) for v in a.values]] for a in self.axes]
        }
        execution = {"command": command_line(), "sweep_shows": self.shown}
        if (self.path / "cells").is_dir() and not (self.path / "config.json").exists():
            delete(self.path, ("results.csv", "summary.json", "figures"))  # made of the cells
        return RunFolder(self.path, config, execution=execution, wait=wait)

    def folder_of(self, name: str) -> Path:
        """The run folder of a cell."""
        return self.path / "cells" / name

    def done(self, name: str) -> bool:
        """Whether a cell is finished, and its files are as they were written."""
        if name not in self._whole and manifest.whole(self.folder_of(name), "summary.json"):
            self._whole.add(name)
        return name in self._whole

    def left(self, names: Sequence[str] | None = None) -> list[str]:
        """Cells that are not finished, of these or of all."""
        return [name for name in (self.cells if names is None else names) if not self.done(name)]

    def waiting(self, processes: int) -> list[list[str]]:
        """Cells that are not finished, those together that one of so many processes computes."""
        units = units_of(list(self.cells.values()), self.options.joined, processes)
        names = ([cell.name for cell in unit] for unit in units)
        return [own for own in names if self.left(own)]

    def only(self, names: Sequence[str]) -> str:
        """The flag of a process that computes these cells."""
        return f"--only_cells={','.join(str(list(self.cells).index(name)) for name in names)}"

    @property
    def root(self) -> Path:
        """The --output_dir of a process that computes some of the cells."""
        return self.path.parent if self.options.run_name else self.path

    def account(
        self, names: Sequence[str], code: int | None, lines: Sequence[str], reason: str = ""
    ) -> None:
        """Says what came of cells, and notes why they failed.

        Args:
            names: Of the cells that a process computed.
            code: Its exit code; None where there is none, for a reason.
            lines: The last that it printed.
            reason: Why it failed.
        """
        reason = reason or killed(code) or f"exit code {code}: {' '.join(lines[-1:])}"
        failures = self.failures(names)
        for name in names:
            if self.done(name):
                text = f"[{len(self._whole)}/{len(self.cells)}] {name} is done"
                print(text, file=sys.stderr, flush=True)
                continue
            if code != 0 or name not in failures:
                self.fail(name, reason)
            print(f"{name}: {self.failures([name])[name]}", file=sys.stderr, flush=True)
            print("".join(f"    {line}\n" for line in lines if code), end="", file=sys.stderr)

    def unit(self, cells: Sequence[Cell]) -> Unit | None:
        """How cells are computed together; None for one alone."""
        if len(cells) == 1 or not self.options.joined:
            return None
        name = content_hash(json.dumps([cell.name for cell in cells]).encode())[:12]
        return Unit(self.path / "units" / name, tuple(cells))

    def drop(self, unit: Unit | None) -> None:
        """Deletes what a unit was computed in, once its cells are finished."""
        if unit is not None and not self.left([cell.name for cell in unit.cells]):
            shutil.rmtree(unit.folder, ignore_errors=True)

    # Cells that failed are tried again by the next command.

    def fail(self, name: str, reason: str) -> None:
        """Notes why a cell failed."""
        make_folder(self.folder_of(name))
        write_atomically(self._note(name), json.dumps({"error": reason}).encode())

    def forget_failure(self, name: str) -> None:
        """Before a cell is tried again."""
        self._note(name).unlink(missing_ok=True)

    def failures(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """{cell: why} of those that failed and are not finished, of these or of all."""
        left = self.left(names)
        return {name: self._failure(name) for name in left if self._note(name).exists()}

    def _failure(self, name: str) -> Any:
        try:
            return read_object(self._note(name)).get("error", "unknown")
        except RunError:
            return "unknown"

    def _note(self, name):
        return self.folder_of(name) / "failed.json"
