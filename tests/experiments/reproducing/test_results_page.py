"""The page of results, of one preset and of several runs."""

import csv
import dataclasses
import io
import json
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
    in_the_table = {"run_path_counts": Texts("Few.", "| {many: of H=5|.0f} |")}
    monkeypatch.setattr(results_page, "read_texts", lambda: in_the_table)
    with pytest.raises(ValueError, match="no table has: run_path_counts: many: of H=5"):
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
    assert "It took 12 s with" in text and "Sizes: preset “reported”." in text
    assert f"JAX {jax.__version__}." in text
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
    assert f"Commit: {run['commit'] or 'unknown'}." in text
    text = results_page.write_markdown(quick, "quick", docs).read_text()
    assert "2 heads, 2 layers" in table.read_text() and "**Result.** – of 3." in text
    assert page.read_text() == filled and "Sizes: preset “quick”." in text


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
        "run_path_counts": Texts("{many: 4 heads, 3 layers: mean path length|.1f} of [3](../a.md).")
    }
    monkeypatch.setattr(results_page, "read_texts", lambda: texts)
    for preset in sections.PRESETS:
        parent, docs = tmp_path / preset, tmp_path / "docs"
        text = results_page.write_markdown(parent, preset, docs).read_text()
        assert "**Result.** 2.4 of [3](a.md)." in text  # from one folder higher
        assert text.count(f"## {experiment.title}\n") == 1 and text.count("png)") == 4
        numbers = (tmp_path / "docs" / "results" / "run_path_counts.csv").read_text()
        assert "2 heads, 3 layers" in numbers and "4 heads, 3 layers" in numbers
        assert "*few: " in text and "- [many: " in text
        assert text.count(f" Sizes: preset “{preset}”.") == len(several)
    (tmp_path / "reported/run_path_counts/many/summary.json").unlink()
    text = results_page.write_markdown(
        tmp_path / "reported", "reported", tmp_path / "docs"
    ).read_text()
    assert "run_path_counts" in text and f"## {experiment.title}\n" not in text
    with monkeypatch.context() as patch:
        patch.setattr(results_page, "list_experiments", lambda: ["run_path_counts"])
        pages = [
            results_page.write_markdown(tmp_path / preset, preset, tmp_path / "docs").read_text()
            for preset in sections.PRESETS
        ]
    assert "Not run" not in pages[0] and "Not run: run_path_counts.\n" in pages[1]
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


def write_config(folder, **environment):
    """Writes the config.json of a run on a machine."""
    defaults = {"started": "2031-04-17 10:11:12", "backend": "cpu", "device": "a device"}
    defaults |= {"num_devices": 2, "versions": {"jax": "1.2", "numpy": "3.4"}, "git": "a1" * 20}
    saved = {
        "config": {"experiment": "sort", "seed": 5},
        "execution": {"command": "python -m experiments.run_sort"},
        "environment": defaults | environment,
        "layout": 3,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(saved))


def test_a_run_is_described_by_its_machine_and_its_time(tmp_path):
    """A CPU has the name of its processor; a time may be a lower bound, or not known."""
    run, small_print = tmp_path / "run_sort", []

    def describe(*result, **environment):
        write_config(run, **environment)
        if result:
            ended = ProcessResult(0, "", *result[:2])
            sections.save_time(tmp_path, "run_sort", ended, *result[2:])
        row = results_page.describe_run(tmp_path, "run_sort")
        assert row["jax"] == "1.2" and row["commit"] == "a1" * 20 and row["seed"] == 5
        assert (row["date"], row["command"]) == ("2031-04-17", "python -m experiments.run_sort")
        small_print.append(results_page.format_run(row, "quick"))
        return row

    row = describe(processor="A processor")
    assert (row["machine"], row["seconds"], row["at_least"]) == ("2 × A processor", None, True)
    assert describe()["machine"] == "2 × CPU"
    row = describe(12.34, 56.78, 1, True, backend="gpu", processor="A processor", num_devices=4)
    assert row["machine"] == "4 × a device" and row["at_least"] is True
    assert (row["seconds"], row["cpu_seconds"], row["jobs"]) == (12.3, 56.8, 1)
    row = describe(20.0, 30.0, 3, False)
    assert (row["seconds"], row["jobs"], row["at_least"]) == (20.0, 3, False)
    ends = " Sizes: preset “quick”. JAX 1.2. Commit: " + "a1" * 20 + "."
    start = "Run of 2031-04-17, first seed 5, on"
    assert small_print == [
        f"{start} 2 × A processor.{ends}",
        f"{start} 2 × CPU.{ends}",
        f"{start} 4 × a device. It took at least 12 s with compilation.{ends}",
        f"{start} 2 × CPU. It took 20 s with compilation while another experiment ran.{ends}",
    ]
    assert results_page.format_run(row | {"seed": None, "commit": ""}, "quick").startswith(
        "Run of 2031-04-17, on 2 × CPU. It took 20 s "
    )


def test_a_page_has_one_result_and_one_table():
    page = "**Result.** old\n\n**Result.** of others\n<!-- filled -->\nold\n<!-- end -->\n"
    filled = results_page.fill_page(2 * page, Texts(r"new \1", "| a |"))
    new = page.replace("old\n\n", "new \\1\n\n").replace("\nold", "\n| a |")
    assert filled == new + page


def test_pages_that_there_are_are_filled(tmp_path):
    page = "**Result.** old\n\n<!-- filled -->\nold\n<!-- end -->\n"
    for name in ("a.md", "c.md"):
        (tmp_path / name).write_text(page)
    texts = {name: Texts(f"new {name}", "| 1 |") for name in ("a.md", "b.md", "c.md")}
    assert results_page.fill_pages(tmp_path, texts) == {
        name: page.replace("** old", f"** new {name}").replace("\nold", "\n| 1 |").encode()
        for name in ("a.md", "c.md")
    }


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"environment": []}', "config"])
def test_a_damaged_config_of_a_run_is_named(content, tmp_path):
    write_config(tmp_path / "run_sort")
    path = tmp_path / "run_sort" / "config.json"
    if content == "config":
        content = json.dumps(json.loads(path.read_text()) | {"config": []})
    path.write_text(content)
    with pytest.raises(RunError, match=r"run_sort/config\.json cannot be read .*not a run folder"):
        results_page.describe_run(tmp_path, "run_sort")
