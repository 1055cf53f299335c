"""The report and the pages of results, of folders that golden arrays make, are kept as texts."""

import re
import time

import pytest

from experiments.reproducing import results_page, running, sections
from experiments.reproducing.filling import Texts
from experiments.verdicts import statement_page
from rank_collapse.report.style import STYLE
from tests.support.golden_runs import make_folder

NAMES = ("check_bounds", "run_collapse", "run_path_counts", "run_sort", "run_width")
RESULT = Texts("No number. {--seed}", "| {--num_seeds} |")


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """Makes the run folders of some experiments."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        make_folder(name, folder / name)
    return folder


def test_golden_report(parent, golden, monkeypatch):
    monkeypatch.setattr(sections, "read_result", lambda name: f"What came out of {name}.")
    records = [
        sections.RunRecord(parent / name, f"python -m experiments.{name}", "1.0 s")
        for name in NAMES
    ]
    made = [sections.make_section(r.folder.name, [r]) for r in records]
    failed = sections.RunRecord(parent, "python", "2.0 s", "few", 3, "half way")
    made.append(sections.make_section("run_circle", [failed]))
    page = running.render_report(made, 9, "quick", time.monotonic(), parent)
    page = re.sub(r"base64,[\w+/=]+", "base64", page).replace(str(parent), "FOLDER")
    page = page.replace(STYLE + statement_page.STYLE, "")
    golden("pages/report.html", re.sub(r"><(?!/?t[dh]\b|/tr)", ">\n<", page))  # a line for each row


def test_golden_pages_of_results(parent, golden, monkeypatch, tmp_path):
    monkeypatch.setattr(results_page, "read_texts", lambda: dict.fromkeys(NAMES, RESULT))
    for jobs, name in enumerate(NAMES[1:], 1):
        ended = running.ProcessResult(0, "", 61.7 * jobs, 99.4)
        sections.save_time(parent, name, ended, jobs, resumed=jobs == 3)
    results_page.write_markdown(parent, "quick", tmp_path)
    for path in sorted(tmp_path.rglob("*.*")):
        if path.suffix in (".md", ".csv"):
            golden(f"pages/{path.name}", path.read_text("utf-8"))
