"""The main job: every entry, the report, a failing experiment; the list of statements."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import reproduce, run_architectures
from experiments.lab import cli
from experiments.lab.experiment import describe_experiment
from experiments.reproducing import running, sections
from experiments.reproducing.running import ProcessResult
from experiments.verdicts import (
    STATEMENTS,
    Section,
    answer_lines,
    answer_statements,
    count_line,
    make_row,
)
from tests.support.folders import REPOSITORY


def test_every_experiment_is_found_and_its_presets_are_accepted():
    for name in reproduce.EXPERIMENTS:
        module, experiment = (
            importlib.import_module(f"experiments.{name}"),
            describe_experiment(name),
        )
        assert set(experiment.presets) >= set(sections.PRESETS)
        assert experiment.figures and experiment.brief and "experiments." in module.__doc__
        for preset in experiment.presets:
            for arguments in experiment.runs(preset).values():
                cli.parse_flags(module.FLAGS, list(arguments))
    assert reproduce.EXPERIMENTS[:2] == ["run_lens", "run_trained"]
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


def test_a_failing_experiment_is_shown_and_the_exit_code_is_1(tmp_path, monkeypatch, capfd):
    """The report counts the experiments that have ended, each time that one ends."""
    pages, path = [], tmp_path / "report.html"

    def fail_commands(commands, jobs):
        assert list(commands) == ["run_path_counts", "run_path_chains"]  # in the report's order
        assert all(f"--output_dir={tmp_path}/quick/{name}" in c for name, c in commands.items())
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


A_FILE = "cannot write to {0}/file: File exists"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--output_dir={0}/file", A_FILE),
        ("--markdown --docs={0}/file", A_FILE),
        ("--only=run_x", "--only=run_x is not one of run_lens, run_trained"),
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


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ([], "results/reproduce"),
        (["--run_name=a"], "results/reproduce/a"),
        (["--output_dir=out", "--run_name=a", "--preset=reported"], "out/a"),
    ],
)
@pytest.mark.parametrize("further", [[], ["--verdicts", "--markdown", "--docs=pages"]])
def test_what_came_out_is_printed_and_answers_and_pages_where_they_are_asked_for(
    arguments, place, further, tmp_path, monkeypatch, capsys
):
    """Experiments whose data are not there are left out, unless --only names them."""
    monkeypatch.chdir(tmp_path)
    rows = [make_row("falls", "here", [-1.0] * 8)]
    made = [
        Section("run_a", "First", "", "python", finding="It fell.", claims=rows),
        Section("run_b", "Second", "", "python"),
        Section("run_c", "Third", "", "python", finding="It rose."),
    ]
    calls = []

    def run_experiments(names, options, parent, show):
        calls.append((names, options.preset, parent))
        show(made)
        return made

    def write_markdown(parent, preset, docs):
        calls.append((parent, preset, docs))
        return docs / "results.md"

    monkeypatch.setattr(reproduce, "run_experiments", run_experiments)
    monkeypatch.setattr(reproduce, "write_markdown", write_markdown)
    assert cli.execute(reproduce.main, reproduce.FLAGS, [*arguments, *further]) == 0
    preset = "reported" if "--preset=reported" in arguments else "quick"
    lacking = ["run_lens", "run_trained", "run_sinks", "run_lipschitz"]
    names = [name for name in reproduce.EXPERIMENTS if name not in lacking]
    pages = [(Path(place, preset), preset, Path("pages"))] if further else []
    assert calls == [(names, preset, Path(place, preset)), *pages]
    assert "It fell." in Path(place, "report.html").read_text()
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("skipped")} == {*lacking}
    assert "run_lens needs the folder trained: " in printed.out and printed.err == ""
    answers = answer_statements(STATEMENTS, rows, preset == "reported")
    ended = lines[
        lines.index(f"report, written anew whenever an experiment ends: {place}/report.html") + 1 :
    ]
    assert ended[0].startswith("3 of 3 experiments done in 00:0")
    assert ended[1:] == [
        *("", "What came out:", "  First: It fell.", "  Third: It rose.", ""),
        *(answer_lines(answers[0]).splitlines() if further else []),
        count_line(answers),
        f"report: {place}/report.html (--verdicts prints the answers)",
        *(["written to pages/results.md"] if further else []),
    ]


def test_without_statements_and_findings_there_are_counts_alone(tmp_path, monkeypatch, capsys):
    """An experiment that is named runs, whether its data are there or not."""
    monkeypatch.chdir(tmp_path)
    asked, pages, updated = [], [], []

    def run_experiments(names, options, parent, show):
        asked.extend(names)
        made = [
            Section(name, name, "", "python", error="no" * (i == 1)) for i, name in enumerate(names)
        ]
        show(made[:1])
        show(made)
        return made

    def render_report(sections, total, preset, started, parent):
        pages.append(([s.name for s in sections], total, preset, started, parent))
        return f"page {len(pages)}"

    monkeypatch.setattr(reproduce, "run_experiments", run_experiments)
    config = SimpleNamespace(update=lambda *setting: updated.append(setting))
    monkeypatch.setattr(reproduce, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(reproduce, "render_report", render_report)
    monkeypatch.setattr(reproduce.time, "monotonic", iter([5.0, 7.0]).__next__)
    arguments = ["--only=run_path_counts,run_lens", "--verdicts"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 1
    assert asked == ["run_lens", "run_path_counts"]  # in the report's order
    common = 2, "quick", 5.0, Path("results/reproduce/quick")
    assert pages == [(asked[:1], *common), (asked, *common)]
    assert updated == [("jax_platforms", "cpu")]  # accelerators are those of the experiments
    assert Path("results/reproduce/report.html").read_text() == "page 2"
    printed = capsys.readouterr()
    _, ended, place = printed.out.splitlines()
    assert ended == "1 of 2 experiments done in 00:02"
    assert place == "report: results/reproduce/report.html"
    assert printed.err == "failed: run_path_counts\n"
