"""The flags of one binary, with what a sweep has to know of it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags


class Flags(flags.FlagValues):
    """absl's flag values, and beside them what no flag says.

    Args:
        experiment: Name of the folder under results/.
        shows: Default of --sweep_shows; None for a command without sweeps.
        traced: Flags whose values compiled programs take as arguments: runs that differ in them
            alone share their programs.
        joined: Whether such runs are computed as one ensemble.
        aside: Flags that change no result beyond rounding.

    Attributes:
        unit: In a cell of a sweep, what it is computed with (`sweep.folder.Unit`); else None.
        programs: What the cells of a sweep share, or networks of one run; None for nothing; see
            `program`.
    """

    def __init__(
        self,
        experiment: str = "",
        *,
        shows: str | None = None,
        traced: Sequence[str] = (),
        joined: bool = False,
        aside: Iterable[str] = (),
    ):
        super().__init__()
        # absl takes attributes for flags.
        vars(self).update(
            experiment=experiment,
            shows=shows,
            traced=tuple(traced),
            joined=joined,
            aside=frozenset(aside),
            unit=None,
            programs=None,
        )

    def belong_to(self, **known: Any) -> None:
        """Sets `unit` or `programs`."""
        vars(self).update(known)

    def program(self, name: str, make: Callable[[], Any]) -> Any:
        """make(), once for all that share their `programs`.

        Args:
            name: Of the program within a run.
            make: Makes what holds the compiled functions; may depend on no flag in `traced`.
        """
        if self.programs is None:
            return make()
        if name not in self.programs:
            self.programs[name] = make()
        return self.programs[name]


def check_names(options: flags.FlagValues, flag: str, known: Iterable[str]) -> None:
    """Refuses a list of names that holds another than the known ones.

    Raises:
        ValueError: It names the flag and the first unknown name.
    """
    for name in options[flag].value:
        if name not in known:
            raise ValueError(f"--{flag}={name} is not one of {', '.join(known)}")
