"""What every experiment keeps to, at its tiny size: the contract of `Experiment`.

It is computed in a process of its own, and here: stopped where it first saves something, resumed,
and shown again without computing. Both find the same to the bit. What is measured as in run_sort,
of other data, is computed here alone.
"""

import importlib
import math
import os
import signal

import jax
import pytest
from chunked_runs import same_arrays
from data_dictionary import check_columns
from second_run import check_second_run
from trained_runs import contents, rows, run
from two_processes import REPOSITORY

from experiments import reproduce
from experiments.shell import process, signals
from experiments.shell.experiment import experiment_of
from experiments.shell.statements import STATEMENTS
from rank_collapse.runs import folder
from rank_collapse.runs.drawn import drawn
from rank_collapse.runs.folder import RunFolder


@pytest.fixture(scope="module")
def elsewhere():
    """(command) → what a run in another process printed, which has to end well."""
    # Its first experiment, if that is run_architectures, would start JAX with one device for all.
    # The loop of a device over one seed is compiled away, and its body is then rounded otherwise.
    devices = f" --xla_force_host_platform_device_count={jax.device_count()}"
    own = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", "MPLBACKEND": "Agg"}
    own["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + devices
    child = process.start("contract", own)
    as_data = "from figures_as_data import as_data; from rank_collapse.runs import folder; "
    as_data += "folder.drawn = as_data"
    assert process.answer_of(child, ["any_code", f"--code={as_data}"], "")[1] == 0
    yield lambda command: process.answer_of(child, command, "")
    child.communicate()


def stop_at_the_first_save(patch):
    save = RunFolder.save_arrays

    def stopping(run, arrays):
        save(run, arrays)
        raise signals.Stopped(signal.SIGTERM)

    patch.setattr(RunFolder, "save_arrays", stopping)


AS_SORT = ("run_convex_hull", "run_memorization")


def check_resumed(name, here, there, elsewhere, monkeypatch):
    """A run that was stopped, and goes on, has found what one in another process has."""
    module, tiny = (
        importlib.import_module(f"experiments.{name}"),
        experiment_of(name).presets["tiny"],
    )
    printed, code, _ = elsewhere([f"experiments.{name}", *tiny, f"--output_dir={there}"])
    assert code == 0, "".join(printed)
    with monkeypatch.context() as patch:
        stop_at_the_first_save(patch)
        code = run(module, tiny, here)
    saved = (there / "arrays.npz").exists()
    assert code == (143 if saved else 0)
    assert (here / "summary.json").exists() is not saved
    assert run(module, tiny, here) == 0
    if saved:
        same_arrays(there, here)
    assert contents(there) == contents(here)


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_an_experiment_keeps_to_the_contract(name, elsewhere, tmp_path, monkeypatch, capsys):
    module, own = importlib.import_module(f"experiments.{name}"), experiment_of(name)
    here, tiny = tmp_path / "here", own.presets["tiny"]
    if name in AS_SORT:
        assert run(module, tiny, here) == 0
    else:
        check_resumed(name, here, tmp_path / "there", elsewhere, monkeypatch)
    check_columns(rows(here))

    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    check_second_run(lambda: run(module, tiny, here), here, capsys)
    assert list((here / "figures").iterdir()) and all(own.captions.values())

    shown = own.read(here)
    for row in shown.claims:
        assert name in STATEMENTS[row.key].experiments, row
        ends = row.interval(0.95)
        if ends is not None and row.estimate is not None:
            assert ends[0] <= row.estimate <= ends[1] and not any(map(math.isnan, ends)), row
    assert shown.claims or shown.comparisons


@pytest.mark.slow
@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_figures_are_drawn_as_users_see_them(name, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "drawn", drawn)
    module = importlib.import_module(f"experiments.{name}")
    assert run(module, experiment_of(name).presets["tiny"], tmp_path) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".pdf"}
