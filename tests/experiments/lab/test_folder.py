"""Run folders: whole files, arrays and their list, checkpoints, environments and the log."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.lab import folder
from experiments.lab.folder import RunFolder
from experiments.lab.folder_files import read_summary
from experiments.lab.progress import read_activity
from rank_collapse.runs.files import RunError, make_folder
from tests.support.refusals import each_is_refused, is_refused

CONFIG = {"depth": 3, "scales": (0.5, 1.0), "name": "a"}


def test_a_run_leaves_everything_and_its_second_opening_finds_it(tmp_path):
    folder = tmp_path / "results" / "x"
    with RunFolder(folder, CONFIG, execution={"num_devices": 2}) as run:
        assert not run.resumed and run.summary is None
        run.log("begun")
        run.save_arrays({"a/b": jnp.arange(3)})
        figure = Figure()
        figure.subplots().plot([1, 2])
        run.save_figure("f", figure)
        run.save_table([{"seed": 0, "loss": 0.5}, {"seed": 1, "extra": "x,y"}])
        run.finish({"loss": np.float32(0.5), "per_seed": np.arange(2)})
    names = {p.name for p in folder.iterdir()}
    files = {
        "config.json",
        "results.csv",
        "arrays.npz",
        "summary.json",
        "figures",
        "log.txt",
    }
    assert names == files | {".lock"}  # no temporary name is left
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"]["scales"] == [0.5, 1.0]
    assert saved["execution"] == {"num_devices": 2}
    assert saved["environment"]["versions"]["jax"] == jax.__version__
    with RunFolder(folder, CONFIG) as again:
        assert again.resumed and again.has_file("figures/f.png")
        assert again.summary == {"loss": 0.5, "per_seed": [0, 1], "arrays": ["a/b (3,)"]}
        np.testing.assert_array_equal(again.arrays["a/b"], [0, 1, 2])
        assert set(again.part("a")) == {"b"} and again.part("a/") is None
    with open(folder / "results.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {"seed": "0", "loss": "0.5", "extra": ""} and second["extra"] == "x,y"
    assert read_summary(folder)["loss"] == 0.5
    assert "begun" in (folder / "log.txt").read_text()


def test_an_unfinished_run_that_lacks_an_array_is_refused_until_all_are_made_again(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"seeds/a": np.ones(2), "seeds/b": np.ones(2)})
    np.savez(tmp_path / "arrays.npz", **{"seeds/a": np.ones(2)})
    is_refused(r"arrays\.npz .*it lacks seeds/b\)", RunFolder, tmp_path, CONFIG, error=RunError)
    (tmp_path / "arrays.npz").unlink()  # as the message says
    RunFolder(tmp_path, CONFIG, read_only=True).close()  # which changes nothing
    assert "seeds/b" in json.loads((tmp_path / "config.json").read_text())["arrays"]
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"seeds/a": np.ones(1)})
    with RunFolder(tmp_path, CONFIG) as run:
        assert set(run.arrays) == {"seeds/a"}


def test_a_file_is_written_where_it_is_missing_cut_or_another(tmp_path):
    """A figure whose two files are there is not drawn again; the table is what the rows say."""
    first, second = Figure(), Figure()
    second.subplots()
    with RunFolder(tmp_path, CONFIG) as run:
        for figure in (first, second):
            run.save_figure("f", figure)
            run.save_table([{"part": "a"}, {"part": "b"}])
        path = tmp_path / "figures" / "f.png"
        original = path.read_bytes()
        path.unlink()
        run.save_figure("f", second)
        assert path.read_bytes() != original
        for content in ("", "part\na\n"):  # as a power failure leaves it; cut by hand
            (tmp_path / "results.csv").write_text(content)
            run.save_table([{"part": "a"}, {"part": "b"}])
            assert (tmp_path / "results.csv").read_text() == "part\na\nb\n"
        run.save_arrays({"b": np.ones((1, 2)), "a": np.ones(1)})
        run.finish({})
        assert run.summary["arrays"] == ["a (1,)", "b (1, 2)"]
        run.save_arrays({"c": np.ones(1)})
        assert run.summary is None  # it was complete without the new array
        run.finish({})
        run.delete_products()
        assert run.summary is None and not run.has_file("results.csv")
        assert run.lacks_figure("f") and run.has_file("arrays.npz")
    with RunFolder(tmp_path, CONFIG, read_only=True) as reader:
        reader.save_figure("f", first)
        reader.save_table([])
        reader.save_file("report.html", b"<p>")
    assert not (tmp_path / "figures").exists() and not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    each_is_refused(
        (
            lambda: RunFolder(tmp_path / "file" / "run", CONFIG),
            r"cannot write to .*file/run: Not a directory",
        ),
        (lambda: make_folder(tmp_path / "file"), "cannot write"),
        error=RunError,
    )


@pytest.mark.parametrize("change", [lambda a: a.pop("a/c"), lambda a: a.update({"a/c": a["a/b"]})])
def test_a_complete_run_that_lacks_an_array_is_refused(change, tmp_path):
    """The table would have a column less, or the numbers of another depth."""
    arrays = {"a/b": np.ones((2, 3)), "a/c": np.ones((2, 4))}
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays(arrays)
        run.finish({})
    RunFolder(tmp_path, CONFIG, read_only=True).close()
    change(arrays)
    np.savez(tmp_path / "arrays.npz", **arrays)
    for read_only in (False, True):
        is_refused(
            r"arrays\.npz .*it lacks a/c \(2, 4\)",
            RunFolder,
            tmp_path,
            CONFIG,
            read_only=read_only,
            error=RunError,
        )
    (tmp_path / "arrays.npz").unlink()  # as the message says
    with RunFolder(tmp_path, CONFIG) as run:
        assert run.resumed and run.part("a") is None


def test_checkpoints_resume_and_are_dropped_at_the_end(tmp_path):
    state = {"key": jax.random.key(3), "w": jnp.arange(4.0), "n": np.int32(7)}
    with RunFolder(tmp_path, CONFIG) as run:
        assert run.restore_checkpoint(state) is None
        run.save_checkpoint(10, state)
        earlier = (tmp_path / "checkpoints" / "10.npz").read_bytes()
        run.save_checkpoint(20, state | {"w": state["w"] + 1})
        step, back = run.restore_checkpoint(state)
        assert step == 20 and back["n"] == 7
        np.testing.assert_array_equal(back["w"], [1, 2, 3, 4])
        assert jax.random.normal(back["key"]) == jax.random.normal(state["key"])
        is_refused(
            r"w of shape \(4,\), not \(5,\)",
            run.restore_checkpoint,
            state | {"w": jnp.zeros(5)},
            error=RunError,
        )
        (tmp_path / "checkpoints" / "9.npz").write_bytes(earlier)  # the crash before it is deleted
        assert run.restore_checkpoint(state)[0] == 20
        with pytest.raises(RunError, match=r"/checkpoints/20\.npz does not fit this run"):
            run.restore_checkpoint(state | {"w": jnp.zeros(5)})
        run.finish({})
        assert not (tmp_path / "checkpoints").exists()


def test_checkpoints_of_several_computations_are_kept_apart(tmp_path):
    states = {name: {"w": np.full(2, number)} for number, name in enumerate(("a", "b", "bc"))}
    with RunFolder(tmp_path, CONFIG) as run:
        for step, (name, state) in enumerate(states.items()):
            run.save_checkpoint(step + 1, state, name)
        for number, (name, state) in enumerate(states.items()):
            step, restored = run.restore_checkpoint(state, name)
            assert step == number + 1 and restored["w"].tolist() == [number] * 2
        run.drop_checkpoints(but_of="b")
        kept = [name for name, state in states.items() if run.restore_checkpoint(state, name)]
        assert kept == ["b"]


def test_environments_of_later_processes_are_added_once(tmp_path, monkeypatch):
    """The first one is that of the process that began the run; one that only reads adds none. The
    command is that of the last process that measured: it alone asks for all draws."""
    machine = {"name": "first"}
    monkeypatch.setattr(folder.provenance, "environment", lambda: dict(machine))
    for name in ("first", "second", "first", "third", "unused"):
        machine["name"] = name
        with RunFolder(tmp_path, CONFIG, execution={"command": name}) as run:
            if name != "unused":
                run.save_arrays({"a": 1})
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["execution"] == {"command": "third"}
    assert saved["environment"] == {"name": "first"}
    assert saved["later"] == [{"name": "second"}, {"name": "third"}]
    with RunFolder(tmp_path, CONFIG) as run:
        assert [e["name"] for e in run.environments] == ["first", "second", "third"]


@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 2.0), (3.0, 30.0)])
def test_writing_takes_a_tenth_of_the_time_at_most(seconds, pause, tmp_path, monkeypatch):
    """Nor are there two writes within two seconds."""
    clock, writes = [100.0], []

    def write(path, arrays):
        writes.append(clock[0])
        clock[0] += seconds

    monkeypatch.setattr(folder.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(folder, "write_arrays", write)
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": 0})
        for number in range(100):
            clock[0] += 1.0
            run.keep_arrays({"a": number})
    gaps = np.diff(writes) - seconds
    # At the next second; the clock, a sum of 100 floats, is rounded.
    assert gaps == pytest.approx(pause + 1, rel=1e-6)


def test_a_message_of_several_lines_is_one_line_of_the_log(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.log("begun")
        assert read_activity(tmp_path) == "begun"  # without the time before it
        (tmp_path / "log.txt").unlink()
        run.log("two\nlines\x1b[31m")
    with RunFolder(tmp_path, CONFIG, read_only=True) as run:
        run.log("not written")
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert line.endswith("lines\\x1b[31m") and "not written" not in line


def test_every_array_that_was_ever_written_is_listed(tmp_path):
    """Also those of later writes and of views; a later opening adds to the list."""
    listed = []
    for names in (("a",), ("b", "view/c")):
        with RunFolder(tmp_path, CONFIG) as run:
            for name in names:
                run.save_arrays({name: np.ones(2)})
        listed.append(json.loads((tmp_path / "config.json").read_text())["arrays"])
    assert listed == [["a"], ["a", "b", "view/c"]]
    np.savez(tmp_path / "arrays.npz", **{"a": np.ones(2), "view/c": np.ones(2)})
    is_refused("it lacks b", RunFolder, tmp_path, CONFIG, error=RunError)


def test_a_list_of_arrays_that_is_none_says_nothing(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": np.ones(2)})
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    for listed in (None, 5, "ab", {"b": 1}):
        path.write_text(json.dumps(saved | {"arrays": listed}))
        with RunFolder(tmp_path, CONFIG) as run:
            assert {*run.arrays} == {"a"}


def test_a_complete_run_has_no_folder_of_its_unfinished_points(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        for name in ("points", "checkpoints"):
            (tmp_path / name / "inner").mkdir(parents=True)
        run.finish({})
    assert not (tmp_path / "points").exists() and not (tmp_path / "checkpoints").exists()
