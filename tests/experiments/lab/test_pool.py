"""Groups of points that workers measure side by side, and the modules of their experiments."""

import contextlib
import importlib
import io
import sys
from concurrent import futures
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.lab import cli, pool
from tests.support.refusals import is_refused


def test_the_module_of_an_experiment_has_its_name():
    assert pool.module_name("sort") == "experiments.run_sort"
    assert pool.module_name("check_bounds") == "experiments.check_bounds"
    for name in ("none", "reproduce", "lab"):
        is_refused(f"'{name}' is not the name of an experiment", pool.module_name, name)


class Run(SimpleNamespace):
    """A run folder that lists what it gets."""

    def __init__(self, path, done=()):
        super().__init__(path=path, writable=True, summary={}, done=done, calls=[])

    def part(self, name):
        return {"a": 1} if name in self.done else None

    def log(self, line):
        pass

    def add_environments(self, environments):
        self.calls.append(environments)

    def keep_arrays(self, arrays):
        self.calls.append(arrays)

    def flush_arrays(self):
        self.calls.append("flushed")


POINTS = [
    SimpleNamespace(number=number, prefix=prefix)
    for number, prefix in ((0, "depth=2/"), (0, "depth=4/"), (1, "depth=6/"), (2, "depth=8/"))
]


class Flags(SimpleNamespace):
    """Flags of a run over an axis, on four cores."""

    def __init__(self, **changes):
        flags = {
            "axes": {"depth": ["2", "4", "6", "8"]},
            "grows": False,
            "jobs": 0,
            "scheduler": None,
            "num_devices": 0,
            "experiment": "sort",
            "typed": ["--depth=2,4,6,8"],
        }
        super().__init__(**flags | changes)

    def __contains__(self, name):
        return name in vars(self)


@pytest.fixture
def begun(monkeypatch):
    """Returns the list of (jobs, scheduler), and of the (largest number of tasks, work) of each."""
    started = []

    @contextlib.contextmanager
    def start_workers(jobs, scheduler):
        started.append((jobs, scheduler))
        yield "pool"

    def iterate_ended(executor, work, limit, running):
        assert executor == "pool" and running == {}
        started.append((limit, work))
        for number in reversed(work):  # the last ends first
            folder = work[number][3]
            (folder / "metrics").mkdir(parents=True)
            for name in (f"{number}.jsonl", f"{number} more.jsonl"):
                (folder / "metrics" / name).write_text(f"lines {number}")
            future = futures.Future()
            future.set_result(({f"arrays {number}": number}, [f"machine {number}"]))
            yield number, future

    monkeypatch.setattr(pool, "start_workers", start_workers)
    monkeypatch.setattr(pool, "iterate_ended", iterate_ended)
    monkeypatch.setattr(pool.devices, "count_cores", lambda: 4)
    monkeypatch.setattr(pool.devices, "has_accelerator", lambda: False)
    return started


@pytest.mark.parametrize(
    ("flags", "done", "jobs", "limit", "devices", "missing"),
    [
        ({}, (), 3, 3, 1, [0, 1, 2]),
        ({}, ("depth=2",), 3, 3, 1, [0, 1, 2]),  # a group with a point that is missing
        ({}, ("depth=2", "depth=4"), 2, 3, 1, [1, 2]),  # the devices of a run that is resumed stay
        ({"jobs": 2}, (), 2, 2, 2, [0, 1, 2]),
        ({"jobs": 2, "num_devices": 3}, (), 2, 2, 3, [0, 1, 2]),
        ({"scheduler": "tcp://here"}, (), 3, 3, 1, [0, 1, 2]),
        ({"scheduler": "tcp://here", "jobs": 1}, ("depth=8",), 1, 2, 4, [0, 1]),
    ],
)
def test_groups_that_are_missing_are_measured_side_by_side(
    flags, done, jobs, limit, devices, missing, begun, tmp_path
):
    flags, run = Flags(**flags), Run(tmp_path, done)
    pool.measure_side_by_side(flags, POINTS, run)
    (workers, scheduler), (most, work) = begun
    assert (workers, scheduler, most) == (jobs, flags.scheduler, limit)
    assert work == {
        number: (
            pool.measure_points,
            "experiments.run_sort",
            flags.typed,
            tmp_path / "points" / str(number),
            devices,
            number,
        )
        for number in missing
    }
    expected = []
    for number in reversed(missing):
        expected += [[f"machine {number}"], {f"arrays {number}": number}]
    assert run.calls == [*expected, "flushed"]
    lines = {path.name: path.read_text() for path in (tmp_path / "metrics").iterdir()}
    names = {f"{number}{more}.jsonl": number for number in missing for more in ("", " more")}
    assert lines == {name: f"lines {number}" for name, number in names.items()}


