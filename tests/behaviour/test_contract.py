"""What every experiment keeps to, at its tiny size: the contract of a run.

A run is ended by a signal as it begins to measure, resumed, and shown again without computing. Some
are also computed in another process without a signal: both agree to the bit. The last tests
are of a run itself, with an experiment of a few numbers.
"""

import importlib
import itertools
import json
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from experiments import reproduce
from experiments.lab import cli, experiment, folder, labelled
from experiments.lab.arrays import describe_array
from experiments.lab.experiment import describe_experiment
from experiments.lab.folder import RunFolder
from experiments.reproducing import running
from experiments.verdicts.page import Comparison
from experiments.verdicts.rows import mean_row
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.runs.drawn import draw_files
from rank_collapse.runs.files import RunError
from tests.support.data_dictionary import check_columns
from tests.support.figures_as_data import as_data
from tests.support.marks import full_but
from tests.support.runs import (
    arrays,
    check_second_run,
    contents,
    rows,
    run,
    same_arrays,
    single_columns,
)


def configure_process(devices):
    """Makes a process compute on so many devices, and write figures as `conftest` has it.

    A device of one seed has no loop over seeds, and XLA then rounds otherwise.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    jax.devices()
    folder.draw_files = as_data


@pytest.fixture(scope="module")
def other_process():
    """A process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, configure_process, (jax.device_count(),)) as pool:
        yield pool


TWICE = ("run_sort", "run_collapse", "run_architectures", "run_attention_forms")
FEWER = {"run_stability": ["--designs=post"]}  # compiles fewer programs than the tiny size


def list_arguments(name):
    return [*describe_experiment(name).presets["tiny"], *FEWER.get(name, [])]


def check_resumed(name, resumed_folder, complete_folder, other_process):
    """A run that was ended and resumed has the results of one in another process."""
    command = f"experiments.{name}", *list_arguments(name), f"--output_dir={complete_folder}"
    ended = other_process.submit(running.run_binary, *command).result()
    assert ended.code == 0, ended.printed
    same_arrays(complete_folder, resumed_folder)
    assert contents(complete_folder) == contents(resumed_folder)


def check_dimensions(name, folder):
    """Every array of a run has a name for each of its axes, and a folder without them gets them."""
    if (folder / "arrays.npz").exists():
        described = json.loads((folder / "arrays.json").read_text("utf-8"))
        for array, values in arrays(folder).items():
            assert described[array] == describe_array(name, array, values.ndim)
            assert len(described[array]["dimensions"]) == values.ndim
            assert described[array]["meaning"]
        (folder / "arrays.json").unlink()


# Those that measure all at once, in less than a second: the signal is read behind that.
AT_ONCE = ("run_path_counts",)


def check_signal(name, number, folder, monkeypatch, capsys):
    """A signal that arrives as measuring begins ends the run at the next check point, in `measure`.

    The run says so in one line, has no summary.json, and the same command resumes: what was saved
    stays as it is.
    """
    module, ended = importlib.import_module(f"experiments.{name}"), []
    measure_all = experiment.Run.measure

    def measure_signalled(run, measure, over=()):
        def measure_point(*arguments):
            signal.raise_signal(number)
            results = measure(*arguments)
            ended.append(name)
            return results

        return measure_all(run, measure_point, over)

    arguments = list_arguments(name) + ["--jobs=1"] * ("jobs" in module.FLAGS)
    with monkeypatch.context() as patch:
        patch.setattr(experiment.Run, "measure", measure_signalled)
        assert run(module, arguments, folder) == 128 + number
    assert bool(ended) is (name in AT_ONCE), "no check point in its measure"
    err = capsys.readouterr().err
    assert err.endswith("\ninterrupted: the same command again resumes\n")
    assert "Traceback" not in err and not (folder / "summary.json").exists()
    saved = arrays(folder) if (folder / "arrays.npz").exists() else {}
    assert run(module, arguments, folder) == 0
    completed = arrays(folder) if saved else {}
    for array, values in saved.items():
        begun = completed[array][tuple(slice(n) for n in values.shape)]
        np.testing.assert_array_equal(begun, values, err_msg=array)


