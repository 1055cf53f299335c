"""A run of an experiment: its folder is opened, what it lacks is measured, saved and drawn.

    EXPERIMENT = Experiment(order=50, title="Ranks", brief=..., claim=..., presets={...})
    FIGURES = by_name(ranks_figure)

    def main(options):
        with open_run(options, make_setup) as run:
            points = run.measure(measure)
            return run.publish(points, table=table, figures=FIGURES, claims=claims)

    if __name__ == "__main__":
        cli.run(main, FLAGS)

`reproduce`, the report, the pages and the tests read `EXPERIMENT`, `FIGURES` and `FLAGS` of the
modules that `experiments_of` names, and finished folders by `read`.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from experiments import verdicts
from experiments.lab import devices, labelled, pool
from experiments.lab.flags import Flags, command_line, config_of, folder_of, options_of, precision
from experiments.lab.folder import RunFolder, read_summary
from experiments.lab.statements import STATEMENTS
from rank_collapse.report import figures as drawing
from rank_collapse.runs.files import damaged

Figures = Mapping[str, Callable[[Any, Any], Any]]  # (results, set-up) → figure, or None


@dataclass(frozen=True)
class Experiment:
    """What pages and the report say of an experiment.

    Attributes:
        order: Place in the report, ascending.
        title: Heading of its section of the report.
        brief: What it shows, in the README's table of experiments.
        claim: What the paper says, in a sentence or two, with the figure or table it stands in.
        presets: Arguments by preset: "quick" (seconds on two cores), "paper", and "tiny", at which
            tests compute all of it; {run: arguments} of a preset of several runs.
        needs: A folder that must be there; `reproduce` leaves the experiment out without it.
    """

    order: int
    title: str
    brief: str
    claim: str
    presets: Mapping[str, Any]
    needs: str = ""

    def __post_init__(self):
        split = {n: p.split() if isinstance(p, str) else p for n, p in self.presets.items()}
        object.__setattr__(self, "presets", split)

    def runs(self, preset: str) -> dict[str, Sequence[str]]:
        """Lists {run: its arguments} of a preset; "" is the name of a single run."""
        arguments = self.presets[preset]
        if not isinstance(arguments, Mapping):
            return {"": arguments}
        return {run: text.split() for run, text in arguments.items()}


class Finding(NamedTuple):
    """What the report opens with."""

    figure: str  # Name of one of the experiment's figures
    sentence: str  # Made of its numbers


class Point(NamedTuple):
    """One point of the axes of a run, or several that were joined.

    Attributes:
        options: Its flags.
        setup: What they ask for.
        folder: The run's folder, of whose arrays those of the point are seen.
        axes: {flag: value} of the axes that were not joined.
        results: What was measured.
    """

    options: Flags
    setup: Any
    folder: RunFolder
    axes: Mapping[str, Any]
    results: Any = None


class Shown(NamedTuple):
    """What is said of a run, and the exit code of its command."""

    claims: Sequence[verdicts.Row] = ()
    comparisons: Sequence[verdicts.Comparison] = ()
    finding: Finding | None = None
    points: Sequence[Point] = ()
    code: int = 0


@contextlib.contextmanager
def open_run(
    options: Flags,
    make_setup: Callable[[Flags], Any] = lambda options: options,
    extra: Callable[[Any], Mapping[str, Any] | None] = lambda setup: None,
) -> Iterator["Run"]:
    """Opens the folder of the flags, once all points of their axes are set up.

    Where a flag --dtype asks for float64, all of the run is in it.

    Args:
        options: Of the command.
        make_setup: options → what they ask for.
        extra: setup → what beside the flags determines the results, for config.json.

    Raises:
        ValueError: Flags that do not fit each other.
        RunError: A folder that cannot be used.
    """
    with precision(options):
        setups = [(point, make_setup(point)) for point in options.points()]
        devices.mesh(options)  # more devices than there are: refused before there is a folder
        with run_folder(options, extra(setups[0][1])) as folder:
            points = [
                Point(point, setup, folder.at(point.prefix), point.point) for point, setup in setups
            ]
            yield Run(options, folder, points)


def run_folder(options: Flags, extra: Mapping[str, Any] | None = None) -> RunFolder:
    """Opens results/<experiment>/<run name>/, or the folder of --output_dir."""
    config = config_of(options) | dict(extra or {})
    path = folder_of(options)
    if options.reading:
        return RunFolder(path, config, read_only=True)
    named = sorted(name for name in options.execution if name in options and name != "help")
    execution = {name: options[name].value for name in named} | {"command": command_line()}
    folder = RunFolder(path, config, execution=execution, overwrite=options.overwrite)
    if options.begin_with:
        folder.save_arrays(options.begin_with)
    return folder


class Run:
    """One open run.

    Attributes:
        options: The flags.
        folder: Where it is kept.
        points: Of the axes, set up.
        failed: Why points could not be measured.
    """

    def __init__(self, options: Flags, folder: RunFolder, points: Sequence[Point]):
        self.options, self.folder, self.points = options, folder, points
        self.failed: list[str] = []

    def measure(
        self, measure: Callable[[Flags, Any, RunFolder], Any], over: Sequence[str] = ()
    ) -> list[Point]:
        """Measures what the folder lacks, point by point, or side by side where workers are asked
        for.

        Args:
            measure: (options, setup, folder) → results of one point, resumed from the folder.
            over: Flags whose values are dimensions of the results: points that differ in them alone
                are joined to one Dataset.

        Returns:
            The points with results; those that cannot be measured are named by `publish`.

        Raises:
            ValueError: No point can be measured.
        """
        pool.measure_side_by_side(self.options, self.folder)
        measured = []
        for point in self.points:
            if self.options.worker_group not in (None, point.options.number):
                continue
            try:
                results = measure(point.options, point.setup, point.folder)
                measured.append(point._replace(results=results))
            except ValueError as error:
                if len(self.points) == 1:
                    raise
                self.failed.append(f"{labelled.setting(point.axes)}: {error}")
        if not measured:
            raise ValueError("; ".join(self.failed))
        return joined(measured, over)

    def publish(
        self,
        points: Sequence[Point],
        *,
        table: Callable[[Any, Any], Iterable[Mapping[str, Any]]],
        figures: Figures,
        claims: Callable[[Any, Any], Iterable[verdicts.Row]] = lambda *_: (),
        compare: Callable[[Any, Any], Iterable[verdicts.Comparison]] = lambda *_: (),
        finding: Callable[[Any, Any], Finding | None] = lambda *_: None,
        files: Callable[[Any, Any, RunFolder], Mapping[str, Callable]] = lambda *_: {},
    ) -> Shown:
        """Writes and prints what follows from the results, each a function of (results, setup).

        Args:
            points: From `measure`.
            table: Rows of results.csv.
            figures: By name, in the order of the report.
            claims: Rows of the statements of `experiments.lab.statements`.
            compare: What is measured beside published values, without verdicts.
            finding: The sentence and picture on the report's first screen.
            files: (results, setup, folder) → what makes further files of the folder, by name.
        """
        if self.options.worker_group is not None:  # a worker's: the arrays are enough
            return Shown()
        shown = Shown(
            [row for point in points for row in with_setting(claims, point)],
            [row for point in points for row in with_quantity(compare, point)],
            finding(points[0].results, points[0].setup),
            points,
            1 if self.failed else 0,
        )
        if not self.options.reading:
            rows = partial(rows_of, points, table)
            self.folder.publish(
                rows=rows,
                figures=drawn(points, figures, rows, self.options.shows),
                files={
                    name: make
                    for point in points
                    for name, make in files(point.results, point.setup, point.folder).items()
                },
                summary=lambda: summary_of(shown),
                shown={name: self.options[name].value for name in self.options.asked} or None,
            )
            self.say(shown)
        return shown

    def say(self, shown: Shown) -> None:
        """Prints comparisons, answers, failed points and the folder."""
        for row in shown.comparisons:
            print(verdicts.comparison_line(row))
        for answer in verdicts.answers_of(STATEMENTS, shown.claims):
            print(verdicts.answer_lines(answer))
        for line in self.failed:
            print(line, file=sys.stderr)
        print(f"{'written to' if self.folder.writable else 'read from'} {self.folder.path}")


def joined(points: Sequence[Point], over: Sequence[str]) -> list[Point]:
    """Joins the points that differ in some axes alone to one Dataset each."""
    if not over:
        return list(points)
    groups: dict[str, list[Point]] = {}
    for point in points:
        apart = {name: value for name, value in point.axes.items() if name not in over}
        groups.setdefault(str(apart), []).append(point._replace(axes=apart))
    return [
        group[0]._replace(
            results=labelled.joined(
                {
                    tuple(point.options[name].value for name in over): point.results
                    for point in group
                },
                over,
            )
        )
        for group in groups.values()
    ]


def with_setting(claims: Callable, point: Point) -> Iterator[verdicts.Row]:
    """Adds the point to the settings of its rows."""
    for row in claims(point.results, point.setup):
        setting = filter(None, (row.setting, labelled.setting(point.axes)))
        yield replace(row, setting=", ".join(setting))


def with_quantity(compare: Callable, point: Point) -> Iterator[verdicts.Comparison]:
    """Puts the point before the quantities of its comparisons."""
    for row in compare(point.results, point.setup):
        quantity = filter(None, (labelled.setting(point.axes), row.quantity))
        yield replace(row, quantity=": ".join(quantity))


def rows_of(points: Sequence[Point], table: Callable) -> list[dict[str, Any]]:
    """Makes the table, with the columns of the axes first."""
    return [{**point.axes, **row} for point in points for row in table(point.results, point.setup)]


def summary_of(shown: Shown) -> dict[str, Any]:
    """Makes the content of summary.json."""
    statements = []
    for row in shown.claims:
        named = {n: getattr(row, n) for n in ("key", "setting", "draws", "estimate", "why")}
        interval = row.interval(0.95)
        statements.append(named | {"interval": [*interval] if interval.is_finite else []})
    return {"statements": statements, "compared": [vars(row) for row in shown.comparisons]}


def drawn(
    points: Sequence[Point], figures: Figures, rows: Callable[[], list], shows: str
) -> dict[str, Callable[[], Any]]:
    """Makes what draws each figure of each point, in the style of `verdicts.figures`; of several
    points also a column of the table over the axes."""
    draws: dict[str, Callable[[], Any]] = {}
    for point in points:
        where = "".join(f",{name}={value}" for name, value in point.axes.items())
        for name, draw in figures.items():
            draws[f"{name}{where}"] = partial(drawing.styled(draw), point.results, point.setup)
    axes = [*points[0].axes]
    if axes:
        draws["axes"] = lambda: labelled.axes_figure(rows(), axes, shows)
    return draws


def by_name(*draw: Callable) -> dict[str, Callable]:
    """Names functions X_figure X; what their docstring says is the caption in the report."""
    return {one.__name__.removesuffix("_figure"): one for one in draw}


def captions_of(figures: Figures) -> dict[str, str]:
    """Reads the captions of figures, each in one line."""
    texts = {name: inspect.getdoc(draw) for name, draw in figures.items()}
    return {name: " ".join(text.split()) for name, text in texts.items() if text}


def read(module: ModuleType, folder: Path) -> Shown:
    """Reads what a finished folder holds, without measuring or writing anything.

    Raises:
        RunError: The run is not complete, or damaged.
    """
    asked = read_summary(folder).get("shown", {})
    if not isinstance(asked, Mapping):
        raise damaged(folder / "summary.json", "an earlier version wrote it")
    options = options_of(module.FLAGS, folder, asked)
    vars(options)["reading"] = True
    return module.main(options)


def experiments_of(folder: Path = Path(__file__).parents[1]) -> list[str]:
    """Lists the modules of a package that hold an experiment, in the order of the report."""
    names = sorted(p.stem for p in folder.glob("*.py") if p.stem.startswith(("run_", "check_")))
    return sorted(names, key=lambda name: experiment_of(name).order)


def module_of(name: str) -> ModuleType:
    """Imports the module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def experiment_of(name: str) -> Experiment:
    """What is said of the experiment of a module."""
    return module_of(name).EXPERIMENT
