"""The page of results, of one preset and of several runs."""

import csv
import dataclasses
import io
import re

import jax
import pytest
from PIL import Image

from experiments import run_path_counts
from experiments.lab import cli
from experiments.reproducing import results_page, sections
from experiments.reproducing.filling import Texts
from experiments.reproducing.running import ProcessResult
from rank_collapse.runs import RunError

FEW_TEXTS = {
    "run_path_counts": Texts("{many: of H=4|.0f} and {2 heads, 3 layers: mean path length|.1f}.")
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
    mean = "{2 heads, 3 layers: mean path length|.1f}"
    texts = Texts(f"{mean} of 3.", f"| {mean} |")
    monkeypatch.setattr(results_page, "read_texts", lambda: {"run_path_counts": texts})
    page = docs / "experiments" / "run_path_counts.md"
    page.parent.mkdir(parents=True)
    page.write_text("**Result.** old\n\n<!-- filled -->\nold\n<!-- end -->\nrest\n")
    (docs / "results").mkdir()
    (docs / "results" / "run_path_counts_7.png").write_text("of an earlier run")
    text = results_page.write_markdown(paper, "reported", docs).read_text()
    table = docs / "results" / "run_path_counts.csv"
    assert "2 heads, 3 layers" in table.read_text() and "2 heads, 2 layers" not in table.read_text()
    assert ", 12 s, " in text and "sizes “reported”" in text and f"JAX {jax.__version__}" in text
    assert "**Result.** 2.0 of 3.\n\n| 2.0 |\n" in text and "Not run: run_lens, run_trained" in text
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
    assert "2 heads, 2 layers" in table.read_text() and "**Result.** – of 3." in text
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
        "run_path_counts": Texts("{many: 4 heads, 3 layers: mean path length|.1f} of 3 layers.")
    }
    monkeypatch.setattr(results_page, "read_texts", lambda: texts)
    for preset in sections.PRESETS:
        parent, docs = tmp_path / preset, tmp_path / "docs"
        text = results_page.write_markdown(parent, preset, docs).read_text()
        assert "**Result.** 2.4 of 3 layers." in text
        assert text.count(f"## {experiment.title}\n") == 1 and text.count("png)") == 4
        numbers = (tmp_path / "docs" / "results" / "run_path_counts.csv").read_text()
        assert "2 heads, 3 layers" in numbers and "4 heads, 3 layers" in numbers
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
    assert (
        section.figures[0][1].startswith("many: ") and "4 heads" in section.comparisons[1].quantity
    )


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"environment": []}'])
def test_a_damaged_config_of_a_run_is_named(content, tmp_path):
    (tmp_path / "run_sort").mkdir()
    (tmp_path / "run_sort" / "config.json").write_text(content)
    with pytest.raises(RunError, match=r"run_sort/config\.json cannot be read .*not a run folder"):
        results_page.describe_run(tmp_path, "run_sort")
