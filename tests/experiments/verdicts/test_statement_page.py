"""The board of statements: intervals where they belong, and names that are hostile to HTML."""

import html
import re
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser

import pytest

from experiments import verdicts
from experiments.verdicts import rows, statement_page

HOSTILE = "\"><script>alert('1')</script><img src=x onerror=alert(2)>&amp;</style></svg>"
WIDTHS = (400, 900, 1400)
FORBIDDEN = {"script", "iframe", "object", "embed", "link", "base", "form"}


def compute_answer(claimed, values, **fields):
    statement = verdicts.Statement("source", "text", "statistic", claimed, **fields)
    make = rows.mean_row if claimed is None else partial(rows.median_row, claimed=claimed)
    made = [make("key", f"setting {i}", v) for i, v in enumerate(values)]
    (answer,) = verdicts.answer_statements({"key": statement}, made)
    return answer


class Seen(HTMLParser):
    """Collects every tag with its attributes, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def render_hostile_page():
    statements = {HOSTILE: verdicts.Statement(HOSTILE, HOSTILE, HOSTILE, (0.0, 1.0))}
    hostile = [
        rows.median_row(HOSTILE, HOSTILE, values, (0.0, 1.0), note=HOSTILE)
        for values in ([0.1, 0.2, 0.3], [])
    ]
    section = verdicts.Section(
        name=HOSTILE,
        title=HOSTILE,
        claim=HOSTILE,
        command=HOSTILE,
        finding=HOSTILE,
        picture=b"png",
        came_out=HOSTILE,
        figures=[(b"png", HOSTILE), (b"png", HOSTILE)],
        claims=hostile,
        comparisons=[verdicts.Comparison(HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
        details=HOSTILE,
        error=HOSTILE,
    )
    answers = verdicts.answer_statements(statements, hostile)
    return verdicts.render(HOSTILE, HOSTILE, [section], HOSTILE, answers)


def test_a_number_beside_another_names_what_is_not_published():
    """The column is that of published values; a law or a theory is named in it."""
    rows = [
        verdicts.Comparison("accuracy", 0.98, 0.9),
        verdicts.Comparison("order", 2.9, 3, source="theory"),
        verdicts.Comparison("ratio", 1.2, "at most 1", source="bound"),
        verdicts.Comparison("length", 4),
    ]
    section = verdicts.Section("name", "title", "", "command", comparisons=rows)
    page = verdicts.render("title", "intro", [section])
    cells = re.findall(r'<td>(\w+)</td><td class="number">[\d.]+</td><td[^>]*>(.*?)</td>', page)
    assert cells == [
        ("accuracy", "0.9"),
        ("order", "theory 3"),
        ("ratio", "bound: at most 1"),
        ("length", "—"),
    ]


def test_hostile_names_stay_text():
    parser = Seen(render_hostile_page())
    assert not {tag for tag, _ in parser.tags} & FORBIDDEN and not parser.open
    names = {name for _, attributes in parser.tags for name in attributes}
    assert not any(name.startswith("on") for name in names)
    sources = [a["src"] for tag, a in parser.tags if tag == "img"]
    assert len(sources) == 3 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert "http" not in render_hostile_page()
    assert parser.text.count("alert('1')") > 15


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_in_a_browser_nothing_is_cut_off_at_any_width(tmp_path):
    """The unfolded page is no wider than frames of three widths, no answer of a statement is wider
    than its column, and no script runs."""
    text = html.escape(render_hostile_page().replace("<details", "<details open"))
    frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{text}"></iframe>' for w in WIDTHS)
    script = """<script>window.alert = () => { document.title += " alert" }; onload = () => {
        for (const frame of document.querySelectorAll("iframe")) {
            const root = frame.contentDocument.documentElement;
            document.title += ` ${root.clientWidth}:${root.scrollWidth}`;
            for (const answer of root.querySelectorAll(".statement .answer"))
                document.title += ` ${answer.clientWidth}:${answer.scrollWidth}` } }</script>"""
    path = tmp_path / "frames.html"
    path.write_text(f'<meta charset="utf-8"><title>seen</title>{script}{frames}', "utf-8")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=60)
    (title,) = re.findall(r"<title>(seen.*?)</title>", done.stdout)[:1]
    sizes = [tuple(map(int, pair.split(":"))) for pair in title.split()[1:]]
    # The page shows its answer twice: in the section and in the list.
    assert len(sizes) == 3 * 3 and all(0 < inner <= outer for outer, inner in sizes), title


def test_a_statement_has_its_settings_with_intervals_and_verdicts():
    three, five, both = [2.99, 3.0, 3.01] * 6, [4.99, 5.0, 5.01] * 6, [2.3, 2.6, 2.9, 3.7] * 4
    answer = compute_answer((2.5, 3.5), [three, five, both, []])
    rendered = statement_page.render_statement(answer)
    shown = re.findall(r"<tr>.*?</tr>", rendered)
    assert len(shown) == 4 and "refuted by: ≤ 2.5 or ≥ 3.5" in rendered
    assert re.search(r">in some settings <.*>1/1/1, 1 not measured<", rendered)
    assert 'title="settings within the range / outside it / undecided"' in rendered
    seen = [re.search(r'<td class="([a-z-]+)">([a-z ]+)</td>', row) for row in shown]
    assert [match[2] for match in seen] == ["within", "outside", "undecided", "not measured"]
    assert all(match[1] == match[2].replace(" ", "-") for match in seen)
    assert ">3 (2.99" in shown[0] and "setting 1" in shown[1] and ">—<" in shown[3]


def test_a_finding_has_no_verdicts():
    answer = compute_answer(None, [[2.99, 3.0, 3.01]])
    assert "undecided</td>" not in statement_page.render_statement(answer)
    row = re.search(r"<tr>.*?</tr>", statement_page.render_statement(answer))[0]
    assert row.endswith('<td class="undecided"></td></tr>')


def make_png(width, height):
    """Makes the beginning of a PNG: its signature, and the sizes in its header."""
    header = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + b"IHDR"
    return header + width.to_bytes(4) + height.to_bytes(4)


def test_cards_are_of_findings_with_a_picture_and_broad_ones_have_two_columns():
    def make_section(name, **fields):
        return verdicts.Section(name, f"Title of {name}", "", "python", **fields)

    sections = [
        make_section("said", finding="no picture"),
        make_section("drawn", picture=make_png(9, 1)),
        make_section("square", finding="a square", picture=make_png(20, 10)),
        make_section("broad", finding="a panorama", picture=make_png(21, 10)),
    ]
    page = verdicts.render("Results", "All.", sections)
    cards = re.findall(r'<a class="(card.*?)" href="#(\w+)">(.*?)</a>', page)
    assert [card[:2] for card in cards] == [("card", "square"), ("card broad", "broad")]
    for (_, name, card), sentence in zip(cards, ("a square", "a panorama"), strict=True):
        assert f'alt="{sentence}"' in card and f"<p>{sentence}</p>" in card
        assert f'<p class="small">Title of {name}</p>' in card
    order = re.findall(r'<h2 id="(\w+)"', page)
    assert order == ["square", "broad", "said", "drawn"]  # those with cards are first
    assert statement_page.STYLE in page


def test_numbers_stand_beside_published_ones_where_there_are_any():
    published = [
        verdicts.Comparison("with", 0.5, 0.0, "a note"),
        verdicts.Comparison("without", 2.0),
    ]
    section = verdicts.Section("a", "A", "", "python", comparisons=published)
    page = verdicts.render("Results", "All.", [section])
    assert "Numbers, with published ones" in page and "<th>published</th>" in page
    rows_of = re.findall(r"<tr><td>(.*?)</td></tr>", page)
    assert [re.sub("<.*?>", "|", row) for row in rows_of] == [
        "with||0.5||0||a note",
        "without||2||—||",
    ]
    alone = verdicts.Section("a", "A", "", "python", comparisons=published[1:])
    page = verdicts.render("Results", "All.", [alone])
    assert "with published ones" not in page and "<th>published</th>" not in page
    line = statement_page.comparison_line
    assert line(published[0]) == "with: 0.5 (published 0); a note"
    assert line(published[1]) == "without: 2"
    law = verdicts.Comparison("a", 3.0, "falls", source="law")
    assert line(law) == "a: 3 (law: falls)"


def test_a_section_has_the_statements_that_it_tests_and_its_error():
    answers = [compute_answer((0.0, 9.0), [[1.0] * 9]), compute_answer((0.0, 9.0), [[-1.0] * 9])]
    other = statement_page.Answer("other", answers[1].statement, "open", answers[1].rows)
    claims = [rows.median_row("key", "a", [1.0], (0.0, 9.0))]
    section = verdicts.Section(
        "a", "A", "It falls.", "python", "It fell.", came_out="It fell there.", claims=claims
    )
    page = verdicts.render("Results", "All.", [section], answers=[answers[0], other])
    assert "Statements: holds 1<" in page  # the other one is in the list alone
    assert "<b>Here: </b>It fell.</p><p><b>The paper: </b>It falls." in page
    assert "<b>Reference run: </b>It fell there." in page
    assert (
        '<span class="answer holds">holds: 1</span><span class="answer open">open: 1</span>' in page
    )
    failed = verdicts.Section("a", "A", "", "python", error="1 < 2", details="small print")
    page = verdicts.render("Results", "All.", [failed])
    assert "<pre>1 &lt; 2</pre>" in page and 'class="failed">failed<' in page
    assert "small print" in page
