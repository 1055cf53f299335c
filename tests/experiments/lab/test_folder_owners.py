"""Owners of a run folder: one config, one version and one process; files of others stay."""

import json
import os

import numpy as np
import pytest

from experiments.lab.folder import RunFolder
from experiments.lab.folder_files import LAYOUT
from rank_collapse.runs.files import RunError, describe_difference
from tests.support.refusals import is_refused

CONFIG = {"depth": 3, "scales": (0.5, 1.0), "name": "a"}


@pytest.mark.parametrize("layout", [None, 1, "2"])
def test_a_folder_that_another_version_made_is_refused(tmp_path, layout):
    with RunFolder(tmp_path, CONFIG):
        pass
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    assert saved.pop("layout") == LAYOUT
    path.write_text(json.dumps(saved | ({} if layout is None else {"layout": layout})))
    is_refused(
        f"another version .*layout {layout or 1} there", RunFolder, tmp_path, CONFIG, error=RunError
    )


def test_another_config_is_refused_with_the_difference_and_overwrite_starts_afresh(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": 1})
        run.finish({})
    for name in ("models.safetensors", "models/depth-4.npz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"weights")
    (tmp_path / "notes.txt").write_text("mine")
    other = CONFIG | {"depth": 4}
    with pytest.raises(RunError, match="depth is 3 there, 4 here") as caught:
        RunFolder(tmp_path, other)
    assert "name" not in str(caught.value).split(":")[1].split(";")[0]
    with RunFolder(tmp_path, other, overwrite=True) as run:
        assert not run.resumed and run.arrays == {} and run.summary is None
    assert not (tmp_path / "models.safetensors").exists() and not (tmp_path / "models").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (
        describe_difference({"a": 1}, {"b": 1})
        == "a is 1 there, 'absent' here; b is 'absent' there, 1 here"
    )


def test_axes_in_another_order_are_another_config(tmp_path):
    """Arrays are named in their order: all points would be computed again, beside the others."""
    axes = {"depth": ["2", "3"], "gain": ["0.5", "1"]}
    RunFolder(tmp_path, CONFIG | {"axes": axes}).close()
    RunFolder(tmp_path, {"axes": axes} | CONFIG).close()
    other = CONFIG | {"axes": dict(reversed(axes.items()))}
    is_refused("axes is {'depth': .* there, {'gain'", RunFolder, tmp_path, other, error=RunError)


@pytest.mark.parametrize("content", [None, {"config": CONFIG | {"depth": 4}, "execution": {}}])
def test_a_run_is_not_complete_with_the_config_of_another(content, tmp_path):
    path = tmp_path / "config.json"
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": 1})
        saved = path.read_text()
        path.unlink()
        if content is not None:
            path.write_text(json.dumps(content))
        is_refused(r"config\.json|depth is 4 there", run.finish, {}, error=RunError)
    path.write_text(saved)
    with RunFolder(tmp_path, CONFIG) as run:
        assert run.summary is None and run.arrays == {"a": 1}


def test_execution_does_not_take_part_in_the_comparison(tmp_path):
    RunFolder(tmp_path, CONFIG, execution={"num_devices": 1}).close()
    with RunFolder(tmp_path, CONFIG, execution={"num_devices": 2}) as run:
        assert run.resumed


def test_whoever_comes_second_is_told_who_holds_the_folder(tmp_path):
    """A lock belongs to an open file, so this process is refused like another one."""
    with RunFolder(tmp_path, CONFIG):
        is_refused(f"pid {os.getpid()} on", RunFolder, tmp_path, CONFIG, error=RunError)
    RunFolder(tmp_path, CONFIG).close()


def test_results_without_a_config_are_not_taken_over(tmp_path):
    (tmp_path / "results.csv").write_text("a\n")
    is_refused("not a run folder", RunFolder, tmp_path, CONFIG, error=RunError)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_files_of_others_stay(overwrite, tmp_path):
    theirs = ("config.json", "models/a.pt", "figures/.a.tmp", "src/.notes.tmp", ".draft.tmp")
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    options = {"overwrite": overwrite, "error": RunError}
    is_refused("not a run folder", RunFolder, tmp_path, CONFIG, **options)
    for name in ("config.json", "models/a.pt", "figures/.a.tmp"):
        (tmp_path / name).unlink()
    (tmp_path / "models").rmdir()
    (tmp_path / "figures").rmdir()
    RunFolder(tmp_path, CONFIG, overwrite=overwrite).close()
    assert all((tmp_path / name).read_text() == "{}" for name in theirs[3:])


@pytest.mark.parametrize("place", ["nothing", "a folder", "another run"])
def test_a_folder_that_was_moved_is_not_made_again(place, tmp_path):
    """Checkpoints made it, and the run ended well in a folder without a config."""
    folder, away = tmp_path / "run", tmp_path / "away"
    with RunFolder(folder, CONFIG) as run, RunFolder(tmp_path / "other", {}) as other:
        other.finish({})
        folder.rename(away)
        if place == "another run":
            other.path.rename(folder)
        elif place == "a folder":
            folder.mkdir()
        names = {p.name for p in tmp_path.rglob("*")}
        for write in (
            lambda: run.save_arrays({"a": 1}),
            lambda: run.save_checkpoint(1, {"a": np.ones(2)}),
            lambda: run.save_table([]),
            lambda: run.finish({}),
        ):
            is_refused("no longer the folder of this run", write, error=RunError)
        assert {p.name for p in tmp_path.rglob("*")} == names
    with RunFolder(away, CONFIG) as again:
        assert again.resumed


@pytest.mark.parametrize("name", ["1.npz", "arrays.npz", "summary.json", "results.csv"])
def test_what_overwrite_cannot_delete_is_not_taken_over(name, tmp_path, monkeypatch):
    """Root may delete everything, so the answer of the system is simulated.

    The config is deleted last, so that the folder stays that of a run.
    """
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": np.ones(2)})
        run.save_table([{"a": 1}])
        run.finish({})
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "1.npz").write_bytes(b"state")
    unlink = os.unlink

    def refuse(path, **options):
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    is_refused(
        "cannot write to .*: Permission denied",
        RunFolder,
        tmp_path,
        CONFIG,
        overwrite=True,
        error=RunError,
    )
    assert (tmp_path / "config.json").exists()


def test_a_log_alone_is_not_a_run(tmp_path):
    """A command that was refused may have left it."""
    (tmp_path / "log.txt").write_text("a line\n")
    with RunFolder(tmp_path, CONFIG) as run:
        assert not run.resumed
