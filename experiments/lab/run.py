"""A run of an experiment: opens its folder, measures the missing points, saves tables and figures.

    def main(options):
        with open_run(options, make_setup) as run:
            for point in run.measure(measure):  # one, or several: --depth=2,4
                point.save_table(make_rows(point.results))
                point.save_figure("ranks", ranks_figure, point.results)
                point.save_claims(judge_claims(point.results))
            return run.finish()

The same command on a finished folder calls the same functions: `measure` reads the results of the
folder, and only files that are missing or differ are written. `experiment.read_run` writes nothing
at all.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from experiments import verdicts
from experiments.lab import devices, labelled, pool
from experiments.lab.dimensions import dump_descriptions
from experiments.lab.flags import Flags, FlagValue, command_line, make_config, run_path
from experiments.lab.folder import RunFolder
from experiments.lab.grid import Options, list_points
from experiments.lab.progress import raise_if_stopped, report_activity
from experiments.lab.provenance import JsonObject
from rank_collapse.printed import print_lines
from rank_collapse.report.figures import Figure
from rank_collapse.report.intervals import LEVEL
from rank_collapse.runs import states


class Finding(NamedTuple):
    """A result at the top of the report."""

    figure: str  # Name of one of the experiment's figures
    sentence: str  # Made of its numbers


@dataclass(frozen=True)
class Point:
    """One point of the axes of a run, or several that were joined.

    Attributes:
        run: The run.
        options: Flags of the point.
        setup: Result of `make_setup`.
        folder: The run's folder, with the arrays of the point alone.
        axes: {flag: value} of the axes that were not joined.
        results: Results of `measure`.
    """

    run: "Run"
    options: Options
    setup: Any
    folder: RunFolder
    axes: Mapping[str, FlagValue]
    results: Any = None

    def save_table(self, rows: Iterable[verdicts.TableRow]) -> None:
        """Adds rows to results.csv; the axes are their first columns."""
        if self.run.is_writing:
            self.run.rows += [{**self.axes, **row} for row in rows]

    def save_figure(
        self, name: str, draw: Callable[..., Figure | None], *arguments: object
    ) -> None:
        """Draws and saves a figure, where its files are missing.

        Args:
            name: A name that `Experiment.figures` has; with the axes it names the files.
            draw: Function that draws it, or returns None for nothing to draw.
            *arguments: Arguments of the function.
        """
        name += self.suffix
        if not (self.run.is_writing and self.run.folder.lacks_figure(name)):
            return
        figure = draw(*arguments)
        if figure is None:
            return
        if self.axes:
            titles = filter(None, (self.describe(), figure.get_suptitle()))
            figure.suptitle(", ".join(titles), fontsize=9)
        self.run.folder.save_figure(name, figure)

    def save_claims(self, rows: Iterable[verdicts.Row]) -> None:
        """Adds rows of the statements of `experiments.verdicts.statements`.

        Their settings end with the point in words.
        """
        for row in rows:
            setting = filter(None, (row.setting, self.describe()))
            self.run.claims.append(replace(row, setting=", ".join(setting)))

    def save_comparisons(self, rows: Iterable[verdicts.Comparison]) -> None:
        """Adds measured values next to published ones, without verdicts.

        Their quantities begin with the point in words.
        """
        for row in rows:
            quantity = filter(None, (self.describe(), row.quantity))
            self.run.comparisons.append(replace(row, quantity=": ".join(quantity)))

    def save_finding(self, finding: Finding | None) -> None:
        """Saves the sentence and the picture for the report's first screen; only the first point of
        a run does."""
        if self is not self.run.points[0] or finding is None:
            return
        sentence = ": ".join(filter(None, (self.describe(), finding.sentence)))
        self.run.finding = Finding(finding.figure + self.suffix, sentence)

    def lacks_file(self, name: str) -> bool:
        """Returns whether a further file of the folder has to be made, see `save_file`."""
        return self.run.is_writing and not self.run.folder.has_file(name)

    def save_file(self, name: str, content: bytes) -> None:
        """Saves a further file, whose name is in `CONTENTS` or `FOLDERS` of `folder_files`."""
        if self.lacks_file(name):
            self.run.folder.save_file(name, content)

    def describe(self) -> str:
        """Describes the point in words, "depth 2"; "" for a run without axes."""
        return labelled.describe_point(self.axes)

    @property
    def suffix(self) -> str:
        """The end of the names of the point's files, ",depth=2"."""
        return "".join(f",{name}={value}" for name, value in self.axes.items())


