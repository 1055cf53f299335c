"""The folder of a sweep: of another sweep, damaged, in use, on a full disk, interrupted."""

import dataclasses
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

from rank_collapse.runs import files
from rank_collapse.training.engine import files as sweep_files
from rank_collapse.training.engine.files import SweepFolder
from rank_collapse.training.engine.program import Program
from rank_collapse.training.engine.runs import Runs
from tests.oracles.small_sweeps import list_files, run, step, with_static
from tests.support.refusals import is_refused


def faster(state, hyper, index):
    return step(state, {"rate": 2 * hyper["rate"]}, index)


def shifted(state, hyper, index):
    """Computes what `step` does, with other data."""
    loss = jnp.sum(state["w"] ** 2)
    return {"w": (1 - hyper["rate"]) * state["w"] + np.ones(3)}, {"loss": loss}


def find_snapshot(folder):
    return next(folder.glob("runs/*.npz"))


def write_over(name, content):
    """Returns what writes other bytes into a file of a folder, None for its snapshot."""

    def write(folder):
        path = find_snapshot(folder) if name is None else folder / name
        path.write_bytes(content(path.read_bytes()))

    return write


def drop_losses(folder):
    path = find_snapshot(folder)
    arrays = dict(np.load(path))
    arrays["metrics/0"] = arrays["metrics/0"][:, :1]
    np.savez(path, **arrays)


def flip_a_loss(folder):
    """Flips a bit of a number in a snapshot, which is not compressed."""
    path = find_snapshot(folder)
    content, losses = bytearray(path.read_bytes()), np.load(path)["metrics/0"].tobytes()
    content[content.index(losses)] ^= 1
    path.write_bytes(content)


def drop_seeds(folder):
    """Writes a snapshot without one of its arrays."""
    path = find_snapshot(folder)
    arrays = dict(np.load(path))
    del arrays["seeds"]
    np.savez(path, **arrays)


def change_dtype(folder):
    """Writes the losses of a snapshot as numbers of another dtype."""
    path = find_snapshot(folder)
    arrays = dict(np.load(path))
    arrays["metrics/0"] = arrays["metrics/0"].astype(np.float64)
    np.savez(path, **arrays)


OTHER, DAMAGED = "^[^ ]* belongs to another sweep: .*", "delete this file, and the same"


# {misuse: (message, changes, what was done to the folder)}
FOLDERS = {
    "another init": (
        f"{OTHER}init is another function",
        {"init": lambda k, h: {"w": jnp.ones(3)}},
        None,
    ),
    "another step": (
        f"{OTHER}step is another function; use another folder",
        {"step": faster},
        None,
    ),
    "other data": (f"{OTHER}close over other arrays", {"step": shifted}, None),
    "other values": (
        OTHER + r"in hyper rate is \[0.1, 0.2\] there, \[0.1, 0.3\] here;",
        {"hyper": {"rate": [0.1, 0.3]}},
        None,
    ),
    "another key": (OTHER + r"key is \[0, 0\] there, \[0, 1\] here", {"key": 1}, None),
    "a look": (
        f"{OTHER}look= is given here, not there; use",
        {"look": lambda s, h, k: s["w"]},
        None,
    ),
    "other finite metrics": (f"{OTHER}finite is None there", {"finite": []}, None),
    "static values": (
        f"{OTHER}in static size is 'absent' there, .* here; use another folder",
        with_static(size=[1, 2]),
        None,
    ),
    "sweep.json is cut": (
        "sweep.json cannot be read .* use another",
        {},
        write_over("sweep.json", lambda content: content[:1]),
    ),
    "sweep.json is a list": (
        "sweep.json .*use another",
        {},
        write_over("sweep.json", lambda content: b"[]"),
    ),
    "sweep.json is missing": (
        "has runs, but no sweep.json",
        {},
        lambda folder: (folder / "sweep.json").unlink(),
    ),
    "a snapshot is cut": (DAMAGED, {}, write_over(None, lambda content: content[:300])),
    "a snapshot is empty": (DAMAGED, {}, write_over(None, lambda content: b"")),
    "a bit of a snapshot is flipped": (DAMAGED, {}, flip_a_loss),
    "a snapshot has fewer losses": (DAMAGED, {}, drop_losses),
    "a snapshot has losses of another dtype": (DAMAGED, {}, change_dtype),
    "a snapshot has no seeds": (DAMAGED, {}, drop_seeds),
}


