"""Files of a run: damage is an error of one line that names the file; metrics.jsonl."""

import json
import os
import re
import resource

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.lab.folder import RunFolder
from experiments.lab.folder_files import read_rows, read_summary, table_bytes
from rank_collapse.runs.files import RunError
from tests.support.refusals import each_is_refused, is_refused

CONFIG = {"depth": 3}


def cannot_open(folder, message):
    is_refused(message, RunFolder, folder, CONFIG, error=RunError)


NOT_AN_OBJECT = ["[]", "3", "null", '"a"', "[" * 100_000, "{", "\xff"]


@pytest.mark.parametrize("content", NOT_AN_OBJECT)
def test_a_config_of_another_type_is_named(tmp_path, content):
    RunFolder(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    cannot_open(tmp_path, r"config\.json cannot be read .*; use another folder")


@pytest.mark.parametrize("content", NOT_AN_OBJECT)
def test_a_summary_of_another_type_is_named(tmp_path, content):
    with RunFolder(tmp_path, CONFIG) as run:
        run.finish({"loss": 1.0})
        (tmp_path / "summary.json").write_bytes(content.encode("latin-1"))
        is_refused("summary", read_summary, tmp_path, error=RunError)
        is_refused("delete this file", lambda: run.summary, error=RunError)
        (tmp_path / "summary.json").unlink()
        assert run.summary is None


def test_a_config_of_another_type_within_is_refused(tmp_path):
    RunFolder(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_text(json.dumps({"config": [1]}))
    cannot_open(tmp_path, "has no config")


def test_a_config_of_another_program_is_not_that_of_a_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"rate": 1}}))
    (tmp_path / "models").mkdir()
    message = "has no config of a run"
    is_refused(message, RunFolder, tmp_path, CONFIG, overwrite=True, error=RunError)
    assert (tmp_path / "models").exists()


def test_nothing_is_computed_where_a_folder_is_only_read(tmp_path):
    RunFolder(tmp_path, CONFIG).close()
    run = RunFolder(tmp_path, CONFIG, read_only=True)
    is_refused(r"arrays\.npz .*lacks seeds of 'a'", run.cached, "a", dict, error=RunError)


STATE = {"w": np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32), "n": np.int32(7)}


# numpy 2.0 closes an archive that could not be written once more.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_line_and_the_state_before_stays(tmp_path, capfd):
    """A limit on the size of files replaces a full disk: libraries raise the same errors."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, STATE)
        big = {"w": np.random.default_rng(1).normal(size=20_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            each_is_refused(
                (lambda: run.save_checkpoint(2, big), r"cannot write to .*2\.npz: File too large"),
                (lambda: run.save_arrays(big), r"cannot write to .*arrays\.npz: File too large"),
                error=RunError,
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert capfd.readouterr() == ("", "")
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1.npz"]
        assert run.restore_checkpoint(STATE)[0] == 1
        run.save_checkpoint(2, big)


def test_a_folder_that_is_a_file_is_one_error(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        (tmp_path / "figures").write_text("")
        is_refused(
            r"cannot write to .*figures: .*exists",
            lambda: run.save_figure("a", Figure()),
            error=RunError,
        )
    RunFolder(tmp_path, CONFIG, overwrite=True).close()


@pytest.fixture
def linked(tmp_path):
    """A run folder beside a file and a folder of the user, which links inside of it lead to."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "docs").mkdir()
    with RunFolder(tmp_path / "run", CONFIG) as run:
        run.save_arrays({"a": np.ones(2)})
    yield tmp_path / "run"
    assert (tmp_path / "mine").read_text() == "mine"
    assert not [*(tmp_path / "docs").iterdir()]


@pytest.mark.parametrize("name", [".lock", "log.txt"])
def test_a_file_that_is_written_in_place_is_no_link(linked, name):
    (linked / name).unlink(missing_ok=True)
    (linked / name).symlink_to(linked.parent / "mine")

    def write():
        with RunFolder(linked, CONFIG) as run:
            run.log("a line")

    is_refused(rf"cannot write to .*{re.escape(name)}: it is a link", write, error=RunError)


@pytest.mark.parametrize("name", ["figures", "metrics", "models", "checkpoints/sort", "points/0"])
def test_a_folder_inside_of_a_run_is_no_link(linked, name):
    (linked / name).parent.mkdir(exist_ok=True)
    (linked / name).symlink_to(linked.parent / "docs")
    cannot_open(linked, rf"cannot write to .*{name}: it is a link, to .*docs$")
    RunFolder(linked, CONFIG, overwrite=True).close()  # which deletes the link


def test_the_folder_of_a_run_may_be_a_link(linked):
    (linked.parent / "link").symlink_to(linked)
    with RunFolder(linked.parent / "link", CONFIG) as run:
        run.log("a line")
        assert run.resumed


def test_no_file_of_a_run_is_written_through_a_link_or_a_second_name(linked):
    """The temporary names of earlier versions, final names, and hard links to a file."""
    names = ("results.csv", "config.json", "arrays.npz", "figures/f.png", "summary.json")
    (linked / "figures").mkdir()
    for name in names:
        path = linked / name
        path.with_name(f".{path.name}.tmp").symlink_to(linked.parent / "mine")
        if not path.exists() and name != "summary.json":  # which is read first
            path.symlink_to(linked.parent / "mine")
    (linked / ".lock").unlink()
    (linked / ".lock").hardlink_to(linked.parent / "mine")
    (linked / "log.txt").hardlink_to(linked.parent / "mine")
    figure = Figure()
    figure.subplots().plot([1, 2])
    with RunFolder(linked, CONFIG) as run:
        run.log("a line")
        run.save_arrays({"b": np.ones(2)})
        run.save_figure("f", figure)
        run.save_table([{"x": 1}])
        run.finish({})
    for path in (linked / name for name in names):
        assert path.stat().st_size and not path.is_symlink()
    log = (linked / "log.txt").read_text()
    assert log.startswith("mine") and "a line" in log


@pytest.mark.parametrize("name", ["log.txt", "config.json", "arrays.npz", "summary.json", ".lock"])
def test_a_pipe_in_the_place_of_a_file_is_one_line_at_once(linked, name):
    (linked / name).unlink(missing_ok=True)
    os.mkfifo(linked / name)

    def use():
        with RunFolder(linked, CONFIG) as run:
            run.log("a line")

    is_refused(rf"{re.escape(name)}.*not a regular file", use, error=RunError)


def test_what_a_killed_process_left_is_deleted(linked):
    left = linked / "checkpoints" / ".rank_collapse-0123456789abcdef.tmp"
    left.parent.mkdir()
    left.write_text("")
    (linked / ".notes.tmp").write_text("")  # of somebody else
    RunFolder(linked, CONFIG).close()
    assert not left.exists() and (linked / ".notes.tmp").exists()


@pytest.fixture
def path(tmp_path):
    """The path of a file of metrics."""
    return tmp_path / "m.jsonl"


def test_a_table_is_read_as_it_was_written():
    rows = [{"a": "-0.002 (-0.016 to 0.011)", "b": "'quoted'"}, {"a": "=1", "b": "-1.5"}]
    assert read_rows(table_bytes(rows)) == rows