class Run(contextlib.ExitStack):
    """One open run.

    Args:
        options: The flags.
        folder: Its folder.

    Attributes:
        options, folder: The flags, and the folder of the run.
        points: Points of the axes: set up, and, once they are measured, with their results.
        failures: Reasons why points could not be measured.
        rows, claims, comparisons, finding: Saved results of the points.
    """

    def __init__(self, options: Flags, folder: RunFolder):
        super().__init__()
        self.options, self.folder = options, folder
        self.points: Sequence[Point] = []
        self.failures: list[str] = []
        self.rows: list[verdicts.TableRow] = []
        self.claims: list[verdicts.Row] = []
        self.comparisons: list[verdicts.Comparison] = []
        self.finding: Finding | None = None

    @property
    def code(self) -> int:
        """The exit code of the command: 1 if points could not be measured."""
        return 1 if self.failures else 0

    @property
    def is_writing(self) -> bool:
        """Whether files are written; not in a run that is only read or judged, and not in a
        worker."""
        mode = self.options.mode
        return not (mode.is_read or mode.is_judged) and mode.worker_group is None

    def measure(
        self, measure: Callable[[Options, Any, RunFolder], Any], over: Sequence[str] = ()
    ) -> Sequence[Point]:
        """Measures the missing points, one by one, or side by side where workers are asked for.

        Args:
            measure: (options, setup, folder) → results of one point, resumed from the folder.
            over: Flags whose values become dimensions of the results: points that differ only in
                them are joined to one Dataset.

        Returns:
            The points with results; those that cannot be measured are named by `finish`. A worker's
            run has none: its parent saves them.

        Raises:
            ValueError: No point can be measured.
            Stopped: A signal asked for it; points that were measured are saved.
        """
        points, group = self.points, self.options.mode.worker_group
        if group is None:
            pool.measure_side_by_side(self.options, [p.options for p in points], self.folder)
        else:
            points = [p for p in points if p.options.number == group]
        measured = []
        for point in points:
            raise_if_stopped()
            try:
                results = measure(point.options, point.setup, point.folder)
                measured.append(replace(point, results=results))
            except ValueError as error:
                if len(self.points) == 1:
                    raise
                self.failures.append(f"{point.describe()}: {error}")
        raise_if_stopped()
        if not measured:
            raise ValueError("; ".join(self.failures))
        self.points = [] if group is not None else join_points(measured, over)
        if self.is_writing:
            selection = states.as_json(self._selection())
            if selection and (self.folder.summary or {}).get("shown") != selection:
                self.folder.delete_products()
            activity = f"{self.options.experiment}: drawing figures"
            self.enter_context(report_activity(activity, self.folder.log))
        return self.points

    def finish(self) -> "Run":
        """Writes the table and the summary, prints the results, and returns the run."""
        if not self.is_writing:
            return self
        folder, axes = self.folder, [*self.points[0].axes]
        if axes and folder.lacks_figure("axes"):
            figure = labelled.plot_axes(self.rows, axes, self.options.shows)
            if figure is not None:
                folder.save_figure("axes", figure)
        folder.save_table(self.rows)
        if folder.arrays and not folder.has_file("arrays.json"):
            described = dump_descriptions(self.options.experiment, folder.arrays)
            folder.save_file("arrays.json", described)
        if folder.summary is None:
            folder.finish(self._summarise())
        for row in self.comparisons:
            print_lines(verdicts.comparison_line(row))
        for answer in verdicts.answer_statements(verdicts.STATEMENTS, self.claims):
            print_lines(*verdicts.answer_lines(answer).split("\n"))
        print_lines(*self.failures, file=sys.stderr)
        print_lines(f"written to {folder.path}")
        return self

    def _selection(self):
        """Returns {flag: value} of the flags that choose the part of the folder that is shown."""
        grown = [self.options.counts] if self.options.grows else []
        return {
            name: self.options[name].value for name in sorted([*self.options.selecting, *grown])
        }

    def _summarise(self):
        """Makes the content of summary.json: rows of statements with 95 % intervals, comparisons;
        also the selection, where there is one.
        """
        statements = []
        for row in self.claims:
            fields = {n: getattr(row, n) for n in ("key", "setting", "draws", "estimate")}
            interval = row.interval(LEVEL)
            fields |= {"why": row.note, "interval": [*interval] if interval.is_finite else []}
            statements.append(fields)
        summary = {"statements": statements, "compared": [vars(row) for row in self.comparisons]}
        selection = self._selection()
        return summary | ({"shown": selection} if selection else {})


