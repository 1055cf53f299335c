"""The grid of a command: its flags at every combination of the values of its axes.

With --depth=2,4 --skip_gain=0,1 there are four points:

    for options in list_points(flags):
        options.depth, options["depth"], options.axes
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.lab.flags import Flags, FlagValue, check_value


class Options(Mapping[str, FlagValue]):
    """The values of all flags at one point of a grid, as attributes and by name; they never change.

    Args:
        flags: Flags of the command.
        axes: {flag: value} of its axes; {} for a command without axes.
        values: {flag: value} of all flags.

    Attributes:
        flags, axes: The flags, and the axes of the grid.
        group: The points that differ from this one only in traced flags, including itself: one
            program computes them, see `Executor`.
        number: Number of the group.
    """

    flags: Flags
    axes: Mapping[str, FlagValue]
    group: Sequence["Options"]
    number: int

    def __init__(
        self, flags: Flags, axes: Mapping[str, FlagValue], values: Mapping[str, FlagValue]
    ):
        vars(self).update(flags=flags, axes=axes, _values=values, group=(self,), number=0)

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a flag."""
        try:
            return vars(self)["_values"][name]
        except KeyError:
            raise AttributeError(f"there is no flag --{name}") from None

    def __setattr__(self, name: str, value: object) -> None:
        """Refuses any change."""
        raise AttributeError(f"options cannot be changed: {name}={value!r}")

    def __getitem__(self, name: str) -> FlagValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def replace(self, **values: FlagValue) -> "Options":
        """Returns options of the same point (combination of flag values) with other values."""
        return Options(self.flags, self.axes, {**self._values, **values})

    @property
    def prefix(self) -> str:
        """The beginning of the names of the arrays of the point; "" where there are no axes."""
        return "".join(f"{name}={value}/" for name, value in self.axes.items())


def list_points(flags: Flags) -> list[Options]:
    """Lists the points of the axes of a command: all combinations of the values of flags that have
    several.

    Points that differ only in flags that are traced, such as learning rates, form a group, which
    one compiled program measures; they follow one another in the list.

    Args:
        flags: The parsed flags.

    Raises:
        flags.Error, ValueError: A value that a flag does not accept.
    """
    points: dict[tuple, Options] = {}  # 1 and 1.0 are one point
    parsed = copy.deepcopy(flags)
    for texts in itertools.product(*flags.axes.values()):
        for name, text in zip(flags.axes, texts, strict=True):
            parsed[name].parse(text)
            check_value(name, parsed[name])
        axes = {name: parsed[name].value for name in flags.axes}
        values = {name: parsed[name].value for name in parsed}
        points.setdefault(tuple(axes.values()), Options(flags, axes, values))
    groups: dict[tuple, list[Options]] = {}
    for point in points.values():
        untraced = (v for name, v in point.axes.items() if name not in flags.traced)
        groups.setdefault(tuple(untraced), []).append(point)
    for number, group in enumerate(groups.values()):
        for point in group:
            vars(point).update(group=tuple(group), number=number)
    return list(itertools.chain(*groups.values()))
