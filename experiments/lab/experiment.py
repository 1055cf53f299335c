"""One experiment, declared in one object: flags, presets, measurement, table, claims, figures.

    EXPERIMENT = Experiment(about=__doc__, order=20, flags=FLAGS, measure=..., claims=claims, ...)
    main = EXPERIMENT.main

    if __name__ == "__main__":
        cli.run(main, FLAGS)

`reproduce`, the report, the table of experiments in the README and the tests of all binaries read
the objects that `experiments_of` finds.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments import verdicts
from experiments.lab import cli, grid, labelled, tidy
from experiments.lab.flags import Flags, precision
from experiments.lab.folder import RunFolder, read_summary
from experiments.lab.statements import STATEMENTS
from rank_collapse.report import figures
from rank_collapse.runs.files import damaged


def caption_of(draw: Callable) -> str:
    """What a function that draws a figure says of itself, in one line."""
    return " ".join(inspect.getdoc(draw).split())


@dataclass(frozen=True)
class Drawing:
    """One figure of an experiment.

    Attributes:
        draw: (results, setup) → the matplotlib figure.
        caption: In the report; a figure without one is not shown there.
        there: (results, setup) → whether there is anything to draw.
    """

    draw: Callable[[Any, Any], Any]
    caption: str = ""
    there: Callable[[Any, Any], bool] = lambda results, setup: True

    @classmethod
    def described(cls, draw: Callable, part: Callable | None = None, there: str = "") -> "Drawing":
        """A figure whose caption is what the function that draws it says of itself."""
        caption = caption_of(draw)
        if there:
            return cls(draw, caption, lambda results, setup: there in results)
        return cls(draw, caption) if part is None else cls.of_part(part, draw, caption)

    @classmethod
    def all(cls, *draw: Callable) -> "dict[str, Drawing]":
        """Figures of functions X_figure, by the name X."""
        return {f.__name__.removesuffix("_figure"): cls.described(f) for f in draw}

    @classmethod
    def of_part(cls, part: Callable[[Any], Any], draw: Callable, caption: str) -> "Drawing":
        """A figure of part(results), where that is not empty: draw(part, setup)."""
        return cls(
            lambda results, setup: draw(part(results), setup),
            caption,
            lambda results, setup: bool(part(results)),
        )


class Finding(NamedTuple):
    """What the report opens with."""

    figure: str  # Name of one of the experiment's figures
    sentence: str  # Made of its numbers


class Shown(NamedTuple):
    """What is said of a run."""

    claims: Sequence[verdicts.Row]
    comparisons: Sequence[verdicts.Comparison]
    finding: Finding | None = None


@dataclass(frozen=True)
class Experiment:
    """One experiment; where a flag --dtype asks for float64, all of its run is in it.

    `setup` is what the flags ask for, `results` what is measured of it, arrays by seed. All that is
    shown is made from them, so that a finished run shows again what was deleted without computing
    anything.

    Attributes:
        about: What --help says first: purpose, the figure or table it reproduces, commands.
        order: Place in the report, ascending.
        brief: What it shows, in the README's table of experiments.
        title: Heading of its section of the report.
        claim: What the paper says, in a sentence or two, with the figure or table it stands in.
        flags: Its flags.
        presets: Arguments by preset: "quick" (seconds on two cores), "paper", and "tiny", at which
            tests compute all of it; {run: arguments} of a preset of several runs.
        measure: (options, setup, run) → results, which resumes from the run folder.
        table: (results, setup) → rows of results.csv.
        figures: By name, in the order of the report.
        further: (results, setup) → what draws figures whose names depend on the results.
        files: (results, setup, run) → what makes further files of the folder, by name.
        claims: (results, setup) → rows of the statements of `experiments.lab.statements`.
        compare: (results, setup) → what is measured beside published values, without verdicts.
        finding: (results, setup) → the sentence and picture on the report's first screen; None
            where there is none.
        setup: options → what they ask for; raises ValueError before a folder is made.
        extra: setup → what beside the flags determines the results, for config.json.
        axes: Flags whose values are dimensions of the results: what is measured at one of each is
            joined to one Dataset, of which table, figures and statements are.
        needs: A folder that must be there; `reproduce` leaves the experiment out without it.
        execution: Flags that choose what of a folder is shown, which may differ between its runs;
            its summary keeps those of the last.
    """

    about: str
    order: int
    brief: str
    title: str
    claim: str
    flags: Flags
    presets: Mapping[str, str | Sequence[str] | Mapping[str, Sequence[str]]]
    measure: Callable[[Flags, Any, RunFolder], Any]
    table: Callable[[Any, Any], Iterable[Mapping[str, Any]]]
    figures: Mapping[str, Drawing]
    claims: Callable[[Any, Any], Iterable[verdicts.Row]] = lambda *_: ()
    compare: Callable[[Any, Any], Iterable[verdicts.Comparison]] = lambda *_: ()
    setup: Callable[[Flags], Any] = lambda options: options
    extra: Callable[[Any], Mapping[str, Any] | None] = lambda setup: None
    axes: Sequence[str] = ()
    execution: Sequence[str] = field(default=())
    needs: str = ""
    further: Callable[[Any, Any], Mapping[str, Callable]] = lambda results, setup: {}
    files: Callable[[Any, Any, RunFolder], Mapping[str, Callable]] = lambda *_: {}
    finding: Callable[[Any, Any], Finding | None] = lambda *_: None

    def __post_init__(self):
        split = {n: p.split() if isinstance(p, str) else p for n, p in self.presets.items()}
        object.__setattr__(self, "presets", split)

    @property
    def captions(self) -> dict[str, str]:
        """{figure: caption} of those that the report shows."""
        return {name: own.caption for name, own in self.figures.items() if own.caption}

    @property
    def module(self) -> str:
        """Its file at the top of experiments/, which its first command names."""
        return re.search(r"-m experiments\.(\w+)", self.about)[1]

    def runs(self, preset: str) -> dict[str, Sequence[str]]:
        """{run: its arguments} of a preset; "" of a preset of one run."""
        found = self.presets[preset]
        return dict(found) if isinstance(found, Mapping) else {"": found}

    def main(self, options: Flags) -> int:
        """Measures what the run folder lacks, writes and prints what was measured.

        At several points of axes it does so of each; of one that cannot be it says why. Returns the
        exit code, 1 where there was one.

        Raises:
            ValueError: Flags that do not fit each other, or results that are no numbers.
            RunError: A folder that cannot be used.
        """
        with precision(options):
            members, failed = options.points(), []
            setup = self.setup(members[0])
            cli.mesh(options)  # more devices than there are: refused before there is a folder
            with self.opened(options, setup) as run:
                grid.measure_side_by_side(self, options, run)
                parts: list[tuple[Flags, Any, Any]] = []
                for member in members:
                    try:
                        setup = self.setup(member)
                        found = self.measure(member, setup, run.at(member.prefix))
                        parts.append((member, found, setup))
                    except ValueError as error:
                        if not member.point:
                            raise
                        failed.append(f"{labelled.setting(member.point)}: {error}")
                parts = self._joined(parts)
                shown = self._shown(parts)
                run.publish(
                    rows=partial(self._rows, parts),
                    figures=self.drawn(parts, options),
                    files={
                        name: make
                        for member, *own in parts
                        for name, make in self.files(*own, run.at(member.prefix)).items()
                    },
                    summary=lambda: {
                        "statements": [tidy.of_row(row) for row in shown.claims],
                        "compared": [vars(row) for row in shown.comparisons],
                    },
                    shown={name: options[name].value for name in self.execution} or None,
                )
        for row in shown.comparisons:
            print(verdicts.comparison_line(row))
        for answer in verdicts.answers_of(STATEMENTS, shown.claims):
            print(verdicts.answer_lines(answer))
        for line in failed:
            print(line, file=sys.stderr)
        print(f"{'written to' if run.writable else 'read from'} {run.path}")
        return 1 if failed else 0

    def read(self, folder: Path) -> "Shown":
        """What a finished folder holds, without measuring anything.

        Raises:
            RunError: The run is not complete, or damaged.
        """
        return self._shown(self.results(folder))

    def results(self, folder: Path) -> list[tuple[Flags, Any, Any]]:
        """(flags, results, setup) of each point of the axes of a finished folder."""
        shown = read_summary(folder).get("shown", {})
        if not isinstance(shown, Mapping):
            raise damaged(folder / "summary.json", "an earlier version wrote it")
        options = cli.options_of(self.flags, folder, shown)
        with precision(options):
            members = [(member, self.setup(member)) for member in options.points()]
            with self.opened(options, members[0][1], read_only=True) as run:
                parts = [(m, self.measure(m, own, run.at(m.prefix)), own) for m, own in members]
        return self._joined(parts)

    def _joined(self, parts):
        """The points that differ in `axes` alone as one."""
        if not self.axes:
            return parts
        whole: dict[str, tuple[Any, Any, dict[Any, Any]]] = {}
        for member, found, setup in parts:
            at = {n: v for n, v in member.point.items() if n not in self.axes}
            vars(member)["point"] = at
            own = whole.setdefault(str(at), (member, setup, {}))[2]
            own[tuple(member[name].value for name in self.axes)] = found
        return [(m, labelled.joined(own, self.axes), setup) for m, setup, own in whole.values()]

    def opened(self, options: Flags, setup: Any, **how: Any) -> RunFolder:
        """Its run folder; `how` as of `cli.open_run`."""
        return cli.open_run(options, extra=self.extra(setup), execution=self.execution, **how)

    def _shown(self, parts):
        claims: list[verdicts.Row] = []
        comparisons: list[verdicts.Comparison] = []
        for member, *own in parts:
            at = labelled.setting(member.point)
            claims += [
                replace(r, setting=", ".join(filter(None, (r.setting, at))))
                for r in self.claims(*own)
            ]
            comparisons += [
                replace(r, quantity=": ".join(filter(None, (at, r.quantity))))
                for r in self.compare(*own)
            ]
        return Shown(claims, comparisons, self.finding(*parts[0][1:]) if parts else None)

    def _rows(self, parts):
        """The table; at several points of axes with their columns first."""
        return [member.point | row for member, *own in parts for row in self.table(*own)]

    def drawn(self, parts: Any, options: Flags) -> dict[str, Callable[[], Any]]:
        """What draws each figure that there is, by name, in the style of `report.figures`."""
        found: dict[str, Callable[[], Any]] = {}
        for member, *given in parts:
            at = "".join(f",{name}={value}" for name, value in member.point.items())
            found |= {
                f"{name}{at}": partial(figures.styled(own.draw), *given)
                for name, own in self.figures.items()
                if own.there(*given)
            }
            found |= {f"{name}{at}": draw for name, draw in self.further(*given).items()}
        if options_axes(parts):
            found["axes"] = lambda: axes_figure(
                self._rows(parts), [*parts[0][0].point], options.shows
            )
        return found


def options_axes(parts: Any) -> bool:
    """Whether there are several points."""
    return any(member.point for member, *_ in parts)


@figures.styled
def axes_figure(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], shown: str):
    """A column of the table over the first axis, a curve for each value of the second, a panel for
    each of the third; means over seeds.

    Args:
        shown: "column,name=value,...": the column, and which rows; "last" is the last value.
    """
    import pandas as pd  # here: it takes half a second, which `--help` need not

    table = pd.DataFrame(rows)
    column, *conditions = shown.split(",")
    for name, value in (condition.split("=") for condition in conditions):
        at = table[name].iloc[-1] if value == "last" else value
        table = table[table[name].astype(str) == str(at)]
    x, hue, col, *_ = [*axes, "", ""]
    by = [name for name in (x, hue, col, "seed") if name in table]
    values = table.groupby(by)[column].mean().to_xarray()
    if "seed" not in values.dims:
        values = values.expand_dims("seed")
    return labelled.facets(values, x, hue, col, ylabel=column, sharey=True)[0]


def experiments_of(folder: Path = Path(__file__).parents[1]) -> list[str]:
    """Modules of a package that hold an experiment, in the order of the report."""
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem.startswith(("run_", "check_")))
    found = {name: experiment_of(name) for name in names}
    return sorted((n for n, e in found.items() if e is not None), key=lambda n: found[n].order)


def experiment_of(name: str) -> Experiment | None:
    """The experiment of a module of experiments/; None where it holds none."""
    module = importlib.import_module(f"experiments.{name}")
    return getattr(module, "EXPERIMENT", None)
