"""Times of runs that were damaged or interrupted."""

import pytest

from experiments.reproducing import sections
from experiments.reproducing.running import ProcessResult


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
