"""The main job: every entry, the report, a failing experiment; the list of statements."""

import ast
import csv
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import math
import os
import re
from concurrent import futures
from pathlib import Path

import jax
import pytest
from PIL import Image

from experiments import reproduce, run_architectures, run_path_counts
from experiments.lab import cli, progress
from experiments.lab.experiment import describe_experiment, figure_captions, list_experiments
from experiments.reproducing import results_page, running, sections
from experiments.reproducing.filling import Texts
from experiments.reproducing.running import ProcessResult
from experiments.verdicts import statements
from experiments.verdicts.statements import STATEMENTS
from rank_collapse.runs import RunError
from tests.support.folders import REPOSITORY


def test_every_experiment_is_found_and_its_presets_are_accepted():
    for name in reproduce.EXPERIMENTS:
        module, experiment = (
            importlib.import_module(f"experiments.{name}"),
            describe_experiment(name),
        )
        assert set(experiment.presets) >= set(sections.PRESETS)
        assert (
            figure_captions(module.FIGURES)
            and experiment.brief
            and "experiments." in module.__doc__
        )
        for preset in experiment.presets:
            for arguments in experiment.runs(preset).values():
                cli.parse_flags(module.FLAGS, list(arguments))
    assert reproduce.EXPERIMENTS[:2] == ["run_trained", "run_sinks"]
    assert "check_profiles" not in reproduce.EXPERIMENTS


def test_the_readme_names_every_experiment():
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    named = set(re.findall(r"`((?:run|check)_\w+)`", readme))
    assert named == set(reproduce.EXPERIMENTS)


