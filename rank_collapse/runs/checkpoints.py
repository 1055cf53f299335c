"""The states of an unfinished computation, in the folder checkpoints/ of a run."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

from rank_collapse.runs import processes, states
from rank_collapse.runs.files import RunError, delete


class Checkpoints:
    """Saved states of one run, by computation and step.

    Attributes:
        path: The folder of the run.
        primary: False in all but one of the processes of a run: nothing is written.
    """

    path: Path
    primary: bool

    def save_checkpoint(self, step: int, state: Any, of: str = "") -> None:
        """Saves a pytree of arrays (random keys too) at a step, and keeps the newest.

        Call it at the border of a jitted chunk, with arrays whole in this process
        (`seeds.to_host`).

        Args:
            step, state: As of `states.save`.
            of: Name of the computation, where a run has several.
        """
        if self.primary:
            states.save(self.path / "checkpoints" / of, step, state)

    def restore_checkpoint(self, like: Any, of: str = "") -> tuple[int, Any] | None:
        """(step, state) of the newest saved state; None where there is none.

        The primary reads it and gives it to the other processes, all of which must call this.

        Args:
            like: A pytree of the same structure, whose leaves give type, dtype and sharding:
                the state may have been saved under another number of devices.
            of: Name of the computation, where a run has several.

        Raises:
            RunError: The state on disk has other names or shapes than `like`.
        """
        step = self.newest_checkpoint(of)
        if step is None:
            return None
        folder, state, error = self.path / "checkpoints" / of, like, ""
        if self.primary:
            try:
                state = states.restore(folder, step, like)
            except (ValueError, OSError) as reason:
                error = (
                    f"{states.path_of(folder, step)} does not fit this run: {reason}; delete it, "
                    "and training begins afresh, while finished parts stay"
                )
        error = processes.text_from_primary(error)
        if error:
            raise RunError(error)
        return step, processes.from_primary(state)

    def newest_checkpoint(self, of: str = "") -> int | None:
        """The step of the newest saved state of a computation; None where there is none."""
        steps = states.steps(self.path / "checkpoints" / of) if self.primary else []
        newest = int(processes.from_primary(np.asarray(steps[-1] if steps else -1, np.int64)))
        return None if newest < 0 else newest

    def drop_checkpoints(self, but_of: str | None = None) -> None:
        """Deletes the saved states, of all computations or of all but one."""
        if self.primary:
            for path in (self.path / "checkpoints").glob("*"):
                if path.name != but_of:
                    delete(path.parent, [path.name])
            with contextlib.suppress(OSError):
                (self.path / "checkpoints").rmdir()
