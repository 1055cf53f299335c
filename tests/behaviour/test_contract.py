"""What every experiment keeps to, at its tiny size: the contract of a run.

A run is computed, and shown again without computing. Some are also computed in another process,
while the run here is stopped at its first save and resumed: both agree to the bit. The last tests
are of a run itself, with an experiment of a few numbers.
"""

import importlib
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import pytest

from experiments import reproduce
from experiments.lab import experiment, folder, progress
from experiments.lab.arrays import describe_array
from experiments.lab.experiment import describe_experiment
from experiments.lab.folder import RunFolder
from experiments.reproducing import running
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.runs.drawn import draw_files
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


def stop_at_the_first_save(patch):
    save = RunFolder.save_arrays

    def save_and_stop(run, arrays):
        save(run, arrays)
        raise progress.Stopped(143)

    patch.setattr(RunFolder, "save_arrays", save_and_stop)


TWICE = ("run_sort", "run_collapse", "run_architectures", "run_attention_forms")
FEWER = {"run_stability": ["--designs=post"]}  # compiles fewer programs than the tiny size


def list_arguments(name):
    return [*describe_experiment(name).presets["tiny"], *FEWER.get(name, [])]


def check_resumed(name, resumed_folder, complete_folder, other_process, monkeypatch):
    """A run that is stopped and resumed has the results of one in another process."""
    module, tiny = importlib.import_module(f"experiments.{name}"), list_arguments(name)
    command = f"experiments.{name}", *tiny, f"--output_dir={complete_folder}"
    ended = other_process.submit(running.run_binary, *command).result()
    assert ended.code == 0, ended.printed
    with monkeypatch.context() as patch:
        stop_at_the_first_save(patch)
        code = run(module, tiny, resumed_folder)
    saved = (complete_folder / "arrays.npz").exists()
    assert code == (143 if saved else 0)
    assert (resumed_folder / "summary.json").exists() is not saved
    assert run(module, tiny, resumed_folder) == 0
    if saved:
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


# One that trains, and those that take few seconds.
SHORT = ("run_sort", "run_path_counts", "check_bounds")


@pytest.mark.parametrize("name", full_but(reproduce.EXPERIMENTS, *SHORT))
def test_an_experiment_keeps_to_the_contract(name, request, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"experiments.{name}")
    run_folder, tiny = tmp_path / "here", list_arguments(name)
    captions = experiment.figure_captions(module.FIGURES)
    if name in TWICE:
        other_process = request.getfixturevalue("other_process")
        check_resumed(name, run_folder, tmp_path / "there", other_process, monkeypatch)
    else:
        assert run(module, tiny, run_folder) == 0
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


IN_DOUBLE = [n for n in reproduce.EXPERIMENTS if "dtype" in experiment.import_experiment(n).FLAGS]


@pytest.mark.full
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_every_column_of_a_run_in_float64_has_its_digits(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "draw_files", lambda *_: {})
    tiny = experiment.describe_experiment(name).presets["tiny"]
    assert run(experiment.import_experiment(name), [*tiny, "--dtype=float64"], tmp_path) == 0
    assert not single_columns(tmp_path)
