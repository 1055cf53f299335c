"""What every experiment keeps to, at its tiny size: the contract of `Experiment`.

It is computed in a process of its own, and here: stopped where it first saves something, resumed,
and shown again without computing. Both find the same to the bit.
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
from trained_runs import rows, run
from two_processes import REPOSITORY

from experiments import reproduce
from experiments.shell import process, signals
from experiments.shell.experiment import experiment_of
from experiments.shell.statements import STATEMENTS
from rank_collapse.runs.folder import RunFolder


@pytest.fixture(scope="module")
def elsewhere():
    """(command) → what a run in another process printed, which has to end well."""
    # Its first experiment, if that is run_architectures, would start JAX with one device for all.
    # The loop of a device over one seed is compiled away, and its body is then rounded otherwise.
    devices = f" --xla_force_host_platform_device_count={jax.device_count()}"
    own = {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "Agg"}
    own["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + devices
    child = process.start("contract", own)
    yield lambda command: process.answer_of(child, command, "")
    child.communicate()


def stop_at_the_first_save(patch):
    save = RunFolder.save_arrays

    def stopping(folder, arrays):
        save(folder, arrays)
        raise signals.Stopped(signal.SIGTERM)

    patch.setattr(RunFolder, "save_arrays", stopping)


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_an_experiment_keeps_to_the_contract(name, elsewhere, tmp_path, monkeypatch, capsys):
    module, own = importlib.import_module(f"experiments.{name}"), experiment_of(name)
    there, here = tmp_path / "there", tmp_path / "here"
    tiny = own.presets["tiny"]
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
    assert rows(there) == rows(here) and rows(here)
    check_columns(rows(here))

    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    check_second_run(lambda: run(module, tiny, here), here, capsys)
    drawn = {path.stem for path in (here / "figures").glob("*.p*")}
    assert drawn == {path.stem for path in (there / "figures").glob("*.png")}
    assert drawn and all(own.captions.values())

    shown = own.read(here)
    for row in shown.claims:
        assert name in STATEMENTS[row.key].experiments, row
        ends = row.interval(0.95)
        if ends is not None and row.estimate is not None:
            assert ends[0] <= row.estimate <= ends[1] and not any(map(math.isnan, ends)), row
    assert shown.claims or shown.comparisons
    other = own.read(there).claims
    assert [(r.key, r.setting, r.estimate) for r in shown.claims] == [
        (r.key, r.setting, r.estimate) for r in other
    ]