@pytest.mark.parametrize("misuse", FOLDERS)
def test_a_folder_of_another_sweep_or_damaged_is_refused_and_stays(misuse, used_folder, tmp_path):
    message, changes, spoil = FOLDERS[misuse]
    folder = tmp_path / "copy"
    shutil.copytree(used_folder, folder)
    if spoil is not None:
        spoil(folder)
    saved = list_files(folder)
    is_refused(message, run, error=files.RunError, folder=folder, **changes)
    assert list_files(folder) == saved


def test_looks_of_a_folder_are_at_its_own_steps(tmp_path):
    """Without `look`, a sweep resumes with chunks of another size."""
    look = {"look": lambda state, hyper, key: state["w"], "folder": tmp_path}
    run(**look)
    is_refused("every is 2 there, 1 here; use another", run, error=files.RunError, every=1, **look)
    message = "another sweep: look= is given there, not here; use another"
    is_refused(message, run, error=files.RunError, folder=tmp_path)
    message = "another sweep: look is another function; use another"
    other = {"folder": tmp_path, "look": lambda state, hyper, key: 2 * state["w"]}
    is_refused(message, run, error=files.RunError, **other)
    plain = tmp_path / "plain"
    run(folder=plain)
    extended = run(folder=plain, every=1, steps=5).metrics["loss"]
    np.testing.assert_array_equal(extended, run(steps=5).metrics["loss"])


def test_seeds_join_runs_that_were_extended_to_more_steps(tmp_path):
    """The look after the last step of the shorter sweep is no look of the longer one."""
    look = {"look": lambda state, hyper, key: state["w"], "every": 3}
    run(**look, steps=4, folder=tmp_path)
    run(**look, steps=8, folder=tmp_path)
    joined, alone = run(**look, steps=8, seeds=3, folder=tmp_path), run(**look, steps=8, seeds=3)
    assert joined.looks.step.values.tolist() == [0, 3, 6, 8]
    xarray.testing.assert_identical(joined.looks, alone.looks)
    xarray.testing.assert_identical(joined.metrics, alone.metrics)


def test_a_folder_is_of_what_its_functions_close_over_and_of_no_order_of_names(tmp_path):
    """Arrays of init and of a look count as those of step do."""

    def begin_at(shift):
        return lambda key, hyper: {"w": jax.random.normal(key, (3,)) + shift}

    def look_from(shift):
        return lambda state, hyper, key: state["w"] + shift

    def measure_two(state, hyper, index):
        state, metrics = step(state, hyper, index)
        return state, metrics | {"also": state["w"][0]}

    options = {"folder": tmp_path, "steps": 2, "seeds": 1, "hyper": {"rate": 0.1}}
    options |= {"init": begin_at(np.zeros(3)), "look": look_from(np.zeros(3)), "step": measure_two}
    first = run(finite=["loss", "also"], **options)
    for names in (("also", "loss"), {"also", "loss"}):
        again = run(finite=names, **options)
        np.testing.assert_array_equal(first.metrics["also"], again.metrics["also"])
    for changes in ({"init": begin_at(np.ones(3))}, {"look": look_from(np.ones(3))}):
        changed = options | {"finite": ["also", "loss"]} | changes
        is_refused("belongs to another sweep", run, error=files.RunError, **changed)


def test_a_folder_that_is_used_or_cannot_be_written_is_refused(used_folder):
    saved = list_files(used_folder)
    with files.lock_folder(used_folder):
        is_refused("is in use by another process", run, error=files.RunError, folder=used_folder)
    is_refused(
        "steps=3, but .* has 4 steps: a sweep can be extended", run, folder=used_folder, steps=3
    )
    for path in ("/dev/null/x", "/proc/self/x"):
        is_refused("cannot write to", run, error=files.RunError, folder=path)
    assert list_files(used_folder) == saved
    again, whole = (run(folder=folder).metrics["loss"] for folder in (used_folder, None))
    np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize(("processes", "stays"), [(1, False), (2, True)])
