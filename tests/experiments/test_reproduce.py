"""The main job: every entry, the report, a failing experiment."""

import sys

import pytest

from experiments import reproduce
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


def test_one_experiment_makes_a_report_and_a_second_time_reuses_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(reproduce.Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    arguments = ["--only=run_path_counts"]
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    page = (tmp_path / "results/reproduce/report.html").read_text()
    assert "python -m experiments.run_path_counts" in page and "base64," in page
    assert "9 of 9 agree" in page and str(tmp_path) not in page
    table = tmp_path / "results/reproduce/quick/run_path_counts/results.csv"
    before = table.stat().st_mtime_ns
    assert cli.execute(reproduce.main, reproduce.FLAGS, arguments) == 0
    assert table.stat().st_mtime_ns == before


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
