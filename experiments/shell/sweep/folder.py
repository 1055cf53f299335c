"""The folder of a sweep: its cells, who is at which of them, and what is done.

<folder>/config.json, results.csv, summary.json, figures/   of the whole grid, see `merge`
         sweep.json    the cells, and the units of them that are claimed as one
         cells/        a run folder for each
         units/        ensembles of several cells while they are computed
         claims/       see `rank_collapse.runs.claims`
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.shell import cli
from experiments.shell.flag_values import Flags
from experiments.shell.sweep.grid import Axis, Cell, units_of
from rank_collapse.runs import RunError, difference, make_folder, write_atomically
from rank_collapse.runs.claims import Claim, Claims
from rank_collapse.runs.files import delete, lock, read_object
from rank_collapse.runs.folder import CONTENTS, FOLDERS, RunFolder

RESULTS = ("results.csv", "summary.json", "arrays.npz")


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
    """A sweep on disk, opened by any number of processes.

    Args:
        options: The flags of the sweep.
        axes, cells: The grid.
        shown: What --sweep_shows says.
    """

    def __init__(self, options: Flags, axes: Sequence[Axis], cells: Sequence[Cell], shown: str):
        self.options, self.axes, self.shown = options, list(axes), shown
        self.cells = {cell.name: cell for cell in cells}
        self.path = cli.folder_of(options, options.experiment, options.aside - {"sweep"})
        self.groups = {cell.name: cell.group for cell in cells}
        self.units: list[list[str]] = []
        self.claims: Claims | None = None

    def clear(self) -> None:
        """Deletes what an earlier sweep left.

        Raises:
            RunError: A process is at it, or at a run that is no sweep.
        """
        make_folder(self.path)
        with lock(self.path):  # a run in this folder holds it
            plan = self.path / "sweep.json"
            if plan.exists():
                claims = Claims(self.path / "claims")
                for holder in claims.holders().values():
                    raise RunError(f"{self.path} is in use by another process ({holder})")
                delete(self.path, ("cells", "units", "claims", plan.name))
            delete(self.path, (*CONTENTS, *FOLDERS))

    def open(self, processes: int) -> None:
        """Makes the folder, or joins those that are at it.

        Args:
            processes: That are expected to share the work; the first one's word counts.

        Raises:
            RunError: A folder of something else, or one that cannot be used.
        """
        make_folder(self.path)
        path = self.path / "sweep.json"
        if not path.exists() and any((self.path / n).exists() for n in ("config.json", *RESULTS)):
            raise RunError(f"{self.path} holds a run that is no sweep; use --overwrite")
        self.claims = Claims(self.path / "claims")
        config = json.loads(json.dumps(self.config, default=str))
        with self.claims.wait("folder"):
            if not path.exists():
                units = units_of(list(self.cells.values()), self.options.joined, processes)
                plan = {"config": config, "units": units}
                write_atomically(path, json.dumps(plan, indent=1).encode())
            plan = read_object(path)
        self.units = plan.get("units")
        if plan.get("config") != config and isinstance(plan.get("config"), dict):
            raise RunError(
                f"{self.path} was made with another config: {difference(plan['config'], config)}; "
                "use another --run_name or --output_dir, or --overwrite"
            )
        try:
            found = sorted(name for unit in self.units for name in unit)
        except TypeError:
            found = None
        if found != sorted(self.cells):
            raise RunError(f"{path} does not hold the cells of this sweep; use --overwrite")

    @property
    def config(self) -> dict[str, Any]:
        """What determines the results."""
        return cli.config_of(self.options, self.options.experiment, self.options.aside) | {
            "sweep": [[list(a.names), [list(v) for v in a.values]] for a in self.axes]
        }

    def run_folder(self) -> RunFolder:
        """The folder as that of a run, locked: to be opened by who holds the claim "folder"."""
        execution = {"command": cli.command_line(), "sweep_shows": self.shown}
        return RunFolder(self.path, self.config, execution=execution)

    def folder_of(self, name: str) -> Path:
        """The run folder of a cell."""
        return self.path / "cells" / name

    def done(self, name: str) -> bool:
        """Whether a cell is finished."""
        return (self.folder_of(name) / "summary.json").exists()

    def left(self, names: Sequence[str] | None = None) -> list[str]:
        """Cells that are not finished, of these or of all."""
        return [name for name in (self.cells if names is None else names) if not self.done(name)]

    def unit(self, names: Sequence[str]) -> Unit | None:
        """How cells are computed together; None for one alone."""
        if len(names) == 1 or not self.options.joined:
            return None
        name = cli.content_hash(json.dumps(list(names)).encode())[:12]
        return Unit(self.path / "units" / name, tuple(self.cells[n] for n in names))

    def drop(self, unit: Unit | None) -> None:
        """Deletes what a unit was computed in, once its cells are finished."""
        if unit is not None and not self.left([cell.name for cell in unit.cells]):
            shutil.rmtree(unit.folder, ignore_errors=True)

    # Cells that failed: tried again by processes that start later.

    def fail(self, name: str, reason: str) -> None:
        """Notes why a cell failed."""
        path = self.folder_of(name)
        make_folder(path)
        note = {"error": reason, "time": time.time()}
        write_atomically(path / "failed.json", json.dumps(note).encode())

    def failure(self, name: str) -> dict[str, Any] | None:
        """{"error", "time"} of a cell that failed and is not finished."""
        path = self.folder_of(name) / "failed.json"
        if self.done(name) or not path.exists():
            return None
        return {"error": "unknown", "time": 0.0} | read_object(path)

    def next_unit(
        self, mine: Sequence[list[str]], since: float, last: str | None
    ) -> tuple[list[str], Claim] | None:
        """A unit to be computed and the claim on it; None where there is none.

        First those that share their programs with what this process has compiled, then those whose
        programs no other process is compiling.

        Args:
            mine: The units this process may take.
            since: When it began: cells that have failed since are left alone.
            last: The group of its last cell.
        """
        open_, holders = [], self.claims.holders()
        for i, unit in enumerate(mine):
            left = self.left(unit)
            failed = [f for name in left if (f := self.failure(name)) and f["time"] >= since]
            if left and not failed:
                open_.append((i, unit, holders.get(_claim(unit))))
        taken = {self.groups[unit[0]] for _, unit, holder in open_ if holder}
        free = [(i, unit) for i, unit, holder in open_ if holder is None]

        def rank(found):
            group = self.groups[found[1][0]]
            return group != last, group in taken, found[0]

        for _, unit in sorted(free, key=rank):
            claim = self.claims.take(_claim(unit))
            if claim is not None:
                if self.left(unit):
                    return unit, claim
                claim.close()  # just finished by another
        return None


def _claim(unit):
    """The name of a unit's claim."""
    return f"unit-{unit[0]}"
