"""A run of an experiment: its folder is opened, missing results are measured, saved and drawn.

    EXPERIMENT = Experiment(order=50, title="Ranks", brief=..., claim=..., presets={...})
    FIGURES = name_figures(ranks_figure)

    def main(options):
        with open_run(options, make_setup) as run:
            points = run.measure(measure)
            return run.publish(points, table=table, figures=FIGURES, claims=claims)

    if __name__ == "__main__":
        cli.run(main, FLAGS)

`reproduce`, the report, the pages and the tests read `EXPERIMENT`, `FIGURES` and `FLAGS` of the
modules that `list_experiments` names, and finished folders by `read_run`.
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

import jax

from experiments import verdicts
from experiments.lab import devices, labelled, pool, progress
from experiments.lab.arrays import dump_descriptions
from experiments.lab.flags import Flags, command_line, make_config, read_flags, run_path
from experiments.lab.folder import RunFolder, read_summary
from experiments.lab.progress import report_activity
from rank_collapse.printed import print_lines
from rank_collapse.report import figures as drawing
from rank_collapse.runs.files import damaged_file_error

Figures = Mapping[str, Callable[[Any, Any], Any]]  # (results, set-up) → figure, or None


@dataclass(frozen=True)
class Experiment:
    """What pages and the report say of an experiment.

    Attributes:
        order: Place in the report, ascending.
        title: Heading of its section of the report.
        brief: What it shows, in the README's table of experiments.
        claim: What the paper says, in a sentence or two, with the figure or table it stands in.
        presets: Arguments by preset: "quick" (seconds on two cores), "reported" (those of the
            pages), and "tiny", at which tests compute all of it; {run: arguments} of a preset of
            several runs.
        needs: A folder that must exist; `reproduce` leaves the experiment out without it.
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
    """A result that the report opens with."""

    figure: str  # Name of one of the experiment's figures
    sentence: str  # Made of its numbers


class Point(NamedTuple):
    """One point of the axes of a run, or several that were joined.

    Attributes:
        options: Its flags.
        setup: What they ask for.
        folder: The run's folder, with the arrays of the point alone.
        axes: {flag: value} of the axes that were not joined.
        results: What was measured.
    """

    options: Flags
    setup: Any
    folder: RunFolder
    axes: Mapping[str, Any]
    results: Any = None


class Shown(NamedTuple):
    """The published parts of a run, and the exit code of its command."""

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
    """Opens the folder of the flags, after all points of their axes are set up.

    With --dtype=float64 the run computes in float64.

    Args:
        options: Flags of the command.
        make_setup: options → what they ask for.
        extra: setup → what else determines the results, for config.json.

    Raises:
        ValueError: Flags that do not fit each other.
        RunError: A folder that cannot be used.
    """
    in_double = "dtype" in options and options.dtype == "float64"
    with jax.enable_x64(in_double or jax.config.jax_enable_x64):
        setups = [(point, make_setup(point)) for point in options.points()]
        devices.device_mesh(options)  # too many devices are refused before there is a folder
        with run_folder(options, extra(setups[0][1])) as folder:
            points = [
                Point(point, setup, folder.at(point.prefix), point.point) for point, setup in setups
            ]
            yield Run(options, folder, points)


def run_folder(options: Flags, extra: Mapping[str, Any] | None = None) -> RunFolder:
    """Opens results/<experiment>/<run name>/, or the folder of --output_dir.

    Args:
        options: Flags of the command.
        extra: What else determines the results.
    """
    names = sorted(options.execution & {*options} - {"help"})
    execution = {name: options[name].value for name in names} | {"command": command_line()}
    folder = RunFolder(
        run_path(options),
        make_config(options) | dict(extra or {}),
        execution=execution,
        overwrite=options.overwrite,
        read_only=options.reading,
    )
    if options.begin_with:
        folder.add_environments(options.begun_in)
        folder.save_arrays(options.begin_with)
    return folder


