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
import numpy as np
import pytest

from experiments import reproduce
from experiments.lab import experiment, folder
from experiments.lab.dimensions import describe_array
from experiments.lab.experiment import describe_experiment
from experiments.lab.folder import RunFolder
from experiments.reproducing import running
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.runs.drawn import draw_files
from tests.support.data_dictionary import check_columns
from tests.support.figures_as_data import as_data
from tests.support.golden import list_other_arrays, read_arrays
from tests.support.golden_runs import arrays_path
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


TWICE = ("run_collapse", "run_architectures", "run_attention_forms")
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


def check_golden(name, folder):
    """The arrays of a tiny run are those that are kept, if there are any: see test_golden_runs."""
    path = arrays_path(name)
    if name not in FEWER and (folder / "arrays.npz").exists() and path.exists():
        differences = list_other_arrays(arrays(folder), read_arrays(path.read_text("utf-8")))
        assert not differences, "\n".join(differences[:20])


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


# One that trains, and one that measures all at once.
SHORT = ("run_sort", "run_path_counts")


@pytest.mark.parametrize("name", full_but(reproduce.EXPERIMENTS, *SHORT))
def test_an_experiment_keeps_to_the_contract(name, request, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"experiments.{name}")
    run_folder, tiny = tmp_path / "here", list_arguments(name)
    captions = describe_experiment(name).figures
    check_signal(name, ENDED_BY[name], run_folder, monkeypatch, capsys)
    if name in TWICE:
        check_resumed(
            name, run_folder, tmp_path / "there", request.getfixturevalue("other_process")
        )
    check_columns(rows(run_folder))
    check_dimensions(name, run_folder)
    check_golden(name, run_folder)

    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    check_second_run(lambda: run(module, tiny, run_folder), run_folder, capsys)
    drawn = {path.stem.partition(",")[0] for path in (run_folder / "figures").iterdir()}
    assert drawn and drawn <= {*captions, "axes"} and all(captions.values())

    report = experiment.read_run(module, run_folder)
    for row in report.claims:
        assert name in STATEMENTS[row.key].experiments, row
        ends = row.interval(0.95)
        if ends.is_finite and row.estimate is not None:
            assert ends[0] <= row.estimate <= ends[1], row
    assert report.claims or report.comparisons, "the tiny preset gives no statement or comparison"


@pytest.mark.full
@pytest.mark.parametrize("name", ["run_sort", "run_path_counts"])
def test_figures_are_drawn_as_users_see_them(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_files", draw_files)
    module = importlib.import_module(f"experiments.{name}")
    assert run(module, describe_experiment(name).presets["tiny"], tmp_path) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}


IN_DOUBLE = [n for n in reproduce.EXPERIMENTS if "dtype" in experiment.import_experiment(n).FLAGS]


@pytest.mark.full
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_every_column_of_a_run_in_float64_has_its_digits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_files", lambda *_: {})
    tiny = experiment.describe_experiment(name).presets["tiny"]
    assert run(experiment.import_experiment(name), [*tiny, "--dtype=float64"], tmp_path) == 0
    assert not single_columns(tmp_path)