SIGNALS = itertools.cycle((signal.SIGTERM, signal.SIGINT))
ENDED_BY = dict(zip(sorted(reproduce.EXPERIMENTS), SIGNALS, strict=False))


# One that trains, and those that take few seconds.
SHORT = ("run_sort", "run_path_counts", "check_bounds")


@pytest.mark.parametrize("name", full_but(reproduce.EXPERIMENTS, *SHORT))
def test_an_experiment_keeps_to_the_contract(name, request, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"experiments.{name}")
    run_folder, tiny = tmp_path / "here", list_arguments(name)
    captions = experiment.figure_captions(module.FIGURES)
    check_signal(name, ENDED_BY[name], run_folder, monkeypatch, capsys)
    if name in TWICE:
        check_resumed(
            name, run_folder, tmp_path / "there", request.getfixturevalue("other_process")
        )
    check_columns(rows(run_folder))
    check_dimensions(name, run_folder)

    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    check_second_run(lambda: run(module, tiny, run_folder), run_folder, capsys)
    assert list((run_folder / "figures").iterdir()) and all(captions.values())

    report = experiment.read_run(module, run_folder)
    for row in report.claims:
        assert name in STATEMENTS[row.key].experiments, row
        ends = row.interval(0.95)
        if ends.is_finite and row.estimate is not None:
            assert ends[0] <= row.estimate <= ends[1], row
    assert report.claims or report.comparisons


@pytest.mark.full
@pytest.mark.parametrize("name", ["run_sort", "run_path_counts"])
def test_figures_are_drawn_as_users_see_them(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_files", draw_files)
    module = importlib.import_module(f"experiments.{name}")
    assert run(module, describe_experiment(name).presets["tiny"], tmp_path) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}


class Doubled:
    """An experiment that multiplies its seeds by a factor; `computed` lists the factors used."""

    __doc__ = "What it is about.\n\n    python -m experiments.run_doubled"

    def __init__(self, extra=lambda factor: {"input": factor}, selecting=()):
        self.FLAGS = cli.make_flags("doubled", num_seeds=3, selecting=selecting, shows="value")
        self.FLAGS.define("integer", "factor", 2, "Of the seeds.")
        self.FIGURES = experiment.name_figures(self.shown_figure, self.none_figure)
        self.computed, self.dtypes, self.extra = [], {}, extra

    def note(self, part):
        self.dtypes[part] = jnp.ones(()).dtype

    def make_setup(self, options):
        self.note("setup")
        if options.factor == 13:
            raise ValueError("no factor of 13")
        return options.factor

    def measure(self, options, factor, run):
        def compute():
            self.note("measure")
            self.computed.append(factor)
            if factor == 7:
                raise ValueError("seven cannot be measured")
            return {"values": factor * np.arange(1.0, 1 + options.num_seeds)}

        return run.cached("all", compute)

    def table(self, results, factor):
        self.note("table")
        return [{"value": float(v)} for v in results["values"]]

    def claims(self, results, factor):
        self.note("claims")
        return [mean_row("chains", "seeds", results["values"])]

    @staticmethod
    def compare(results, factor):
        return [Comparison("first", results["values"][0], 1, "a note")]

    @staticmethod
    def shown_figure(results, factor):
        """A caption."""
        return Figure()

    @staticmethod
    def none_figure(results, factor):
        """Nothing to draw."""

    def main(self, options):
        with experiment.open_run(options, self.make_setup, self.extra) as run:
            points = run.measure(self.measure)
            return run.publish(
                points,
                table=self.table,
                figures=self.FIGURES,
                claims=self.claims,
                compare=self.compare,
                files=lambda results, factor, run: {"report.html": lambda: b"<p>"},
            )

    def run(self, folder, *arguments):
        return cli.execute(self.main, self.FLAGS, [*arguments, f"--output_dir={folder}"])


def test_a_run_shows_what_there_is_and_computes_it_once(tmp_path, capsys):
    doubled = Doubled()
    for deleted in ((), ("figures/shown.pdf", "results.csv")):
        for name in deleted:
            (tmp_path / name).unlink()
        assert doubled.run(tmp_path) == 0
        printed = capsys.readouterr().out
        assert "first: 2, beside 1" in printed and "3 draws" in printed
        assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"shown"}
        assert (tmp_path / "results.csv").exists() and (tmp_path / "report.html").exists()
    assert doubled.computed == [2]
    captions = experiment.figure_captions(doubled.FIGURES)
    assert captions == {"shown": "A caption.", "none": "Nothing to draw."}


