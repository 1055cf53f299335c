"""Files of a run: damage is an error of one line that names the file; metrics.jsonl."""

import errno
import itertools
import json
import os
import random
import re
import resource
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.lab.folder import RunFolder, read_summary
from rank_collapse.runs import files, metrics, states
from rank_collapse.runs.files import RunError, load_arrays
from tests.support.refusals import each_is_refused, is_refused

CONFIG = {"depth": 3}


def damage(content, chance):
    """Changes some of the bytes, cuts a piece out, or cuts off the end."""
    content, kind = bytearray(content), chance.random()
    if kind < 0.6:
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] ^= chance.randint(1, 255)
    elif kind < 0.8:
        start = chance.randrange(len(content))
        del content[start : start + chance.randint(1, 50)]
    else:
        del content[chance.randrange(len(content)) :]
    return bytes(content)


def test_arrays_of_texts_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(2), b=np.array(["1.0", "2.0"]))
    is_refused("more than arrays of numbers", load_arrays, tmp_path / "a.npz", error=RunError)


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


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused_or_the_same(tmp_path):
    states.save_state(tmp_path, 3, STATE)
    path, chance = states.state_path(tmp_path, 3), random.Random(1)
    content, refused = path.read_bytes(), 0
    for _ in range(100):
        path.write_bytes(damage(content, chance))
        try:
            state = states.restore_state(tmp_path, 3, STATE)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("checkpoint 3 ") and "\n" not in str(error)
        else:
            np.testing.assert_array_equal(state["w"], STATE["w"])
            assert state["n"] == 7
    assert refused > 90


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
            lambda: run.publish(rows=list, summary=dict, figures={"a": Figure}),
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
        run.publish(rows=lambda: [{"x": 1}], summary=dict, figures={"f": lambda: figure})
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


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays({"a": np.ones(2)})
    assert (tmp_path / "arrays.npz").exists()


@pytest.fixture
def path(tmp_path):
    """The path of a file of metrics."""
    return tmp_path / "m.jsonl"


def test_lines_are_valid_json_and_come_back(path):
    by_layer = [1.0, np.nan, np.inf, -np.inf]
    metrics.append(path, 3, {"loss": np.float32(0.5), "by_layer": by_layer}, seed=1)
    metrics.append(path, 2, {"loss": np.inf, "other": np.nan})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    first, second = metrics.read(path)
    assert first["step"] == 2 and first["loss"] == np.inf and "seed" not in first
    assert np.isnan(first["other"])
    assert (second["step"], second["seed"], second["loss"]) == (3, 1, 0.5)
    np.testing.assert_array_equal(second["by_layer"], by_layer)


def test_a_step_that_is_written_again_counts_once(path):
    for step, loss in ((1, 3.0), (2, 2.0), (1, 1.0)):
        metrics.append(path, step, {"loss": loss})
    assert [row["loss"] for row in metrics.read(path)] == [1.0, 2.0]


