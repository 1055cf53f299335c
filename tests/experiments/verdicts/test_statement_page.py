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
