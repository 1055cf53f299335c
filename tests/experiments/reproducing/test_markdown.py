"""The page of results as Markdown: tables of rows of statements, figures and files."""

import csv
import io
import re

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from experiments.reproducing import filling, markdown
from experiments.reproducing.markdown import render_markdown, shrink_png
from experiments.verdicts import STATEMENTS, Row, mean_row
from experiments.verdicts.claims import Statement
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
    return render_markdown("Results", "All of them.", "A path.", [section])


def test_the_interval_of_a_row_is_the_one_of_its_head(rendered):
    page, _ = rendered
    head, explained = (line for line in page.splitlines() if line.startswith("| statement"))
    assert explained == "| statement | claim | measured |"
    assert head == "| statement | setting | measured | 95 % interval | draws |"
    *rows, claim = (line for line in page.splitlines() if line.startswith("| rate"))
    assert claim.startswith(f"| rate | {STATEMENTS['rate'].text} (")
    low, high = (f"{end:.4g}".replace("-", "−") for end in (LOW, HIGH))
    assert rows == [
        rf"| rate | no norm \| scale 1 | −3.75 | {low} to {high} | 4 |",
        "| rate | one | 1e−05 |  | 1 |",
    ]


def test_a_setting_that_the_statement_does_not_have_is_marked():
    claims = [
        mean_row("width", setting, [0.01]) for setting in ("12 layers and 1", "3 layers and 1")
    ]
    section = Section("run_example", "An example", "", "python", claims=claims)
    page, _ = render_markdown("Results", "", "", [section])
    assert "| width | 12 layers and 1 |" in page
    assert "| width | 3 layers and 1 (not a setting of the statement) |" in page


def test_the_file_of_numbers_has_the_same_interval(rendered):
    _, files = rendered
    table = csv.DictReader(io.StringIO(files["results/run_example.csv"].decode()))
    published, row, _ = table
    assert (published["quantity"], published["published"]) == ("accuracy", "0.75")
    assert float(row["low"]) == pytest.approx(LOW) and float(row["high"]) == pytest.approx(HIGH)
    assert {*files} == {f"results/run_example{end}" for end in ("_0.png", "_1.png", ".csv")}
    assert files["results/run_example_1.png"] == b"second"


@pytest.mark.parametrize("level, shown", [(0.95, "95 %"), (0.5, "50 %")])
def test_every_table_asks_for_an_interval_of_the_level_that_it_names(monkeypatch, level, shown):
    for module in (markdown, filling):
        assert module.LEVEL == 0.95
        monkeypatch.setattr(module, "LEVEL", level)
    row = Row("rate", "a", 3, 0.5, lambda level: Interval(level, 2.0))
    section = Section("run_example", "An example", "", "python", claims=[row])
    page, files = render_markdown("Results", "", "", [section])
    assert f"| {shown} interval |" in page and f"| {level} to 2 |" in page
    assert f"{level},2.0".encode() in files["results/run_example.csv"]


def test_a_whole_page():
    """Of an experiment with everything, and of one that failed and has nothing but its claim."""
    claims = [mean_row("rate", "a", [1.0, 3.0])]
    whole = Section(
        "run_a",
        "All",
        command="python -m a",
        claim="It falls.",
        came_out="It fell.",
        claims=claims,
        figures=[(b"1", "A [b]\nof c"), (b"2", "Two"), (b"3", "Three")],
        details="2 s.",
    )
    failed = Section("run_b", "None", "It stops.", "python -m b", error="it broke", details="1 s.")
    bare = Section("run_c", "Bare", "It is.", "python -m c", came_out="It was.", details="3 s.")
    page, files = render_markdown("Results", "Three.", "A path.", [whole, failed, bare])
    table = (
        "A [CSV file](results/{}.csv) has all numbers of this experiment, and published numbers if "
        "there are any."
    )
    fold = '<details markdown="1"><summary>{}</summary>'
    terms = "[Terms](#terms) that this section uses are explained at the top of the page."
    paragraphs = [
        "# Results",
        "Three.",
        "## Terms",
        "A path.",
        "## All",
        terms,
        "![All](results/run_a_0.png)",
        r"*A \[b\] of c*",
        "**The paper.** It falls.",
        "**Result.** It fell.",
        table.format("run_a"),
        fold.format("Statements about this experiment: 1 measurement"),
        "ROWS",
        "</details>",
        fold.format("2 more figures"),
        "- [Two](results/run_a_1.png)\n- [Three](results/run_a_2.png)",
        "</details>",
        "```\npython -m a\n```",
        "2 s.",
        "## None",
        terms,
        "**failed**",
        "**The paper.** It stops.",
        table.format("run_b"),
        "```\npython -m b\n```",
        "1 s.",
        "## Bare",
        terms,
        "**The paper.** It is.",
        "**Result.** It was.",
        table.format("run_c"),
        "```\npython -m c\n```",
        "3 s.",
    ]
    page = re.sub(r"The first table has.*?(?=\n\n</details>)", "ROWS", page, flags=re.DOTALL)
    assert page == "\n\n".join(paragraphs) + "\n"
    assert [files[f"results/run_a_{i}.png"] for i in range(3)] == [b"1", b"2", b"3"]
    two = Section("run_a", "Two", "", "", claims=2 * claims, figures=[(b"", "a"), (b"", "b")])
    page, _ = render_markdown("Results", "", "", [two])
    assert "experiment: 2 measurements<" in page and "<summary>1 more figure<" in page


def test_a_figure_is_shrunk_to_a_palette_unless_that_is_larger():
    def make_png(image, **options):
        written = io.BytesIO()
        image.save(written, "png", **options)
        return written.getvalue()

    noise = make_png(Image.effect_noise((64, 64), 90).convert("RGB"))
    smaller = shrink_png(noise)
    assert len(smaller) < len(noise) and Image.open(io.BytesIO(smaller)).mode == "P"
    shades = np.random.default_rng(0).integers(256, size=(64, 64))
    colours = np.stack([shades, 255 - shades, shades // 2 + 60], axis=2)
    png = shrink_png(make_png(Image.fromarray(colours.astype("uint8"))))
    shrunk = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert np.abs(shrunk.astype(int) - colours).max() < 12
    pairs = {
        (shade, *colour)
        for shade, colour in zip(shades.flat, shrunk.reshape(-1, 3).tolist(), strict=True)
    }
    assert len(pairs) == len(set(shades.flat)) > 64  # equal colours stay equal: no dots
    assert len({pair[1:] for pair in pairs}) == 64
    plain = make_png(Image.new("L", (1, 1)), optimize=True)
    assert shrink_png(plain) == plain and shrink_png(b"no image") == b"no image"


def test_what_a_statement_claims_is_written_once_as_text_of_a_table(monkeypatch):
    statement = Statement("Section 2", "It is [so] from -3 on.", "a [rate]\nof |x|", (-1.0, 2.0))
    monkeypatch.setattr(markdown, "STATEMENTS", {"key": statement})
    rows = [mean_row("key", setting, [0.5]) for setting in ("a", "b")]
    head, rule, *lines = markdown._explain_statements(rows).split("\n")
    assert (head, rule) == ("| statement | claim | measured |", "|---|---|---|")
    (line,) = lines
    claim = r"| key | It is \[so\] from −3 on. (Section 2) "
    assert line == claim + r"| median over draws: a \[rate\] of \|x\| |"