@contextlib.contextmanager
def open_run(
    options: Flags,
    make_setup: Callable[[Options], Any] = lambda options: options,
    extra: Callable[[Any], JsonObject | None] = lambda setup: None,
) -> Iterator[Run]:
    """Opens the folder of the flags, after all points of their axes have been set up.

    With --dtype=float64 the run computes in float64.

    Args:
        options: Flags of the command.
        make_setup: options → the setup that they ask for.
        extra: setup → further settings that determine the results, for config.json.

    Raises:
        ValueError: Flags that do not fit each other.
        RunError: A folder that cannot be used.
    """
    in_double = "dtype" in options and options.dtype == "float64"
    with jax.enable_x64(in_double or jax.config.jax_enable_x64):
        setups = [(point, make_setup(point)) for point in list_points(options)]
        devices.device_mesh(options)  # too many devices are refused before there is a folder
        with open_folder(options, extra(setups[0][1])) as folder, Run(options, folder) as run:
            run.points = [
                Point(run, point, setup, folder.at(point.prefix), point.axes)
                for point, setup in setups
            ]
            yield run


def open_folder(options: Flags, extra: JsonObject | None = None) -> RunFolder:
    """Opens results/<experiment>/<run name>/, or the folder of --output_dir.

    Args:
        options: Flags of the command.
        extra: Further settings that determine the results.
    """
    names = sorted(options.execution & {*options} - {"help"})
    execution = {name: options[name].value for name in names} | {"command": command_line()}
    folder = RunFolder(
        run_path(options),
        make_config(options) | dict(extra or {}),
        execution=execution,
        overwrite=options.overwrite,
        read_only=options.mode.is_read,
        figure_files=(".png", ".pdf") if options.pdf else (".png",),
    )
    if options.mode.begin_with:
        folder.add_environments(options.mode.begun_in)
        folder.save_arrays(options.mode.begin_with)
    return folder


def join_points(points: Sequence[Point], over: Sequence[str]) -> Sequence[Point]:
    """Joins the results of points (combinations of flag values) that differ in some axes alone.

    Args:
        points: Points with results.
        over: The axes that become dimensions of the Datasets.

    Returns:
        Points with one Dataset for each combination of the other axes.
    """
    if not over:
        return points
    groups: dict[str, list[Point]] = {}
    for point in points:
        axes = {name: value for name, value in point.axes.items() if name not in over}
        groups.setdefault(str(axes), []).append(replace(point, axes=axes))
    joined = []
    for group in groups.values():
        parts = {tuple(p.options[name] for name in over): p.results for p in group}
        joined.append(replace(group[0], results=labelled.join_datasets(parts, over)))
    return joined
