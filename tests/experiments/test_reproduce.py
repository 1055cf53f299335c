"""The main job: every entry, the report, a failing experiment; the list of statements."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re

import pytest

from experiments import reproduce, run_architectures
from experiments.lab import cli
from experiments.lab.experiment import describe_experiment
from experiments.reproducing import running, sections
from experiments.reproducing.running import ProcessResult
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
