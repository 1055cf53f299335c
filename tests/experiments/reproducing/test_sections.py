"""Sections of several runs; times of runs that were damaged or interrupted."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments import run_sort, verdicts
from experiments.reproducing import sections
from experiments.reproducing.running import ProcessResult
from experiments.verdicts import Comparison, mean_row

DAMAGED = (
    *("", "[]", '{"run_sort": 3}'),
    *('{"run_sort": {"seconds": "x"}}', '{"run_sort": {"seconds": null}}'),
)


@pytest.mark.parametrize("content", DAMAGED)
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
    for jobs, resumed, most in ((3, True, 3), (2, True, 3), (2, False, 2)):
        result = ProcessResult(0, "", 1.0, 1.0)
        sections.save_time(tmp_path, "run_sort", result, jobs, resumed)
        assert sections.read_times(tmp_path)["run_sort"]["jobs"] == most
    sections.save_time(tmp_path, "run_width", ProcessResult(0, "", 3.0, 3.0), 1, resumed=True)
    assert sections.read_times(tmp_path)["run_width"]["at_least"] == 1


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (
            "# A\n\n**Result.** It holds ([table](../results/a.csv), [paper](https://a.b/c)).\n\nB",
            "It holds ([table](results/a.csv), [paper](https://a.b/c)).",
        ),
        ("# A\n\nNo result, though **Result.** is named.\n", ""),
        (None, ""),
    ],
)
def test_the_result_of_a_page_has_links_from_one_folder_higher(text, result, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "DOCS", tmp_path)
    if text is not None:
        (tmp_path / "experiments").mkdir()
        (tmp_path / "experiments" / "sort.md").write_text(text, "utf-8")
    assert sections.read_result("sort") == result


def test_a_section_joins_the_runs_of_its_experiment(tmp_path, monkeypatch):
    """The first finding counts; figures are in the order of the experiment's."""
    figures = {"curves": "Curves.", "paths": "Paths.", "absent": "None."}
    module = SimpleNamespace(
        EXPERIMENT=SimpleNamespace(title="Sorting", claim="It sorts.", figures=figures)
    )
    findings = {"a": None, "b": ("paths", "The second."), "c": ("curves", "The third.")}
    runs = {}
    for name, finding in findings.items():
        folder = tmp_path / name / "figures"
        folder.mkdir(parents=True)
        for figure in ("paths", "curves"):
            (folder / f"{figure}.png").write_bytes(f"{figure} of {name}".encode())
        runs[tmp_path / name] = SimpleNamespace(
            finding=finding,
            claims=[mean_row("rate", name, [1.0])],
            comparisons=[Comparison("rate", 2.0, 3.0)],
        )
    monkeypatch.setattr(sections, "describe_experiment", lambda name: module.EXPERIMENT)
    monkeypatch.setattr(sections, "import_experiment", lambda name: module)
    monkeypatch.setattr(sections, "read_run", lambda experiment, folder: runs[folder])
    monkeypatch.setattr(sections, "read_result", lambda name: f"Result of {name}.")
    records = [
        sections.RunRecord(tmp_path / name, f"python {name}", f"1 s of {name}.", f"run {name}")
        for name in findings
    ]
    output = "begin" + 1986 * "." + "\nerror: no luck"
    broken = sections.RunRecord(tmp_path / "d", "python d", "2 s.", "", 2, output)
    section = sections.make_section("run_sort", [*records, broken])
    assert (section.name, section.title, section.claim) == ("run_sort", "Sorting", "It sorts.")
    assert (section.finding, section.picture) == ("The second.", b"paths of b")
    assert section.came_out == "Result of run_sort."
    assert section.figures == [
        (f"{figure} of {name}".encode(), f"run {name}: {figures[figure]}")
        for name in findings
        for figure in ("curves", "paths")
    ]
    assert [row.setting for row in section.claims] == ["a", "b", "c"]
    assert [c.quantity for c in section.comparisons] == [f"run {name}: rate" for name in "abc"]
    assert section.command == "python a\npython b\npython c\npython d"
    assert section.details == "run a: 1 s of a. run b: 1 s of b. run c: 1 s of c. 2 s."
    assert section.error == f"RunError: exit code 2\n{output[-2000:]}"
    assert section.error.endswith("..\nerror: no luck") and "begin" not in section.error


def test_what_reading_a_run_prints_is_not_printed_again(tmp_path, monkeypatch, capsys):
    def read(experiment, folder):
        print("half way")
        print("a warning", file=sys.stderr)
        raise ValueError("no numbers")

    monkeypatch.setattr(sections, "read_run", read)
    record = sections.RunRecord(tmp_path, "python", "", "few")
    section = sections.make_section("run_sort", [record])
    assert section.error == "few: ValueError: no numbers\n"
    assert capsys.readouterr() == ("", "")


def test_a_run_that_adds_draws_has_a_budget_in_the_place_of_their_number():
    arguments = ["--num_seeds=3", "--depth=2"]
    for name, most in (("run_sort", "max_seeds"), ("run_sinks", "max_texts")):
        others = [*arguments, "--num_texts=4"]
        kept = [a for a in others if not a.startswith(f"--num_{most[4:]}=")]
        budget = verdicts.PROTOCOL.budgets[name]
        expected = [*kept, "--until=decided", f"--{most}={budget}"]
        assert sections.until_decided(name, others) == expected and len(kept) == 2
    assert "run_path_counts" not in verdicts.PROTOCOL.budgets
    assert sections.until_decided("run_path_counts", arguments) == arguments


def test_flags_of_an_experiment_are_those_of_its_last_run(monkeypatch):
    """Values of an axis are a list; the flags of the experiment itself stay as they are."""
    runs = {"few": "--depth=5 --num_seeds=3", "many": "--depth=2,4 --num_seeds=7"}
    monkeypatch.setattr(
        run_sort, "EXPERIMENT", replace(run_sort.EXPERIMENT, presets={"quick": runs})
    )
    before = {name: run_sort.FLAGS[name].value for name in run_sort.FLAGS}
    values = sections.read_flag_values("run_sort", "quick")
    assert values["depth"] == ["2", "4"] and values["num_seeds"] == 7
    assert values.keys() == before.keys()
    assert {name: run_sort.FLAGS[name].value for name in run_sort.FLAGS} == before


def test_the_folder_of_the_times_is_made(tmp_path):
    sections.save_time(tmp_path / "new" / "quick", "run_sort", ProcessResult(0, "", 3.0, 4.0), 1)
    times = sections.read_times(tmp_path / "new" / "quick")["run_sort"]
    assert (times["seconds"], times["cpu_seconds"]) == (3, 4)
