"""The states of an unfinished computation, in the folder checkpoints/ of a run."""

import contextlib
from pathlib import Path
from typing import Any

from rank_collapse.runs import states
from rank_collapse.runs.files import RunError, delete


class Checkpoints:
    """Saved states of one run, by computation and step.

    Attributes:
        path: The folder of the run.
    """

    path: Path

    def save_checkpoint(self, step: int, state: Any, of: str = "") -> None:
        """Saves a pytree of arrays (random keys too) at a step, and keeps the newest.

        Call it at the border of a jitted chunk, with arrays on the host (`seeds.to_host`).

        Args:
            step, state: As of `states.save`.
            of: Name of the computation, where a run has several.
        """
        states.save(self.path / "checkpoints" / of, step, state)

    def restore_checkpoint(self, like: Any, of: str = "") -> tuple[int, Any] | None:
        """(step, state) of the newest saved state; None where there is none.

        Args:
            like: A pytree of the same structure, whose leaves give type, dtype and sharding:
                the state may have been saved under another number of devices.
            of: Name of the computation, where a run has several.

        Raises:
            RunError: The state on disk is damaged, or has other names or shapes than `like`.
        """
        step, folder = self.newest_checkpoint(of), self.path / "checkpoints" / of
        if step is None:
            return None
        try:
            return step, states.restore(folder, step, like)
        except (ValueError, OSError) as error:
            raise RunError(
                f"{states.path_of(folder, step)} does not fit this run: {error}; delete it, and "
                "training begins afresh, while finished parts stay"
            ) from error

    def newest_checkpoint(self, of: str = "") -> int | None:
        """The step of the newest saved state of a computation; None where there is none."""
        return next(reversed(states.steps(self.path / "checkpoints" / of)), None)

    def drop_checkpoints(self, but_of: str | None = None) -> None:
        """Deletes the saved states, of all computations or of all but one."""
        for path in (self.path / "checkpoints").glob("*"):
            if path.name != but_of:
                delete(path.parent, [path.name])
        with contextlib.suppress(OSError):
            (self.path / "checkpoints").rmdir()
