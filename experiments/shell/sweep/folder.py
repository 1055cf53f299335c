"""The folder of a sweep: its cells, and which of them are done.

<folder>/config.json, results.csv, summary.json, figures/   of the whole grid, see `merge`
         cells/        a run folder for each
         units/        ensembles of several cells while they are computed

One process writes a cell at a time: it holds the lease of the cell's run folder.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.shell.flag_values import Flags, Group
from experiments.shell.options import command_line, config_of, content_hash, folder_of
from experiments.shell.process import killed
from experiments.shell.sweep.grid import Axis, Cell, cells_of, units_of
from rank_collapse.runs import RunError, make_folder, manifest, write_atomically
from rank_collapse.runs.files import delete, lease, read_object
from rank_collapse.runs.folder import CONTENTS, FOLDERS, RunFolder

BRIEFLY = 60.0  # seconds for which another slice, or a process that is ending, has a folder


class SweepFolder:
    """A sweep on disk.

    Args:
        options: The flags of the sweep.
        axes: Of the grid.

    Raises:
        flags.Error, ValueError: See `cells_of`.
    """

    def __init__(self, options: Flags, axes: Sequence[Axis]):
        self.options, self.axes = options, list(axes)
        self.cells = {cell.name: cell for cell in cells_of(options, axes)}
        self.shown = options.sweep_shows or options.shows
        self.path = folder_of(options, options.aside - {"sweep"})
        self._whole: set[str] = set()

    def clear(self) -> None:
        """Deletes what an earlier sweep left.

        Raises:
            RunError: A process is at it, at one of its cells, or at a run that is no sweep.
        """
        make_folder(self.path)
        cells = sorted(path for path in (self.path / "cells").glob("*") if path.is_dir())
        with contextlib.ExitStack() as held:
            for path in (self.path, *cells):
                held.enter_context(lease(path))
            delete(self.path, ("cells", "units", *CONTENTS, *FOLDERS))

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
        units = units_of(list(self.cells.values()), processes)
        names = ([cell.name for cell in unit] for unit in units)
        return [own for own in names if self.left(own)]

    def command(self, arguments: Sequence[str], names: Sequence[str]) -> list[str]:
        """What a worker gets to compute these cells: the module or script, its arguments."""
        main, numbers = sys.modules["__main__"], [list(self.cells).index(name) for name in names]
        spec = getattr(main, "__spec__", None)
        program = os.path.abspath(sys.argv[0]) if spec is None else spec.name
        root = (self.path.parent if self.options.run_name else self.path).resolve()
        only = f"--only_cells={','.join(map(str, numbers))}"
        return [program, *arguments, f"--output_dir={root}", only]

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
        noted = self.failures(names) if code == 0 else {}
        for name in names:
            if self.done(name):
                text = f"[{len(self._whole)}/{len(self.cells)}] {name} is done"
                print(text, file=sys.stderr, flush=True)
                continue
            if name not in noted:
                self.fail(name, reason)
            print(f"{name}: {noted.get(name, reason)}", file=sys.stderr, flush=True)
            print("".join(f"    {line}\n" for line in lines if code), end="", file=sys.stderr)

    def group_of(self, cells: Sequence[Cell]) -> Group:
        """How cells are computed together."""
        name = content_hash(json.dumps([cell.name for cell in cells]).encode())[:12]
        return Group(self.path / "units" / name, [cell.options for cell in cells])

    # Cells that failed are tried again by the next command.

    def fail(self, name: str, reason: str) -> None:
        """Notes why a cell failed."""
        make_folder(self.folder_of(name))
        write_atomically(self.note_of(name), json.dumps({"error": reason}).encode())

    def failures(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """{cell: why} of those that failed and are not finished, of these or of all."""
        found = {}
        for name in self.left(names):
            if self.note_of(name).exists():
                found[name] = "unknown"
                with contextlib.suppress(RunError):
                    found[name] = read_object(self.note_of(name)).get("error", "unknown")
        return found

    def note_of(self, name: str) -> Path:
        """The file that says why a cell failed."""
        return self.folder_of(name) / "failed.json"
