"""The CPU time of experiments is divided among tracing, compiling and all else."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import experiment_parts
from experiments.benchmarks.experiment_parts import COMPILING, TRACING, Parts
from experiments.reproducing.running import ProcessResult
from rank_collapse.runs.files import RunError
from tests.support.folders import REPOSITORY


def test_events_are_of_the_programs_compiled_in_the_context():
    shapes = iter(range(2, 9))

    @jax.jit
    def add_ones(x):
        return x + 1

    def call():
        jax.block_until_ready(add_ones(jnp.zeros(next(shapes))))

    call()
    with experiment_parts.record_events() as events:
        call()
    count = len(events)
    call()
    assert len(events) == count  # of the context alone
    assert {COMPILING, *TRACING} <= {event for event, _ in events}


def test_events_are_summed_by_kind():
    events = [(COMPILING, 2.0), (TRACING[0], 0.25), ("/other", 9.0), (COMPILING, 1.0)]
    parts = experiment_parts.sum_events([*events, (TRACING[1], 0.5)], 8.0)
    assert parts == Parts(8.0, 0.75, 3.0, 2)
    line = experiment_parts.describe_parts("run_sort", parts)
    assert line == "run_sort: 8.0 s of CPU, 3.0 s to compile 2 programs, 0.8 s to trace them"
    line = experiment_parts.describe_parts("run_sort", parts._replace(programs=1))
    assert "to compile 1 program, 0.8 s to trace" in line
    sums = experiment_parts.sum_parts({"a": parts, "b": Parts(2.0, 0.25, 0.0, 1)})
    assert sums == {
        "CPU s of all": (10.0, None),
        "share of compiling": (0.3, None),
        "share of tracing": (0.1, None),
        "programs of all": (3.0, None),
    }


@pytest.mark.full
def test_an_experiment_is_timed_in_its_own_process():
    parts = experiment_parts.time_experiment("run_path_counts", ["--heads=2", "--layers=3"])
    assert parts.cpu_seconds > parts.compiling_seconds >= 0
    with pytest.raises(RunError, match=r"run_path_counts failed: .*layers"):
        experiment_parts.time_experiment("run_path_counts", ["--layers=no"])


def test_a_process_times_all_runs_of_an_experiment_with_further_flags(monkeypatch, capsys):
    """Each run has its folder and one device; a failed one ends the process with its output."""
    calls, codes = [], iter([0, 0, 0, 3])

    def run_binary(module, *flags):
        calls.append((module, flags[:-2], Path(flags[-2]).name, flags[-1]))
        return ProcessResult(next(codes), "its output", 0.0, 0.0)

    def list_runs(name, preset):
        assert preset == "quick"
        return {f"{name}/a": ["--depth=1"], f"{name}/b": ["--depth=2"]}

    monkeypatch.setattr(experiment_parts, "list_runs", list_runs)
    monkeypatch.setattr(experiment_parts, "run_binary", run_binary)
    monkeypatch.setattr(experiment_parts.time, "process_time", lambda: 7.5)
    monkeypatch.setattr(
        experiment_parts, "record_events", lambda: contextlib.nullcontext([(COMPILING, 2.0)])
    )
    experiment_parts.main("run_sort", "--width=3")
    assert calls == [
        ("experiments.run_sort", (f"--depth={i}", "--width=3"), label, "--num_devices=1")
        for i, label in ((1, "a"), (2, "b"))
    ]
    assert json.loads(capsys.readouterr().out) == [7.5, 0.0, 2.0, 1]
    with pytest.raises(SystemExit) as ended:
        experiment_parts.main("run_sort")
    assert ended.value.code == "its output"


SET = {
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_PLATFORMS": "cpu",
    "MPLBACKEND": "Agg",
    "PYTHONPATH": str(REPOSITORY),
}


def test_experiments_are_timed_one_after_the_other(monkeypatch, capsys, tmp_path):
    """Without names those whose data are there; the times are the last line of a process, whose
    environment replaces the caller's."""
    asked = []
    for name in (*SET, "ANOTHER"):
        monkeypatch.setenv(name, "kept")

    def run(command, env, capture_output, text):
        asked.append(command[1:])
        assert {name: env[name] for name in SET} == SET and env["ANOTHER"] == "kept"
        is_fine = command[3] != "broken"
        lines = f"a line\n[{len(asked)}.0, 0.5, 0.25, 2]\n"
        return SimpleNamespace(
            returncode=not is_fine, stdout=lines, stderr=f"first{'.' * 600}no luck\n"
        )

    monkeypatch.setattr(experiment_parts.subprocess, "run", run)
    report = experiment_parts.time_experiments(None, ["a", "b"], ["--depth=2"])
    module = experiment_parts.__name__
    assert asked == [["-m", module, name, "--depth=2"] for name in "ab"]
    assert [(t.name, t.compile_seconds, t.seconds) for t in report.timings] == [
        *(("a", 0.25, [1.0]), ("b", 0.25, [2.0]))
    ]
    assert report.figures["CPU s of all"] == (3.0, None)
    assert [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()] == [*"ab"]
    with pytest.raises(RunError, match=r"^broken failed: \.{493}no luck$"):
        experiment_parts.time_experiment("broken")
    needs = {"here": tmp_path, "away": tmp_path / "none"}
    monkeypatch.setattr(experiment_parts, "list_experiments", lambda: list(needs))
    monkeypatch.setattr(
        experiment_parts, "describe_experiment", lambda name: SimpleNamespace(needs=needs[name])
    )
    report = experiment_parts.time_experiments(None)
    assert [timing.name for timing in report.timings] == ["here"]
