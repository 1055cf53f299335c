"""The report and the pages of results, of folders that golden arrays make, are kept as texts."""

import re
import time

import pytest

from experiments.reproducing import results_page, running, sections
from experiments.reproducing.filling import Texts
from tests.support.golden_runs import make_folder

NAMES = ("check_bounds", "run_collapse", "run_path_counts", "run_sort", "run_width")
RESULT = Texts("No number. {--seed}", "| {--num_seeds} |")
RUN = {
    "date": "2026-11-29",
    "seed": 3,
    "seconds": 61.7,
    "cpu_seconds": 99.4,
    "at_least": True,
    "jobs": 2,
    "machine": "2 × CPU",
    "jax": "0.10.2",
    "commit": "abc",
    "command": "python -m experiments.run",
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """Makes the run folders of some experiments."""
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        make_folder(name, folder / name)
    return folder


def test_golden_report(parent, golden, monkeypatch):
    monkeypatch.setattr(sections, "read_result", lambda name: f"What came out of {name}.")
    monkeypatch.setattr(running, "describe_machine", lambda parent: "A machine.")
    records = [
        sections.RunRecord(parent / name, f"python -m experiments.{name}", "1.0 s")
        for name in NAMES
    ]
    made = [sections.make_section(r.folder.name, [r]) for r in records]
    failed = sections.RunRecord(parent, "python", "2.0 s", "few", 3, "half way")
    made.append(sections.make_section("run_circle", [failed]))
    page = running.render_report(made, 9, "quick", time.monotonic(), parent)
    page = re.sub(r"base64,[\w+/=]+", "base64", page)
    golden("pages/report.html", page.replace("><", ">\n<").replace(str(parent), "FOLDER"))


def test_golden_pages_of_results(parent, golden, monkeypatch, tmp_path):
    monkeypatch.setattr(results_page, "read_texts", lambda: dict.fromkeys(NAMES, RESULT))
    monkeypatch.setattr(results_page, "describe_run", lambda parent, name: RUN)
    results_page.write_markdown(parent, "quick", tmp_path)
    for path in sorted(tmp_path.rglob("*.*")):
        if path.suffix in (".md", ".csv"):
            golden(f"pages/{path.name}", path.read_text("utf-8"))
