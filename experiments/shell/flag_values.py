"""The flags of one binary, with what a sweep has to know of it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags


class Group(NamedTuple):
    """Runs of a sweep that one process computes together.

    Attributes:
        folder: In which they are computed, where there are several.
        members: Their flags, which differ in `Flags.traced` alone.
    """

    folder: Path
    members: "Sequence[Flags]"


class Flags(flags.FlagValues):
    """absl's flag values, and beside them what no flag says.

    Args:
        experiment: Name of the folder under results/.
        shows: Default of --sweep_shows; None for a command without sweeps.
        traced: Flags whose values compiled programs take as arguments: runs of a sweep that differ
            in them alone are computed together, see `Executor.map`.
        aside: Flags that change no result beyond rounding.

    Attributes:
        group: Of a run of a sweep; else None.
    """

    def __init__(
        self,
        experiment: str = "",
        *,
        shows: str | None = None,
        traced: Iterable[str] = (),
        aside: Iterable[str] = (),
    ):
        super().__init__()
        about = {"experiment": experiment, "shows": shows, "group": None}
        # absl takes attributes for flags.
        vars(self).update(about, traced=frozenset(traced), aside=frozenset(aside))

    def join(self, group: Group) -> None:
        """Makes this the flags of a run of a sweep."""
        vars(self)["group"] = group


def check_names(options: flags.FlagValues, flag: str, known: Iterable[str]) -> None:
    """Refuses a list of names that holds another than the known ones.

    Raises:
        ValueError: It names the flag and the first unknown name.
    """
    for name in options[flag].value:
        if name not in known:
            raise ValueError(f"--{flag}={name} is not one of {', '.join(known)}")