def test_all_points_are_set_up_before_the_first_is_computed(tmp_path, capsys):
    doubled = Doubled()
    for values in ("2,13", "2,x", "2,99999999999"):
        assert doubled.run(tmp_path / "a", f"--factor={values}") == 2
    assert doubled.computed == [] and not (tmp_path / "a").exists()
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.parametrize("name", ["seed", "first_seed", "num_seeds"])
def test_seeds_are_an_axis_already(name, tmp_path):
    assert Doubled().run(tmp_path / "a", f"--{name}=0,1") == 2


def test_a_point_that_cannot_be_measured_is_named_and_the_others_are_shown(tmp_path, capsys):
    doubled = Doubled()
    assert doubled.run(tmp_path, "--factor=7,2", "--jobs=1") == 1
    assert capsys.readouterr().err == "factor 7: seven cannot be measured\n"
    assert {row["factor"] for row in rows(tmp_path)} == {"2"}
    assert doubled.run(tmp_path / "b", "--factor=7,7", "--jobs=1") == 2


def test_what_the_flags_do_not_say_determines_the_folder_too(tmp_path, capsys):
    assert Doubled().run(tmp_path) == 0
    assert Doubled(extra=lambda factor: {"input": 3}).run(tmp_path) == 2
    assert "input" in capsys.readouterr().err


def test_a_folder_is_read_as_it_was_last_asked(tmp_path):
    doubled = Doubled(extra=lambda factor: None, selecting=("factor",))
    for factor in (3, 5):
        assert doubled.run(tmp_path, f"--factor={factor}") == 0
    assert experiment.read_run(doubled, tmp_path).points[0].setup == 5
    (tmp_path / "summary.json").write_text('{"shown": ["first"]}')
    with pytest.raises(RunError, match=r"summary\.json.*names no flags"):
        experiment.read_run(doubled, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_setup_measures_and_tables_compute_in_the_arithmetic_of_the_flag(tmp_path, dtype):
    doubled = Doubled()
    doubled.FLAGS.define("enum", "dtype", "float32", "Arithmetic.", ("float32", "float64"))
    assert doubled.run(tmp_path, f"--dtype={dtype}") == 0
    parts = ("setup", "measure", "table", "claims")
    assert doubled.dtypes == dict.fromkeys(parts, jnp.dtype(dtype))


def test_a_variable_that_lacks_a_name_has_nan_there():
    arrays = {"loss/b": np.ones(2), "ratio/a": np.zeros(2), "ratio/b": np.full(2, 3.0)}
    dataset = labelled.make_dataset(arrays, ("variant",))
    assert list(dataset) == ["loss", "ratio"] and dataset.loss.dims == ("seed", "variant")
    by_variant = {name: dataset.sel(variant=name) for name in "ab"}
    assert by_variant["a"].loss.isnull().all() and (by_variant["b"].loss == 1).all()
    assert (by_variant["a"].ratio == 0).all() and (by_variant["b"].ratio == 3).all()


@pytest.mark.parametrize("count", [3, 12, 300])
def test_many_curves_have_a_short_legend(count):
    values = xr.DataArray(np.ones((2, count, 3)), dims=("seed", "gain", "layer"))
    values = values.assign_coords(gain=np.arange(count), layer=np.arange(3))
    ax = labelled.plot_facets(values, hue="gain")[1][0, 0]
    _, names = ax.get_legend_handles_labels()
    assert names[0] == "0" and len(names) == min(count, 12)


IN_DOUBLE = [n for n in reproduce.EXPERIMENTS if "dtype" in experiment.import_experiment(n).FLAGS]


@pytest.mark.full
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_every_column_of_a_run_in_float64_has_its_digits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_files", lambda *_: {})
    tiny = experiment.describe_experiment(name).presets["tiny"]
    assert run(experiment.import_experiment(name), [*tiny, "--dtype=float64"], tmp_path) == 0
    assert not single_columns(tmp_path)