@pytest.mark.full
def test_a_second_run_in_new_processes_makes_nothing_again(tmp_path, monkeypatch):
    """Of an experiment that trains a vocabulary too: it must be the same in every process."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    small = "--models=albert-base-v2 --num_texts=2 --max_tokens=8"
    experiment = run_architectures.EXPERIMENT
    experiment = dataclasses.replace(experiment, presets={"quick": small})
    monkeypatch.setattr("experiments.run_architectures.EXPERIMENT", experiment)
    arguments = ["--only=run_path_counts,run_architectures"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    page = (tmp_path / "results/reproduce/report.html").read_text()
    assert "python -m experiments.run_path_counts" in page
    assert page.count("base64,") == 5  # figures in their sections, and among the findings
    assert str(tmp_path) not in page
    folder = tmp_path / "results/reproduce/quick"
    write_times = {
        p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.suffix in (".csv", ".npz")
    }
    assert len(write_times) == 3
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in write_times} == write_times


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


def test_a_failing_experiment_is_shown_and_the_exit_code_is_1(tmp_path, monkeypatch, capfd):
    """The report counts the experiments that have ended, each time that one ends."""
    pages, path = [], tmp_path / "report.html"

    def fail_commands(commands, jobs):
        assert list(commands) == ["run_path_counts", "run_path_chains"]  # in the report's order
        pages.append(path.read_text())
        yield "run_path_counts", ProcessResult(2, "half way\nerror: no luck\n", 1.0, 1.0)
        pages.append(path.read_text())
        yield "run_path_chains", ProcessResult(2, "", 1.0, 1.0)

    monkeypatch.setattr(running, "run_commands", fail_commands)
    arguments = ["--only=run_path_counts,run_path_chains", f"--output_dir={tmp_path}", "--jobs=1"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 1
    states = [dict(re.findall(r'<h2 id="(run_\w+)">[^<]*<span[^>]*>(\w+)<', p)) for p in pages]
    assert states == [{}, {"run_path_counts": "failed"}]
    assert "0 of 2 experiments" in pages[0] and "1 of 2 experiments" in pages[1]
    assert "error: no luck" in pages[1]
    assert "exit code 2" in path.read_text() and "half way" in path.read_text()
    printed = capfd.readouterr()
    assert "failed: run_path_counts" in printed.err
    lines = printed.out.splitlines()
    assert lines[0].endswith(str(path))
    assert lines[1].startswith("  1/2 run_path_counts")
    assert lines[1].endswith("failed: no luck")  # why, as its command says it
    assert lines[2].endswith("failed: RunError: exit code 2")


FEW_TEXTS = {
    "run_path_counts": Texts("{many: of H=4|.0f} and {H=2, L=3 (H=2, L=3): mean path length|.1f}.")
}


def test_results_as_markdown_are_of_one_preset(tmp_path, monkeypatch):
    image = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(image, "png")
    monkeypatch.setattr(results_page, "read_texts", lambda: FEW_TEXTS)
    for preset, layers in (("quick", 2), ("reported", 3)):
        folder = tmp_path / "run" / preset / "run_path_counts"
        arguments = ["--heads=2", f"--layers={layers}", f"--output_dir={folder}"]
        assert cli.execute(run_path_counts.main, run_path_counts.FLAGS, arguments) == 0
        (folder / "figures" / "path_counts.png").write_bytes(image.getvalue())
    paper, quick, docs = tmp_path / "run/reported", tmp_path / "run/quick", tmp_path / "docs"
    sections.save_time(paper, "run_path_counts", ProcessResult(0, "", 12.34, 12.34), 1)
    with pytest.raises(ValueError, match="no table has: run_path_counts: many: of H=4"):
        results_page.write_markdown(paper, "reported", docs)
    assert not docs.exists()
    mean = "{H=2, L=3 (H=2, L=3): mean path length|.1f}"
    texts = Texts(f"{mean} of 3.", f"| {mean} |")
    monkeypatch.setattr(results_page, "read_texts", lambda: {"run_path_counts": texts})
    page = docs / "experiments" / "run_path_counts.md"
    page.parent.mkdir(parents=True)
    page.write_text("**Result.** old\n\n<!-- filled -->\nold\n<!-- end -->\nrest\n")
    (docs / "results").mkdir()
    (docs / "results" / "run_path_counts_7.png").write_text("of an earlier run")
    text = results_page.write_markdown(paper, "reported", docs).read_text()
    table = docs / "results" / "run_path_counts.csv"
    assert "H=2, L=3" in table.read_text() and "H=2, L=2" not in table.read_text()
    assert ", 12 s, " in text and "sizes “reported”" in text and f"JAX {jax.__version__}" in text
    assert "**Result.** 2.0 of 3.\n\n| 2.0 |\n" in text and "Not run: run_trained" in text
    filled = "**Result.** 2.0 of 3.\n\n<!-- filled -->\n| 2.0 |\n<!-- end -->\nrest\n"
    assert page.read_text() == filled
    assert "not run" in (docs / "statements.md").read_text()
    named = set(re.findall(r"\]\((results/.*?)\)", text))
    figures = ("run_path_counts_0.png", "run_path_counts_1.png")
    assert named == {f"results/{n}" for n in (*figures, table.name, "runs.csv")}
    assert not (docs / "results" / "run_path_counts_7.png").exists()
    with Image.open(docs / "results" / figures[0]) as figure:
        assert figure.mode == "P" and figure.size == (64, 64)
    (run,) = csv.DictReader(io.StringIO((docs / "results" / "runs.csv").read_text()))
    assert run["run"] == "run_path_counts" and run["seconds"] == "12.3"
    assert f"commit {run['commit'] or 'unknown'}." in text
    text = results_page.write_markdown(quick, "quick", docs).read_text()
    assert "H=2, L=2" in table.read_text() and "**Result.** – of 3." in text
    assert page.read_text() == filled and "sizes “quick”" in text


def test_an_experiment_of_several_runs_is_one_section(tmp_path, monkeypatch, capsys):
    """Its folders lie side by side. At a preset it is done when all of its runs are."""
    several = {"few": "--heads=2 --layers=3", "many": "--heads=4 --layers=3"}
    experiment = dataclasses.replace(
        run_path_counts.EXPERIMENT, presets=dict.fromkeys(sections.PRESETS, several)
    )
    monkeypatch.setattr("experiments.run_path_counts.EXPERIMENT", experiment)
    for preset in sections.PRESETS:
        for run, arguments in several.items():
            folder = tmp_path / preset / "run_path_counts" / run
            command_line = [*arguments.split(), f"--output_dir={folder}"]
            assert cli.execute(run_path_counts.main, run_path_counts.FLAGS, command_line) == 0
    capsys.readouterr()
    texts = {
        "run_path_counts": Texts("{many: H=4, L=3 (H=4, L=3): mean path length|.1f} of 3 layers.")
    }
    monkeypatch.setattr(results_page, "read_texts", lambda: texts)
    for preset in sections.PRESETS:
        parent, docs = tmp_path / preset, tmp_path / "docs"
        text = results_page.write_markdown(parent, preset, docs).read_text()
        assert "**Result.** 2.4 of 3 layers." in text
        assert text.count(f"## {experiment.title}\n") == 1 and text.count("png)") == 4
        numbers = (tmp_path / "docs" / "results" / "run_path_counts.csv").read_text()
        assert "H=2, L=3" in numbers and "H=4, L=3" in numbers
        assert "*few: " in text and "- [many: " in text
        assert text.count(f"; sizes “{preset}”") == len(several)
    (tmp_path / "reported/run_path_counts/many/summary.json").unlink()
    text = results_page.write_markdown(
        tmp_path / "reported", "reported", tmp_path / "docs"
    ).read_text()
    assert "run_path_counts" in text and f"## {experiment.title}\n" not in text
    (tmp_path / "quick/run_path_counts/few/summary.json").write_text("[]")
    records = [
        sections.RunRecord(tmp_path / "quick/run_path_counts" / run, "python", "", run)
        for run in several
    ]
    section = sections.make_section("run_path_counts", records)
    assert section.error.startswith("few: ")
    assert section.figures[0][1].startswith("many: ") and "H=4" in section.comparisons[1].quantity


@pytest.mark.parametrize("content", ["", "[]", '{"run_sort": 3}', '{"run_sort": {"seconds": "x"}}'])
def test_damaged_times_are_not_known(content, tmp_path):
    """All experiments ran, and then there was no report."""
    (tmp_path / "times.json").write_text(content)
    assert sections.read_times(tmp_path) == {}
    sections.save_time(tmp_path, "run_sort", ProcessResult(0, "", 3.0, 3.0), 2)
    times = {"seconds": 3.0, "cpu_seconds": 3.0, "jobs": 2, "at_least": 0}
    assert sections.read_times(tmp_path) == {"run_sort": times}


def test_the_time_of_an_interrupted_run_is_that_of_its_parts(tmp_path):
    """Times of workers that a signal ended add up; the time of a killed worker is not known."""
    for resumed in (False, True):
        sections.save_time(tmp_path, "run_sort", ProcessResult(143, "", 3.0, 3.0), 1, resumed)
    times = {"seconds": 6.0, "cpu_seconds": 6.0, "jobs": 1, "at_least": 0}
    assert sections.read_times(tmp_path)["run_sort"] == times
    sections.save_time(tmp_path, "run_width", ProcessResult(0, "", 3.0, 3.0), 1, resumed=True)
    assert sections.read_times(tmp_path)["run_width"]["at_least"] == 1


def test_what_a_signal_ends_is_counted(monkeypatch):
    """Of two commands one has ended when the signal comes; the other ends because of it."""
    ended = []

    def iterate(executor, work, limit, begun):
        begun |= {executor.submit(*call): name for name, call in work.items()}
        first, second = begun
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


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"environment": []}'])
def test_a_damaged_config_of_a_run_is_named(content, tmp_path):
    (tmp_path / "run_sort").mkdir()
    (tmp_path / "run_sort" / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"run_sort/config\.json cannot be read .*of no run"):
        results_page.describe_run(tmp_path, "run_sort")


A_FILE = "cannot write to {0}/file: File exists"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--output_dir={0}/file", A_FILE),
        ("--markdown --docs={0}/file", A_FILE),
        ("--only=run_x", "--only=run_x is not one of run_trained"),
        (
            "--preset=reported,quick",
            "--preset=reported,quick: value should be one of <quick|reported>",
        ),
        ("--markdown=true,false", "--markdown=true,false"),
        # What every child would refuse.
        ("--run_name=-1", "--run_name='-1' is not a folder name"),
        ("--run_name=..", "--run_name='..' is not a folder name"),
    ],
)
def test_what_is_refused_before_anything_runs(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "run_commands", lambda *a: pytest.fail("started"))
    (tmp_path / "file").write_text("")
    arguments = [f"--output_dir={tmp_path}/out", *flags.format(tmp_path).split()]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 2
    error = capsys.readouterr().err
    assert message.format(tmp_path) in error and error.count("\n") == 1


def test_every_statement_says_what_decides_it():
    paths = Path(statements.__file__).parents[1].rglob("*.py")
    sources = "".join(path.read_text("utf-8") for path in paths)
    for key, statement in STATEMENTS.items():
        assert (
            statement.source
            and statement.text.endswith(".")
            and statement.statistic
            and (statement.experiments or statement.test)
        ), key
        assert set(statement.experiments) <= set(list_experiments()), key
        assert statement.claimed is None or not statement.test, key
        if statement.claimed is not None:
            assert statement.claimed[0] < statement.claimed[1], key
        # as the page says
        assert statement.draw_range is None or statement.claimed == (0.5, math.inf), key
        assert statement.claimed is None or len(statement.text.split()) < 25, key
        assert not statement.experiments or f'"{key}"' in sources, key


@pytest.mark.parametrize("key", [key for key, statement in STATEMENTS.items() if statement.test])
def test_what_must_hold_names_a_test_of_this_repository(key):
    path, _, name = STATEMENTS[key].test.partition("::")
    source = (REPOSITORY / path).read_text("utf-8")
    functions = {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions


def test_few_statements_are_counted():
    assert sum(statement.claimed is not None for statement in STATEMENTS.values()) <= 44