class Run:
    """One open run.

    Attributes:
        options: The flags.
        folder: Its folder.
        points: Of the axes, set up.
        failures: Why points could not be measured.
    """

    def __init__(self, options: Flags, folder: RunFolder, points: Sequence[Point]):
        self.options, self.folder, self.points = options, folder, points
        self.failures: list[str] = []

    def measure(
        self, measure: Callable[[Flags, Any, RunFolder], Any], over: Sequence[str] = ()
    ) -> list[Point]:
        """Measures the missing points, one by one, or side by side where workers are asked for.

        Args:
            measure: (options, setup, folder) → results of one point, resumed from the folder.
            over: Flags whose values are dimensions of the results: points that differ in them alone
                are joined to one Dataset.

        Returns:
            The points with results; those that cannot be measured are named by `publish`.

        Raises:
            ValueError: No point can be measured.
            Stopped: A signal asked for it; points that were measured are saved.
        """
        points = self.points
        if self.options.worker_group is None:
            pool.measure_side_by_side(self.options, [p.options for p in points], self.folder)
        else:
            points = [p for p in points if p.options.number == self.options.worker_group]
        measured = []
        for point in points:
            progress.raise_if_stopped()
            try:
                results = measure(point.options, point.setup, point.folder)
                measured.append(point._replace(results=results))
            except ValueError as error:
                if len(self.points) == 1:
                    raise
                self.failures.append(f"{labelled.describe_point(point.axes)}: {error}")
        progress.raise_if_stopped()
        if not measured:
            raise ValueError("; ".join(self.failures))
        return join_points(measured, over)

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
            claims: Rows of the statements of `experiments.verdicts.statements`.
            compare: Measured values beside published ones, without verdicts.
            finding: The sentence and picture on the report's first screen.
            files: (results, setup, folder) → functions that make further files of the folder.
        """
        if self.options.worker_group is not None:  # a worker's: the arrays are enough
            return Shown()
        published = Shown(
            [row for point in points for row in name_settings(claims, point)],
            [row for point in points for row in name_quantities(compare, point)],
            name_finding(finding, points),
            points,
            1 if self.failures else 0,
        )
        if self.options.reading or self.options.judging:
            return published

        def rows():
            return [{**p.axes, **row} for p in points for row in table(p.results, p.setup)]

        shown = [*self.options.selecting]
        if self.options.grows:
            shown.append(self.options.counts)
        makers = [files(point.results, point.setup, point.folder) for point in points]
        extra = {name: make for maker in makers for name, make in maker.items()}
        if arrays := self.folder.arrays:
            describe = partial(dump_descriptions, self.options.experiment, arrays)
            extra["arrays.json"] = describe
        with report_activity(f"{self.options.experiment}: drawing figures", self.folder.log):
            self.folder.publish(
                rows=rows,
                figures=figure_makers(points, figures, rows, self.options.shows),
                files=extra,
                summary=partial(summarise, published),
                selection={n: self.options[n].value for n in shown} or None,
            )
        for row in published.comparisons:
            print_lines(verdicts.comparison_line(row))
        for answer in verdicts.answer_statements(verdicts.STATEMENTS, published.claims):
            print_lines(*verdicts.answer_lines(answer).split("\n"))
        print_lines(*self.failures, file=sys.stderr)
        print_lines(f"written to {self.folder.path}")
        return published


def join_points(points: Sequence[Point], over: Sequence[str]) -> list[Point]:
    """Joins the points that differ in some axes alone to one Dataset each.

    Args:
        points: With results.
        over: The axes that become dimensions of the Datasets.
    """
    if not over:
        return list(points)
    groups: dict[str, list[Point]] = {}
    for point in points:
        axes = {name: value for name, value in point.axes.items() if name not in over}
        groups.setdefault(str(axes), []).append(point._replace(axes=axes))
    joined = []
    for group in groups.values():
        parts = {tuple(p.options[name].value for name in over): p.results for p in group}
        joined.append(group[0]._replace(results=labelled.join_datasets(parts, over)))
    return joined


def name_finding(finding: Callable, points: Sequence[Point]) -> Finding | None:
    """Returns the finding of the first point, which it names where there are several.

    Args:
        finding: (results, setup) → the finding, or None.
        points: With results.
    """
    point = points[0]
    result = finding(point.results, point.setup)
    if result is None or len(points) == 1:
        return result
    sentence = f"{labelled.describe_point(point.axes)}: {result.sentence}"
    return Finding(result.figure + name_suffix(point.axes), sentence)


def name_suffix(axes: Mapping[str, Any]) -> str:
    """Names the files of a point: ",depth=2"."""
    return "".join(f",{name}={value}" for name, value in axes.items())


def name_settings(claims: Callable, point: Point) -> Iterator[verdicts.Row]:
    """Yields the rows of a point, whose settings then end with the point in words.

    Args:
        claims: (results, setup) → rows.
        point: With results.
    """
    for row in claims(point.results, point.setup):
        setting = filter(None, (row.setting, labelled.describe_point(point.axes)))
        yield replace(row, setting=", ".join(setting))


def name_quantities(compare: Callable, point: Point) -> Iterator[verdicts.Comparison]:
    """Yields the comparisons of a point, whose quantities then begin with the point in words.

    Args:
        compare: (results, setup) → comparisons.
        point: With results.
    """
    for row in compare(point.results, point.setup):
        quantity = filter(None, (labelled.describe_point(point.axes), row.quantity))
        yield replace(row, quantity=": ".join(quantity))


def summarise(published: Shown) -> dict[str, Any]:
    """Makes the content of summary.json: rows of statements with 95 % intervals, comparisons.

    Args:
        published: Of the run.
    """
    statements = []
    for row in published.claims:
        fields = {n: getattr(row, n) for n in ("key", "setting", "draws", "estimate")}
        interval = row.interval(0.95)
        fields |= {"why": row.note, "interval": [*interval] if interval.is_finite else []}
        statements.append(fields)
    return {"statements": statements, "compared": [vars(row) for row in published.comparisons]}


def figure_makers(
    points: Sequence[Point], figures: Figures, rows: Callable[[], list], column: str
) -> dict[str, Callable[[], Any]]:
    """Makes a function that draws each figure of each point, by file name.

    Args:
        points: With results.
        figures: By name.
        rows: Makes the table.
        column: The column of it that a further figure shows over the axes, if there are any.
    """
    makers: dict[str, Callable[[], Any]] = {}
    for point in points:
        for name, draw in figures.items():
            file_name = f"{name}{name_suffix(point.axes)}"
            makers[file_name] = partial(draw_point, drawing.styled(draw), point)
    axes = [*points[0].axes]
    if axes:
        makers["axes"] = lambda: labelled.plot_axes(rows(), axes, column)
    return makers


def draw_point(draw: Callable, point: Point) -> Any:
    """Draws a figure of a point, whose title names it where the run has several.

    Args:
        draw: (results, setup) → figure, or None.
        point: With results.
    """
    figure = draw(point.results, point.setup)
    if figure is not None and point.axes:
        titles = filter(None, (labelled.describe_point(point.axes), figure.get_suptitle()))
        figure.suptitle(", ".join(titles), fontsize=9)
    return figure


def name_figures(*functions: Callable) -> dict[str, Callable]:
    """Names functions X_figure X; their docstring is the caption in the report."""
    return {draw.__name__.removesuffix("_figure"): draw for draw in functions}


def figure_captions(figures: Figures) -> dict[str, str]:
    """Reads the captions of figures, each in one line."""
    texts = {name: inspect.getdoc(draw) for name, draw in figures.items()}
    return {name: " ".join(text.split()) for name, text in texts.items() if text}


def read_run(module: ModuleType, folder: Path) -> Shown:
    """Reads a finished folder, without measuring or writing anything.

    Args:
        module: Of the experiment.
        folder: The run folder.

    Raises:
        RunError: The run is not complete, or damaged.
    """
    selection = read_summary(folder).get("shown", {})
    if not isinstance(selection, Mapping):
        raise damaged_file_error(folder / "summary.json", f"shown={selection} names no flags")
    options = read_flags(module.FLAGS, folder, selection)
    vars(options)["reading"] = True
    return module.main(options)


def list_experiments() -> list[str]:
    """Lists the modules that hold an experiment, in the order of the report."""
    paths = Path(__file__).parents[1].glob("*.py")
    names = sorted(path.stem for path in paths if path.stem.startswith(("run_", "check_")))
    return sorted(names, key=lambda name: describe_experiment(name).order)


def import_experiment(name: str) -> ModuleType:
    """Imports the module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def describe_experiment(name: str) -> Experiment:
    """Returns what pages say of the experiment of a module."""
    return import_experiment(name).EXPERIMENT
