"""The grid that --sweep asks for: "learning_rate=1e-4,3e-4;depth,num_heads=2:2,4:8"."""

import copy
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from experiments.shell.flag_values import Flags
from experiments.shell.options import OF_SWEEP, config_of, content_hash, parse

# Of the sweep itself, or of where it is: a cell has its own.
SWEEPS_OWN = ("sweep", *OF_SWEEP, "output_dir", "run_name", "overwrite")


class Axis(NamedTuple):
    """One axis of the grid.

    Attributes:
        names: The flags that change together; one of them if it is no zip.
        values: What they are, [values][names], as they were written.
    """

    names: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def label(self) -> str:
        """Of the figure's axis."""
        return ", ".join(self.names)


class Cell(NamedTuple):
    """One point of the grid, which is one run of the binary.

    Attributes:
        name: Of its folder.
        values: What is swept, as it was written, by flag.
        options: The flags of its run.
        group: What cells have in common that are computed together.
    """

    name: str
    values: dict[str, str]
    options: Flags
    group: str


def axes_of(text: str) -> list[Axis]:
    """The axes of a sweep: products of "a=1,2" with each other, and zips "a,b=1:2,3:4".

    Raises:
        ValueError: It is not written so, or names a flag or a value twice.
    """
    axes, seen = [], set()
    for part in text.split(";"):
        left, equals, right = part.partition("=")
        names = tuple(name.strip().removeprefix("--") for name in left.split(","))
        values = tuple(tuple(v.strip() for v in value.split(":")) for value in right.split(","))
        if len(names) == 1:
            values = tuple((value.strip(),) for value in right.split(","))
        if not equals or not all(names) or not all(all(value) for value in values):
            raise ValueError(
                f"--sweep: {part!r} is not written name=value,value or name,name=value:value,..."
            )
        for value in values:
            if len(value) != len(names):
                raise ValueError(
                    f"--sweep: {':'.join(value)!r} in {part!r} is not {len(names)} values"
                )
        for name in names:
            if name in seen:
                raise ValueError(f"--sweep: {name!r} is swept twice")
            seen.add(name)
        axes.append(Axis(names, values))
    return axes


def cells_of(flag_values: Flags, axes: Sequence[Axis]) -> list[Cell]:
    """All cells of the grid, those that are computed together side by side.

    Args:
        flag_values: Of the binary, as the command line says.
        axes: From `axes_of`.

    Raises:
        flags.Error, ValueError: A flag that there is not, that changes no result or is given
            beside the sweep, a value that it does not take, or two cells that are the same.
    """
    swept: dict[flags.Flag, str] = {}
    for name in (name for axis in axes for name in axis.names):
        if name not in flag_values:
            raise ValueError(f"--sweep: flag {name!r} does not exist")
        own = flag_values[name]
        if own.name in flag_values.aside:
            raise ValueError(f"--sweep: {name} changes no result")
        if own.present:
            raise ValueError(f"--sweep: {name} is swept and given too")
        if own in swept:
            raise ValueError(f"--sweep: {swept[own]!r} and {name!r} are the same flag")
        swept[own] = name
    cells, known = [], {}
    for point in itertools.product(*(axis.values for axis in axes)):
        pairs = [zip(a.names, of_axis, strict=True) for a, of_axis in zip(axes, point, strict=True)]
        values = dict(itertools.chain(*pairs))
        options = copy.deepcopy(flag_values)
        parse(options, [f"--{name}={value}" for name, value in values.items()], forget=SWEEPS_OWN)
        config, name = config_of(options), name_of(values)
        if (same := known.setdefault(json.dumps(config, default=str), name)) != name:
            raise ValueError(f"--sweep: {name} is the same as {same}")
        static = {n: v for n, v in config.items() if n not in flag_values.traced}
        cells.append(Cell(name, values, options, json.dumps(static, default=str)))
    groups = list(dict.fromkeys(cell.group for cell in cells))
    return sorted(cells, key=lambda cell: groups.index(cell.group))


def name_of(values: dict[str, str]) -> str:
    """The name of a cell's folder: what is swept, shortened where it is long."""
    text = ",".join(f"{name}={value}" for name, value in values.items())
    short = re.sub(r"[^A-Za-z0-9=.,+_-]+", "-", text)
    if short == text and len(text) <= 100:
        return text
    return f"{short[:80].rstrip(',-=.')},{content_hash(text.encode())[:6]}"


def units_of(cells: Sequence[Cell], processes: int) -> list[list[Cell]]:
    """Cells that one process computes together: a group, or one of equal parts of it.

    Args:
        cells: Of the grid.
        processes: That share the work: there are as few units as keep all of them busy, since each
            compiles its programs.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    wanted, units = math.ceil(processes / len(groups)), []
    for group in groups.values():
        parts = [n for n in range(1, len(group) + 1) if len(group) % n == 0]
        size = len(group) // next((n for n in parts if n >= wanted), len(group))
        units += [group[i : i + size] for i in range(0, len(group), size)]
    return units