def test_lines_that_are_written_again_are_dropped_before(tmp_path):
    path = tmp_path / metrics.NAME
    metrics.drop(path, [0])  # nothing there
    assert not path.exists()
    for step, seed in itertools.product(range(4), range(3)):
        metrics.append(path, step, {"loss": 1.0}, seed=seed)
    with open(path, "ab") as file:
        file.write(b'{"step": 9, "lo')
    metrics.drop(path, iter([0, 2]), 1)
    places = [(row["seed"], row["step"]) for row in metrics.read(path)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert path.read_bytes().count(b"\n") == len(places)


def test_lines_are_dropped_of_the_seeds_and_steps_that_are_named(path):
    """A line without a seed is of seed 0; what is no line of a step stays."""
    lines = (
        '{"step": 0, "loss": 1}',
        '{"step": 2, "seed": 1, "loss": 2}',
        '{"step": 1, "loss": 3}',
        '{"step": true, "loss": 4}',
        '{"note": 1}',
        "[1]",
    )
    for options, kept in (
        ({"seeds": [0], "after": 0}, (0, 1, 3, 4, 5)),
        ({"seeds": [0]}, (1, 3, 4, 5)),
        ({"seeds": [1], "after": 2}, range(6)),
        ({"seeds": [0, 1], "after": 1}, (0, 2, 3, 4, 5)),
    ):
        path.write_text("".join(f"{line}\n" for line in lines) + '{"step": 0, "lo')
        metrics.drop(path, **options)
        assert path.read_text() == "".join(f"{lines[i]}\n" for i in kept)
        inode = path.stat().st_ino
        metrics.drop(path, **options)  # nothing is left to be dropped: the file is not written
        assert path.stat().st_ino == inode


def test_rows_come_in_order_of_their_seeds_and_then_steps(path):
    places = [(1, 0), (5, 0), (1, 2), (3, None)]
    for step, seed in reversed(places):
        metrics.append(path, step, {"loss": 1.0}, seed=seed)
    rows = metrics.read(path)
    assert [(r["step"], r.get("seed")) for r in rows] == [(1, 0), (3, None), (5, 0), (1, 2)]


@pytest.mark.parametrize("content", ["", "\n", '{"step": 2, "lo', "[" * 100_000])
def test_a_file_in_which_nothing_is_finished_has_no_rows(path, content):
    path.write_text(content)
    assert metrics.read(path) == []
    metrics.append(path, 1, {"loss": [2]})
    assert len(metrics.read(path)) == 1 and metrics.read(path)[0]["loss"].tolist() == [2]


def test_the_folder_of_metrics_is_made_and_names_of_places_are_refused(path):
    for name in ("step", "seed"):
        is_refused(f"'{name}' of shape", metrics.append, path, 1, {name: 1.0})
    below = path.parent / "metrics" / "a.jsonl"
    metrics.append(below, np.int64(3), {"a": True, "b": np.float32(0.25)}, seed=2.0)
    assert below.read_text() == '{"step": 3, "seed": 2, "a": 1.0, "b": 0.25}\n'


def test_values_are_read_as_they_were_written(path):
    path.write_text('{"step": 1, "seed": 2.0, "a": null, "b": [1, null, "-Infinity"], "c": 3}\n')
    (row,) = metrics.read(path)
    assert np.isnan(row["a"]) and row["c"] == 3 and type(row["seed"]) is int
    np.testing.assert_array_equal(row["b"], [1, np.nan, -np.inf])


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(path):
    metrics.append(path, 1, {"loss": 1.0})
    first_line = path.read_bytes()
    path.write_bytes(first_line + b'{"step": 2, "lo')
    assert len(metrics.read(path)) == 1
    metrics.append(path, 3, {"loss": 3.0})
    assert [row["step"] for row in metrics.read(path)] == [1, 3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "no JSON object"),
        ('{"loss": 1}', "'step'"),
        ('{"step": true}', "'step'"),
        ('{"step": 1.5, "loss": 1}', "'step'"),
        ('{"step": 1' + 400 * "0" + ".0}", "'step'"),
        ('{"step": 1' + 400 * "0" + "}", "'step'"),
        ('{"step": 1, "seed": [1]}', "'step'"),
    ],
)
def test_other_files_are_refused_in_a_line(path, tmp_path, content, message):
    path.write_text(content + "\n")
    each_is_refused(
        (lambda: metrics.read(path), message),
        (lambda: metrics.read(tmp_path / "absent"), "cannot be read"),
        error=RunError,
    )


@pytest.mark.parametrize(
    "value", ["[{}]", '{"b": 1}', '"begun"', '["2"]', "true", "1" + 400 * "0"], ids=str
)
def test_what_is_no_metric_is_left_out(path, value):
    """Left out are the value, and a line without a step; 1.0 is a step."""
    path.write_text(f'{{"_step": 0}}\n{{"step": 1.0, "a": {value}, "loss": 2}}\n')
    assert metrics.read(path) == [{"step": 1, "loss": 2.0}]


def test_values_of_other_shapes_are_refused(path):
    append = partial(metrics.append, path, 1)
    is_refused("'loss' of shape", append, {"loss": np.zeros((2, 2))})
    for wrong in ("hi", {"a": 1}, [1, [2, 3]]):
        message = re.escape(f"'note'={wrong!r} is not a metric")
        is_refused(message, append, {"loss": 1.0, "note": wrong})
    for wrong in (0.5, None, "3", np.nan):
        is_refused("step=.* is not a whole number", metrics.append, path, wrong, {"loss": 1.0})
    is_refused("seed=1.5 is not a whole number", append, {"loss": 1.0}, seed=1.5)
    is_refused("not a mapping", append, [1.0])
    assert not path.exists()


def test_the_run_folder_keeps_it_and_overwrite_deletes_it(tmp_path):
    with RunFolder(tmp_path, {"a": 1}) as run:
        metrics.append(run.path / metrics.NAME, 1, {"loss": 1.0}, seed=0)
    with RunFolder(tmp_path, {"a": 1}) as run:
        assert len(metrics.read(run.path / metrics.NAME)) == 1
    with RunFolder(tmp_path, {"a": 1}, overwrite=True) as run:
        assert not (run.path / metrics.NAME).exists()
