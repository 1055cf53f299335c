"""The points of a run: what is joined, and by which names the results of the others go."""

import json

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from scipy import stats

from experiments.lab import Finding, cli, folder, labelled, open_run
from experiments.lab.flags import command_line
from experiments.lab.run import Run
from experiments.verdicts.rows import mean_row
from experiments.verdicts.statement_page import Comparison
from tests.support.runs import rows

FLAGS = cli.make_flags("product", num_seeds=2, shows="value")
FLAGS.define("integer", "factor", 2, "Of the seeds.")
FLAGS.define("integer", "power", 1, "Of the factor.")


def shown_figure():
    """A caption."""
    fig = Figure()
    fig.suptitle("values")
    return fig


def measure(options, setup, folder):
    """Measures (1, 2) factor^power."""
    values = np.arange(1.0, 3.0) * options.factor**options.power
    return xr.Dataset({"value": ("seed", values)})


def run_experiment(path, over, *arguments):
    """Runs an experiment each of whose results is named; returns its published parts."""
    published = []

    def main(options):
        with open_run(options) as run:
            for point in run.measure(measure, over=over):
                value = point.results.value
                point.save_table([{"value": float(value.max())}])
                point.save_figure("shown", shown_figure)
                point.save_claims([mean_row("chains", "seeds", value.values.flat, note="a note")])
                point.save_comparisons([Comparison("sum", float(value.sum()))])
                point.save_finding(Finding("shown", f"They sum up to {float(value.sum()):g}."))
            published.append(run.finish())
            return run

    assert cli.execute(main, FLAGS, [*arguments, "--jobs=1", f"--output_dir={path}"]) == 0
    return published[0]


@pytest.mark.parametrize(
    ("over", "sums"),
    [
        ((), {(2, 1): 6, (2, 2): 12, (3, 1): 9, (3, 2): 27}),
        (("factor",), {(None, 1): 6 + 9, (None, 2): 12 + 27}),
        (("power",), {(2, None): 6 + 12, (3, None): 9 + 27}),
        (("factor", "power"), {(None, None): 6 + 12 + 9 + 27}),
    ],
)
def test_a_result_is_named_by_the_axes_that_are_not_joined(over, sums, tmp_path, monkeypatch):
    """Settings, quantities, finding, titles, files and rows: no value of a joined axis is there."""
    titles = []

    def keep_title(figure, suffixes):
        titles.append(figure.get_suptitle())
        return {".txt": b"drawn"}

    monkeypatch.setattr(folder, "draw_files", keep_title)
    published = run_experiment(tmp_path, over, "--factor=2,3", "--power=1,2")
    named = [
        {name: value for name, value in zip(("factor", "power"), values, strict=True) if value}
        for values in sums
    ]
    words = [", ".join(f"{name} {value}" for name, value in axes.items()) for axes in named]
    suffixes = ["".join(f",{name}={value}" for name, value in axes.items()) for axes in named]
    assert [row.setting for row in published.claims] == [
        f"seeds, {text}" if text else "seeds" for text in words
    ]
    assert {row.quantity: row.measured for row in published.comparisons} == {
        f"{text}: sum" if text else "sum": total
        for text, total in zip(words, sums.values(), strict=True)
    }
    first = f"They sum up to {next(iter(sums.values()))}."
    assert published.finding == (
        f"shown{suffixes[0]}", f"{words[0]}: {first}" if words[0] else first
    )  # fmt: skip
    assert titles[: len(words)] == [f"{text}, values" if text else "values" for text in words]
    stems = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert stems == {f"shown{suffix}" for suffix in suffixes} | ({"axes"} if named[0] else set())
    assert [[*row][:-1] for row in rows(tmp_path)] == [[*axes] for axes in named]
    assert [[*row.values()][:-1] for row in rows(tmp_path)] == [
        [str(value) for value in axes.values()] for axes in named
    ]


def test_a_finished_run_prints_its_lines_again(tmp_path, capsys):
    """The lines that compare numbers with published ones too, which are in the summary already."""
    printed, written = [], []
    for _ in range(2):
        run_experiment(tmp_path, (), "--factor=3")
        printed.append(capsys.readouterr().out)
        files = (path for path in tmp_path.rglob("*.*") if path.name not in (".lock", "log.txt"))
        written.append({path.name: path.stat().st_mtime_ns for path in files})
    assert printed[0] == printed[1] and "sum: 9" in printed[0]
    assert written[0] == written[1]  # nothing is written again


def test_the_summary_has_intervals_of_95_percent(tmp_path):
    run_experiment(tmp_path, (), "--factor=3")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["compared"] == [vars(Comparison("sum", 9.0))]
    (row,) = content["statements"]
    expected = stats.t.interval(0.95, 1, loc=4.5, scale=stats.sem([3.0, 6.0]))
    assert row["estimate"] == 4.5 and row["interval"] == pytest.approx(expected)
    named = {"key": "chains", "setting": "seeds", "draws": 2, "why": "a note"}
    assert {name: row[name] for name in named} == named
    execution = json.loads((tmp_path / "config.json").read_text())["execution"]
    assert execution["command"] == command_line() and "help" not in execution


def test_an_interval_without_ends_is_empty_in_the_summary():
    run = Run(cli.parse_flags(FLAGS, []), None)
    run.claims.append(mean_row("chains", "one seed", [1.0]))
    (row,) = run._summarise()["statements"]
    assert row["interval"] == [] and row["estimate"] == 1.0


def test_the_figure_of_the_axes_is_of_the_table_and_is_drawn_once(tmp_path, monkeypatch):
    drawn = []

    def plot(rows, axes, column):
        drawn.append((len(rows), axes, column))
        return shown_figure()

    monkeypatch.setattr(labelled, "plot_axes", plot)
    for _ in range(2):
        run_experiment(tmp_path, (), "--factor=2,3", "--power=1,2,3")
    assert drawn == [(6, ["factor", "power"], "value")]
