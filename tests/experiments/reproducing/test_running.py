"""How experiments run side by side, and how a signal ends them."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest

from experiments.lab import progress
from experiments.reproducing import running
from experiments.reproducing.running import ProcessResult
from experiments.verdicts import Section


def test_how_many_run_side_by_side(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert running.default_jobs() == 2
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ["xla_cuda13"])
    assert running.default_jobs() == 1
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert running.default_jobs() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert running.default_jobs() == 1


def test_what_a_signal_ends_is_counted(monkeypatch):
    """Of two commands one has ended when the signal comes; the other ends because of it."""
    ended = []

    def iterate(executor, work, limit, begun):
        begun |= {executor.submit(*call): name for name, call in work.items()}
        first, second = begun
        cancelled, failed = futures.Future(), futures.Future()
        cancelled.cancel()
        failed.set_exception(ValueError("a bug"))
        at_work = futures.Future()  # whose result would be waited for
        at_work.exception = lambda: pytest.fail("waits")
        begun |= {cancelled: "cancelled", failed: "failed", at_work: "at work"}
        futures.wait([first, second])
        yield begun.pop(first), first
        raise progress.Stopped(143)

    monkeypatch.setattr(running.pool, "iterate_ended", iterate)
    monkeypatch.setattr(running, "run_binary", lambda name: ProcessResult(143, name, 1.0, 1.0))
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    commands = {"a": ("run_a",), "b": ("run_b",)}
    with pytest.raises(progress.Stopped):
        for name, result in running.run_commands(commands, 2):
            ended.append((name, result.output))
    assert ended == [("a", "run_a"), ("b", "run_b")]


@pytest.mark.parametrize("signals", [[], [15]])
def test_a_process_that_died_is_an_error_and_one_that_a_signal_ended_is_none(signals, monkeypatch):
    broken = futures.Future()
    broken.set_exception(BrokenProcessPool())

    def iterate(executor, work, limit, begun):
        name, *_ = work
        yield name, broken

    monkeypatch.setattr(progress, "_signals_received", signals)
    monkeypatch.setattr(running.pool, "iterate_ended", iterate)
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    ended = []
    with pytest.raises(progress.Stopped) if signals else contextlib.nullcontext():
        ended += running.run_commands({"a": ("run_a",), "b": ("run_b",)}, 1)
    lines = [(name, result.code, result.output) for name, result in ended]
    expected = [(name, 1, "its process was ended (out of memory?)") for name in "ab"]
    assert lines == ([] if signals else expected)


def test_each_command_runs_once(monkeypatch):
    begun = []

    def run_binary(name, *flags):
        begun.append(name)
        return ProcessResult(0, " ".join(flags), 1.0, 1.0)

    monkeypatch.setattr(progress, "_signals_received", [])
    monkeypatch.setattr(running, "run_binary", run_binary)
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    commands = {name: (f"run_{name}", f"--name={name}", "--seed=1") for name in "abcd"}
    results = itertools.islice(running.run_commands(commands, 2), 9)
    ended = {name: result.output for name, result in results}
    assert sorted(begun) == ["run_a", "run_b", "run_c", "run_d"]
    assert ended == {name: f"--name={name} --seed=1" for name in "abcd"}


def test_nothing_begins_after_a_signal(monkeypatch):
    """A pool goes on with all that it has been given."""
    begun = []

    def run_binary(name):
        begun.append(name)
        progress._signals_received.append(15)
        return ProcessResult(143, name, 1.0, 1.0)

    monkeypatch.setattr(progress, "_signals_received", [])
    monkeypatch.setattr(running, "run_binary", run_binary)
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    commands = {name: (name,) for name in "abcd"}
    with pytest.raises(progress.Stopped):
        list(running.run_commands(commands, 1))
    assert begun == ["a"]


def test_a_binary_runs_as_its_command_would(monkeypatch):
    """What it prints is kept, with its exit code, its time and that of its processor."""
    clocks = {"monotonic": [10.0], "process_time": [3.0]}
    for name, clock in clocks.items():
        monkeypatch.setattr(running.time, name, lambda clock=clock: clock[0])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    binary = SimpleNamespace(__file__="/a/run_sort.py", main="main", FLAGS="flags")
    monkeypatch.setattr(importlib, "import_module", {"experiments.run_sort": binary}.__getitem__)

    def execute(main, flags, arguments):
        assert (main, flags, list(arguments)) == ("main", "flags", ["--depth=2", "--seed=1"])
        assert sys.argv == ["/a/run_sort.py", "--depth=2", "--seed=1"]
        assert sys.modules["__main__"] is binary
        print("half way")
        print("error: no luck", file=sys.stderr)
        clocks["monotonic"][0] += 4.0
        clocks["process_time"][0] += 7.0
        return 2

    monkeypatch.setattr(running.cli, "execute", execute)
    result = running.run_binary("experiments.run_sort", "--depth=2", "--seed=1")
    assert result == ProcessResult(2, "half way\nerror: no luck\n", 4.0, 7.0)


NAMES = ("run_sort", "run_transformer")


@pytest.mark.parametrize("overwrite", [False, True])
def test_runs_have_the_flags_of_the_preset_and_sections_come_in_order(
    overwrite, tmp_path, monkeypatch, capsys
):
    """The second experiment ends first; one run of the first is complete, one was interrupted."""
    named = {
        "run_sort": {"run_sort/a": ["--depth=1"], "run_sort/b": ["--depth=2"]},
        "run_transformer": {"run_transformer": ["--width=3"]},
    }
    (tmp_path / "run_sort/a").mkdir(parents=True)
    (tmp_path / "run_sort/a/summary.json").write_text("{}")
    (tmp_path / "run_sort/b").mkdir()
    asked, shown, saved = {}, [], []

    def run_commands(commands, jobs):
        asked.update(commands=commands, jobs=jobs)
        yield "run_transformer", ProcessResult(0, "t", 30.0, 50.0)
        yield "run_sort/b", ProcessResult(1, "b", 20.0, 25.0)
        yield "run_sort/a", ProcessResult(0, "a", 2.0, 1.5)

    def make_section(name, records):
        asked[name] = records
        return Section(name, "", "", "", error="error: b" if name == "run_sort" else "")

    def save_time(parent, run, result, jobs, resumed):
        saved.append((parent, run, result.seconds, jobs, resumed))

    class Screen(running.terminal.Screen):
        def __init__(self, expected, jobs, folder):
            asked["expected"] = expected, jobs, folder
            super().__init__(expected, jobs, folder)

    usual = {"run_sort/a": 60.0, "run_transformer": 70.0}
    for name, stub in (
        ("list_runs", lambda name, preset: named[name] if preset == "quick" else {}),
        ("run_commands", run_commands),
        ("make_section", make_section),
        ("save_time", save_time),
        ("default_jobs", lambda: 5),
    ):
        monkeypatch.setattr(running, name, stub)
    monkeypatch.setattr(running.terminal, "read_times", lambda preset: usual)
    monkeypatch.setattr(running.terminal, "Screen", Screen)
    options = SimpleNamespace(
        preset="quick", until=None, overwrite=overwrite, num_devices=0, jobs=0, pdf=None
    )
    sections = running.run_experiments(
        NAMES, options, tmp_path, lambda s: shown.append([section.name for section in s])
    )
    further = ["--overwrite", "--nopdf"] if overwrite else ["--nopdf"]
    assert asked["commands"] == {
        run: [f"experiments.{name}", *flags, f"--output_dir={tmp_path / run}", *further]
        for name, runs in named.items()
        for run, flags in runs.items()
    }
    complete = {} if overwrite else {"run_sort/a": running.terminal.SECONDS_TO_READ}
    times = usual | {"run_sort/b": running.terminal.USUAL_SECONDS} | complete
    assert asked["jobs"] == 5 and asked["expected"] == (times, 5, tmp_path)
    assert shown == [[], ["run_transformer"], [*NAMES]]
    assert [section.name for section in sections] == [*NAMES]
    assert saved == [
        (tmp_path, "run_transformer", 30.0, 3, False),
        (tmp_path, "run_sort/b", 20.0, 3, not overwrite),
        *([(tmp_path, "run_sort/a", 2.0, 3, False)] if overwrite else []),
    ]
    records = [*asked["run_sort"], *asked["run_transformer"]]
    assert [(r.label, r.code, r.output) for r in records] == [
        ("a", 0, "a"),
        ("b", 1, "b"),
        ("", 0, "t"),
    ]
    assert [record.folder for record in records] == [tmp_path / run for run in asked["commands"]]
    assert records[1].details == f"20.0 s this time; all numbers: {tmp_path}/run_sort/b/results.csv"
    folder = tmp_path / "run_sort/b"
    assert records[1].command == (f"python -m experiments.run_sort --depth=2 --output_dir={folder}")
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == ["1/2", "run_transformer", "50", "s"]
    assert second.split()[:4] == ["2/2", "run_sort", "26", "s"] and "failed: b" in second


@pytest.mark.parametrize(
    ("preset", "pdf", "further"),
    [("quick", True, []), ("reported", None, []), ("reported", False, ["--nopdf"])],
)
def test_flags_of_all_runs_and_runs_that_a_signal_ended(
    preset, pdf, further, tmp_path, monkeypatch
):
    """A run that was stopped has no section: it will be resumed."""
    asked, more_runs = {}, {"run_sort": {"run_sort/b": ["--num_seeds=4"]}}

    def run_commands(commands, jobs):
        asked.update(commands)
        assert jobs == 3
        yield "run_sort", ProcessResult(143, "", 0.0, 0.0)
        yield "run_transformer", ProcessResult(0, "", 1.0, 1.0)

    monkeypatch.setattr(running, "run_commands", run_commands)
    monkeypatch.setattr(
        running,
        "list_runs",
        lambda name, preset: {name: ["--num_seeds=4"]} | more_runs.get(name, {}),
    )
    monkeypatch.setattr(running, "until_decided", lambda name, flags: [f"--until={name}", *flags])
    monkeypatch.setattr(running, "make_section", lambda name, records: Section(name, "", "", ""))
    options = SimpleNamespace(
        preset=preset, until="decided", overwrite=True, num_devices=2, jobs=3, pdf=pdf
    )
    sections = running.run_experiments(NAMES, options, tmp_path, lambda sections: None)
    assert [section.name for section in sections] == ["run_transformer"]
    for run in (*NAMES, "run_sort/b"):
        name = run.partition("/")[0]
        place = f"--output_dir={tmp_path / run}"
        flags = [f"--until={name}", "--num_seeds=4", place, "--overwrite", "--num_devices=2"]
        assert asked[run] == [f"experiments.{name}", *flags, *further]
    times = (tmp_path / "times.json").read_text()
    assert "run_transformer" in times and "run_sort" not in times


def test_the_machine_is_that_of_the_newest_run(tmp_path):
    assert running.describe_machine(tmp_path) == ""
    for i, (name, started) in enumerate([("a", "second"), ("b", "first")]):
        environment = {
            "started": started,
            "device": "cpu",
            "num_devices": 2 + i,
            "python": "3.12",
            "versions": {"jax": "1", "numpy": "2"},
        }
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps({"environment": environment}))
        os.utime(path, (100 - 50 * i, 100 - 50 * i))
    assert running.describe_machine(tmp_path) == (
        "Made second on cpu (2 devices), Python 3.12, jax 1, numpy 2, git none."
    )
    for damaged in ("{}", "{", '{"environment": 5}', '{"environment": {"versions": []}}'):
        (tmp_path / "a" / "config.json").write_text(damaged)
        assert running.describe_machine(tmp_path) == ""


@pytest.mark.parametrize(("count", "is_done"), [(1, True), (3, False)])
def test_a_report_says_how_many_have_ended(count, is_done, tmp_path, monkeypatch):
    monkeypatch.setattr(running.time, "monotonic", lambda: 75.4)
    section = Section("run_sort", "Sorting", "", "python")
    page = running.render_report([section], count, "quick", 10.0, tmp_path)
    ended = f"1 of {count} experiments have ended"
    assert f"{ended}, after 65 s. " in page
    assert (f"{ended}; reload this page for more." in page) == (not is_done)
    assert "this run at the preset “quick”" in page
    reported = running.render_report([section], count, "reported", 10.0, tmp_path)
    assert "“Reference run” an earlier run of the same sizes" in reported
