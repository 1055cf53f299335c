"""The main job: every entry, the report, a failing experiment."""

import dataclasses
import os
import re
import signal
import subprocess
import sys

import pytest

from experiments import reproduce, run_architectures
from experiments.shell import cli
from experiments.shell.entry import Entry
from rank_collapse import report

PNG = b"\x89PNG not really"


def section(**fields):
    return report.Section(
        **{"name": "a", "title": "A <b>", "claim": "claim", "command": "python -m a"} | fields
    )


def test_the_page_is_self_contained_and_escapes_text():
    rows = [
        report.Comparison("x < y", 0.123456, 0.5, False, "why"),
        report.Comparison("n", 3, None),
        report.Comparison("claim", True, "stops & stays", True),
    ]
    page = report.render("T", "intro", [section(figures=[(PNG, "cap")], comparisons=rows)], "made")
    assert "A &lt;b&gt;" in page and "x &lt; y" in page and "stops &amp; stays" in page
    assert "0.1235" in page and "data:image/png;base64,iVBORyBub3QgcmVhbGx5" in page
    assert "done, 1 of 2 agree" in page
    assert "http" not in page and "src=" in page


def test_a_failed_section_says_so():
    page = report.render("T", "", [section(status="failed", error="boom <x>")])
    assert "failed" in page and "boom &lt;x&gt;" in page


def test_every_experiment_has_an_entry_whose_flags_are_accepted():
    for name in reproduce.EXPERIMENTS:
        module = __import__(f"experiments.{name}", fromlist=["ENTRY"])
        assert isinstance(module.ENTRY, Entry)
        assert set(module.ENTRY.presets) == set(reproduce.PRESETS)
        assert module.ENTRY.captions and "experiments." in module.__doc__
        for arguments in module.ENTRY.presets.values():
            cli.parse(module.FLAGS, list(arguments))


def test_the_readme_names_what_reproduce_runs():
    readme = reproduce.Path(__file__).parents[2] / "README.md"
    named = re.findall(r"^\| `python -m experiments\.(\w+)`", readme.read_text("utf-8"), re.M)
    assert sorted(named) == sorted([*reproduce.EXPERIMENTS, "reproduce", "benchmark"])


def test_a_second_run_in_new_processes_makes_nothing_again(tmp_path, monkeypatch, capfd):
    """Of an experiment that trains a vocabulary too: it must be the same in every process."""
    monkeypatch.setenv("PYTHONPATH", str(reproduce.Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    small = ("--models=albert-base-v2", "--num_texts=2", "--max_tokens=8", "--parts=residuals")
    captions = {"residuals_albert-base-v2": "ALBERT"}
    entry = run_architectures.ENTRY
    entry = dataclasses.replace(entry, presets={"quick": small}, captions=captions)
    monkeypatch.setattr(run_architectures, "ENTRY", entry)
    arguments = ["--only=run_path_counts,run_architectures"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    page = (tmp_path / "results/reproduce/report.html").read_text()
    assert "python -m experiments.run_path_counts" in page and page.count("base64,") == 2
    assert "9 of 9 agree" in page and str(tmp_path) not in page
    folder = tmp_path / "results/reproduce/quick"
    made = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.suffix in (".csv", ".npz")}
    assert len(made) == 3
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_experiment_too(number):
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = "import sys; from experiments.shell.process import run_process; "
    code += f"run_process([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as parent:
        experiment = int(parent.stderr.readline())
        parent.send_signal(number)
        assert parent.wait(timeout=30) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(experiment, 0)


def test_a_failing_experiment_is_shown_and_the_exit_code_is_1(tmp_path, monkeypatch, capfd):
    code = "import sys; print('half way'); print('error: no luck', file=sys.stderr); sys.exit(2)"
    real = reproduce.run_process
    monkeypatch.setattr(
        reproduce, "run_process", lambda command: real([sys.executable, "-c", code])
    )
    arguments = ["--only=run_path_counts", f"--output_dir={tmp_path}"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 1
    page = (tmp_path / "report.html").read_text()
    assert "exit code 2" in page and "error: no luck" in page and "half way" in page
    assert "failed: run_path_counts" in capfd.readouterr().err


def test_an_unknown_experiment_is_refused(capsys):
    assert cli.execute(reproduce.main, reproduce.FLAGS, ["--only=run_x"]) == 2
    assert "--only=run_x is not one of run_collapse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"), [(True, "yes"), (None, "—"), (0.00001234567, "1.235e-05"), (12, "12")]
)
def test_numbers_are_shown_short(value, shown):
    assert report.number(value) == shown