@pytest.mark.parametrize(
    ("flags", "run"),
    [
        ({"axes": {}}, {}),
        ({"grows": True}, {}),
        ({"jobs": 1}, {}),
        ({}, {"writable": False}),
        ({}, {"summary": {"done": 1}}),
        ({}, {"done": [point.prefix.rstrip("/") for point in POINTS]}),
    ],
)
def test_what_needs_no_workers_has_none(flags, run, begun, tmp_path):
    folder = Run(tmp_path)
    vars(folder).update(run)
    pool.measure_side_by_side(Flags(**flags), POINTS, folder)
    assert begun == [] and folder.calls == []


def test_an_accelerator_has_one_worker_and_a_point_alone_no_scheduler(
    begun, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pool.devices, "has_accelerator", lambda: True)
    pool.measure_side_by_side(Flags(), POINTS, Run(tmp_path))
    assert begun == [] and capsys.readouterr().err == ""
    pool.measure_side_by_side(Flags(jobs=2), POINTS, Run(tmp_path))  # asked for by hand
    assert begun[0] == (2, None)
    begun.clear()
    pool.measure_side_by_side(Flags(axes={}, scheduler="tcp://here"), POINTS[:1], Run(tmp_path))
    message = "--scheduler=tcp://here is not used: a single point is measured here\n"
    assert begun == [] and capsys.readouterr().err.endswith(message)
    monkeypatch.setattr(pool.devices, "has_accelerator", lambda: False)
    monkeypatch.setattr(pool.multiprocessing, "parent_process", object)
    pool.measure_side_by_side(Flags(), POINTS, Run(tmp_path))
    assert begun == []  # a worker of `reproduce` starts no others


@pytest.mark.parametrize(("fails", "in_thread"), [(False, False), (True, False), (False, True)])
def test_a_worker_measures_one_group_in_its_own_folder(fails, in_thread, tmp_path, monkeypatch):
    """A mistake is said by the parent, which finds no arrays of the group.

    A worker of Dask is a thread: it shares its devices, signals and stderr with others.
    """
    measured, started = [], []

    def main(options):
        measured.append(
            (
                options.depth,
                options.output_dir,
                options.run_name,
                options.overwrite,
                options.num_devices,
                options.mode.worker_group,
                jax.config.jax_default_matmul_precision,
            )
        )
        print("a line of progress", file=sys.stderr)
        if fails:
            raise ValueError("no luck")
        folder.mkdir()
        np.savez(folder / "arrays.npz", loss=np.ones(2))
        (folder / "config.json").write_text('{"environment": {"device": "cpu"}}')

    flags, folder = cli.make_flags("example"), tmp_path / "group"
    flags.define("integer", "depth", 3, "Layers.")
    module = SimpleNamespace(FLAGS=flags, main=main)
    monkeypatch.setattr(importlib, "import_module", {"experiments.run_x": module}.__getitem__)
    monkeypatch.setattr(pool.devices, "start_devices", started.append)
    stream = io.StringIO()
    arguments = ["--depth=5", "--output_dir=elsewhere", "--run_name=a", "--overwrite"]
    arguments = ("experiments.run_x", arguments, folder, 2, 7)
    with contextlib.redirect_stderr(stream), futures.ThreadPoolExecutor(1) as threads:
        work = pool.measure_points, *arguments
        arrays, environments = threads.submit(*work).result() if in_thread else work[0](*work[1:])
    assert measured == [(5, str(folder), None, False, 2, 7, "highest")]
    assert started == ([] if in_thread else [2])
    assert stream.getvalue() == ("a line of progress\n" if in_thread else "")
    if fails:
        assert (arrays, environments) == ({}, [])
    else:
        assert arrays["loss"].tolist() == [1, 1] and environments == [{"device": "cpu"}]
    assert not flags["depth"].present  # the flags of the module stay as they are


def test_progress_counts_groups_and_says_what_the_workers_do(begun, tmp_path, monkeypatch):
    """Workers are listed by the numbers of their groups; each has a device at least."""
    shown, lines = [], []

    class Bar:
        def __init__(self, total, label, *, log, details):
            shown.append((total, label, log))
            self.details = details
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def advance(self):
            shown.append("a step")

    def iterate_ended(executor, work, limit, running):
        future = futures.Future()
        running |= {futures.Future(): 2, future: 0}
        lines.append(bars[0].details())
        del running[future]
        lines.append(bars[0].details())
        future.set_result(({}, []))
        assert [arguments[4] for arguments in work.values()] == [1, 1, 1]
        yield 0, future

    bars, run = [], Run(tmp_path)
    monkeypatch.setattr(pool.progress, "Progress", Bar)
    monkeypatch.setattr(pool.progress, "read_activity", lambda folder: f"in {folder.name}")
    monkeypatch.setattr(pool, "iterate_ended", iterate_ended)
    monkeypatch.setattr(pool.devices, "count_cores", lambda: 2)
    pool.measure_side_by_side(Flags(jobs=3), POINTS, run)
    assert shown == [(3, "points", run.log), "a step"]
    assert lines == ["0: in 0; 2: in 2", "2: in 2"]