def test_what_a_killed_process_was_writing_is_deleted(processes, stays, tmp_path, monkeypatch):
    """Unless another process may still write it."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    paths = [tmp_path / "runs" / name for name in (".a.npz.tmp", ".b.npz.tmp")]
    paths[0].parent.mkdir()
    for path in paths:
        path.touch()
    with SweepFolder(tmp_path, {"steps": 1}):
        assert [path.exists() for path in paths] == [stays] * 2


def test_a_folder_of_another_jax_goes_on_and_its_version_is_said_where_functions_differ(tmp_path):
    """Only where something else differs: the same program may be another text."""
    config = {"step": ["a"], "jax": "2"}
    with SweepFolder(tmp_path, config | {"jax": "1"}):
        pass
    with SweepFolder(tmp_path, config):
        pass
    message = r"^[^ ]* belongs to another sweep \(made by JAX 1\): step is another function; use"
    is_refused(message, SweepFolder, tmp_path, config | {"step": ["b"]}, error=files.RunError)
    message = "^[^ ]* belongs to another sweep: step is another function; use"
    changes = {"step": ["b"], "jax": "1"}
    is_refused(message, SweepFolder, tmp_path, config | changes, error=files.RunError)


def test_other_axes_hide_what_follows_from_them(tmp_path):
    """Of other values in hyper or static, programs, data, looks and their steps differ too."""
    config = {"hyper": {"a": 1}, "static": {}, "init": ["i"], "step": ["s"]}
    config |= {"data": ["d"], "look": ["l"], "every": 2}
    with SweepFolder(tmp_path, config):
        pass
    effects = {"init": ["j"], "step": ["t"], "data": ["e"], "look": ["m"], "every": 3}
    for change, difference in (
        ({"hyper": {"a": 2}}, "in hyper a is 1 there, 2 here"),
        ({"static": {"b": 3}}, "in static b is 'absent' there, 3 here"),
    ):
        message = f"belongs to another sweep: {difference}; use another folder$"
        changed = config | effects | change
        is_refused(message, SweepFolder, tmp_path, changed, error=files.RunError)
    message = "belongs to another sweep: look is another function; use another folder$"
    changed = config | {"look": ["m"], "every": 3}
    is_refused(message, SweepFolder, tmp_path, changed, error=files.RunError)


def test_points_of_two_digits_are_not_those_of_one(tmp_path):
    """Neither when they are loaded, nor when they replace a file."""
    none = np.zeros((1, 0))
    runs = Runs(np.array([0]), np.array([4]), 3, [], [], [], (), np.array([-1]), none)
    functions = SimpleNamespace(state_shapes=[], metric_shapes=[], look_shapes=[])
    with SweepFolder(tmp_path, {}) as folder:
        for point in (10, 1):
            folder.save(point, runs)
        assert len([*tmp_path.glob("runs/*.npz")]) == 2
        folder.save(10, dataclasses.replace(runs, seeds=np.array([5])))
        for point, names in ((0, []), (1, [[(0, 4)]]), (10, [[(0, 4)], [(0, 5)]])):
            assert sorted(r.names() for r in folder.load(functions, point)) == names


def test_the_folder_of_each_process_but_the_first_is_locked_apart(tmp_path, monkeypatch):
    with SweepFolder(tmp_path, {"steps": 1}):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with SweepFolder(tmp_path, {"steps": 1}):
            message = "process-1 is in use"
            is_refused(message, SweepFolder, tmp_path, {"steps": 1}, error=files.RunError)


def interrupt_second_chunk(patch, error):
    """Makes the second chunk of a sweep raise an error."""
    advance, calls = Program.advance, []

    def interrupt(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return advance(self, *arguments)

    patch.setattr(Program, "advance", interrupt)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_saves_what_is_done(error, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_second_chunk(patch, error)
        patch.setattr(SweepFolder, "is_due", lambda self: False)
        with pytest.raises(error):
            run(folder=tmp_path, quiet=False)
    assert "sweep: stopped at step 2; the same call resumes\n" in capsys.readouterr().err
    assert int(np.load(find_snapshot(tmp_path))["step"]) == 2
    np.testing.assert_array_equal(run(folder=tmp_path).metrics["loss"], run().metrics["loss"])


def test_an_interruption_without_a_folder_is_passed_on(monkeypatch, capsys):
    interrupt_second_chunk(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(quiet=False)
    assert "resumes" not in capsys.readouterr().err


def test_snapshots_take_a_tenth_of_the_time(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(sweep_files.time, "monotonic", lambda: clock[0])

    def write_slowly(path, arrays, **options):
        clock[0] += 2

    monkeypatch.setattr(files, "write_arrays", write_slowly)
    none = np.zeros((1, 0))
    runs = Runs(np.array([0]), np.array([0]), 3, [], [], [], (), np.array([-1]), none)
    with SweepFolder(tmp_path, {}) as folder:
        assert folder.is_due()
        folder.save(0, runs)
        for seconds, is_due in ((0, False), (19.9, False), (0.2, True)):
            clock[0] += seconds
            assert folder.is_due() == is_due


@pytest.mark.parametrize(("few", "many"), [(2, 4), (1, 3)])
def test_of_two_files_with_a_run_the_later_state_is_taken(few, many, tmp_path, monkeypatch):
    """Whichever file comes first by its name; only runs that lack steps make them."""
    run(folder=tmp_path, seeds=many, steps=2)
    run(folder=tmp_path, seeds=few, steps=4)
    steps = [int(np.load(path)["step"]) for path in sorted(tmp_path.glob("runs/*.npz"))]
    assert steps == ([2, 4] if few == 2 else [4, 2])
    advance, made = Program.advance, []

    def note(self, runs, stop):
        made.append((sorted(set(runs.seeds.tolist())), len(runs), runs.step, stop))
        return advance(self, runs, stop)

    monkeypatch.setattr(Program, "advance", note)
    resumed = run(folder=tmp_path, seeds=many, steps=4)
    assert made == [(list(range(few, many)), 2 * (many - few), 2, 4)]  # of two rates
    monkeypatch.undo()
    np.testing.assert_array_equal(resumed.metrics["loss"], run(seeds=many, steps=4).metrics["loss"])


def test_a_file_whose_runs_are_all_further_in_another_is_not_taken(tmp_path):
    """As a process leaves it that is killed before it deletes the file."""
    older, folder = tmp_path / "older", tmp_path / "folder"
    run(folder=older, seeds=1, steps=2)
    run(folder=folder, seeds=2, steps=4)
    (stale,) = older.glob("runs/*.npz")
    shutil.copy(stale, folder / "runs")
    resumed = run(folder=folder, seeds=2, steps=6)
    np.testing.assert_array_equal(resumed.metrics["loss"], run(seeds=2, steps=6).metrics["loss"])
    assert len([*folder.glob("runs/*.npz")]) == 1


def test_runs_of_a_folder_at_different_steps_are_all_continued(tmp_path):
    run(folder=tmp_path, seeds=3, steps=1)
    run(folder=tmp_path, seeds=2, steps=2)
    run(folder=tmp_path, seeds=1, steps=3)
    resumed, whole = run(folder=tmp_path, seeds=4, steps=5), run(seeds=4, steps=5)
    np.testing.assert_array_equal(resumed.metrics["loss"], whole.metrics["loss"])
    np.testing.assert_array_equal(resumed.states["w"], whole.states["w"])


def test_a_full_disk_loses_nothing(tmp_path):
    """No file may have more than 1000 bytes for a while."""
    options = {"folder": tmp_path, "seeds": 3}
    run(**options)
    saved = {p: p.read_bytes() for p in Path(tmp_path).glob("runs/*.npz")}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        is_refused(
            "cannot write to .*npz: File too large", run, error=files.RunError, steps=20, **options
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {p: p.read_bytes() for p in Path(tmp_path).glob("runs/*.npz")} == saved
    extended = run(steps=20, **options)
    np.testing.assert_array_equal(extended.metrics["loss"], run(steps=20, seeds=3).metrics["loss"])
    path = next(Path(tmp_path).glob("runs/*.npz"))
    path.write_bytes(path.read_bytes()[:300])
    is_refused("delete this file, and the same", run, error=files.RunError, steps=20, **options)
    path.unlink()
    again = run(steps=20, **options)
    np.testing.assert_array_equal(again.metrics["loss"], extended.metrics["loss"])
