"""The page of results as Markdown: tables of rows of statements, figures and files."""

import csv
import io

import pytest
from scipy import stats

from experiments.reproducing.markdown import render_markdown
from experiments.verdicts import Row, mean_row
from experiments.verdicts.statement_page import Comparison, Section
from rank_collapse.report.intervals import Interval

VALUES = [-2.0, -3.0, -4.0, -6.0]
LOW, HIGH = stats.t.interval(0.95, 3, loc=-3.75, scale=stats.sem(VALUES))


@pytest.fixture
def rendered():
    claims = [mean_row("rate", "no norm | scale 1", VALUES), mean_row("rate", "one", [1e-5])]
    section = Section(
        "run_example",
        "An example",
        command="python -m experiments.run_example",
        claim="The paper says so.",
        came_out="It is so.",
        claims=claims,
        comparisons=[Comparison("accuracy", 0.5, 0.75)],
        figures=[(b"first", "A | b"), (b"second", "More")],
        details="2 s.",
    )
    return render_markdown("Results", "All of them.", [section])


def test_the_interval_of_a_row_is_the_one_of_its_head(rendered):
    page, _ = rendered
    (head,) = [line for line in page.splitlines() if line.startswith("| statement")]
    assert head == "| statement | setting | measured | 95 % interval | draws |"
    rows = [line for line in page.splitlines() if line.startswith("| rate")]
    low, high = (f"{end:.4g}".replace("-", "−") for end in (LOW, HIGH))
    assert rows == [
        rf"| rate | no norm \| scale 1 | −3.75 | {low} to {high} | 4 |",
        "| rate | one | 1e−05 |  | 1 |",
    ]


def test_the_file_of_numbers_has_the_same_interval(rendered):
    _, files = rendered
    table = csv.DictReader(io.StringIO(files["results/run_example.csv"].decode()))
    published, row, _ = table
    assert (published["quantity"], published["published"]) == ("accuracy", "0.75")
    assert float(row["low"]) == pytest.approx(LOW) and float(row["high"]) == pytest.approx(HIGH)
    assert {*files} == {f"results/run_example{end}" for end in ("_0.png", "_1.png", ".csv")}
    assert files["results/run_example_1.png"] == b"second"


def test_every_table_asks_for_an_interval_of_95_percent(monkeypatch):
    row = Row("rate", "a", 3, 0.5, lambda level: Interval(level, 2.0))
    section = Section("run_example", "An example", "", "python", claims=[row])
    page, files = render_markdown("Results", "", [section])
    assert "| 0.95 to 2 |" in page and b"0.95,2.0" in files["results/run_example.csv"]
