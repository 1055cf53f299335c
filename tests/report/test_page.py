"""Pages of HTML: each part in its place, everything that others wrote escaped."""

import base64
import re

from rank_collapse.report.page import Section, format_number, render, render_inline, render_table

PNG = [(b"first", "one"), (b"second", "two & three"), (b"third", "four")]


def section(**fields):
    return Section(**{"name": "a", "title": "A<b>", "command": ""} | fields)


def page(*sections, **options):
    return render("T & co", "intro <i>", sections, **options)


def test_title_intro_and_footer_are_text_while_opening_and_style_are_html():
    html = page(footer="1 < 2", opening="<p>open</p>", style=".x { top: 0 }")
    assert html.count("T &amp; co") == 2 and "<p>intro &lt;i&gt;</p>" in html
    assert '<p class="small">1 &lt; 2</p></main>' in html
    assert "box-sizing" in html and ".x { top: 0 }</style>" in html
    assert html.index("Contents") < html.index("<p>open</p>") < html.index("1 &lt; 2")


def test_each_section_is_linked_twice_with_its_status():
    html = page(section(name='p"q', status="<b>ok</b>"), section(name="a", title="Z"))
    assert html.count('<a href="#p&quot;q">A&lt;b&gt;<b>ok</b></a>') == 2
    assert html.count('<a href="#a">Z</a>') == 2
    assert '<h2 id="p&quot;q">A&lt;b&gt;<b>ok</b></h2>' in html
    assert html.index('id="p&quot;q"') < html.index('id="a"')


def test_the_first_figure_is_shown_and_the_others_unfold():
    for count, summary in ((1, None), (2, "1 more figure<"), (3, "2 more figures<")):
        html = page(section(figures=PNG[:count], body="<p>body</p>"))
        shown, _, folded = html.partition("more figure")
        assert shown.index("<p>body</p>") < shown.index("<figure>")
        assert shown.count("<figure>") == 1 and folded.count("<figure>") == count - 1
        assert (summary or "</section>") in html and ("more figure" in html) == (count > 1)
        data = [base64.b64decode(text) for text in re.findall(r"base64,([^\"]*)\"", html)]
        assert data == [png for png, _ in PNG[:count]]
    assert '<img alt="two &amp; three"' in html
    assert "<figcaption>two &amp; three</figcaption>" in html


def test_a_command_unfolds_with_its_small_print_and_is_absent_without():
    html = page(section(command="a > b", details="1 < 2", folded=[("F&", "<p>f</p>")]))
    assert '<pre>a &gt; b</pre><p class="small">1 &lt; 2</p></details>' in html
    assert "<details><summary>F&amp;</summary><p>f</p></details>" in html
    assert html.index("<p>f</p>") < html.index("Command and time")
    assert "<pre>a</pre></details>" in page(section(command="a"))
    assert "Command and time" not in page(section(details="d"))


def test_a_table_has_the_columns_of_all_rows_in_the_order_of_their_first():
    html = render_table([{"b": 1, "a<": 0.123456}, {"c": True, "b": None}])
    assert re.findall("<th>(.*?)</th>", html) == ["b", "a&lt;", "c"]
    cells = re.findall('<td class="number">(.*?)</td>', html)
    assert cells == ["1", "0.1235", "—", "—", "—", "yes"]
    assert html.startswith('<div class="wide">')
    assert "<table>" in page(section(table=[{"a": 1}])) and "<table>" not in page(section())


def test_numbers_have_four_digits_and_whole_numbers_all():
    values = (123456.0, 0.00001234567, 123456, False, "a")
    assert [*map(format_number, values)] == ["1.235e+05", "1.235e-05", "123456", "no", "a"]


def test_a_paragraph_of_markdown_becomes_code_bold_text_powers_and_words_without_links():
    text = "**No** a < b with `--x^2 **` and d' ~ d^p, n^14; see [the page](a.md) of `y`, 2 ^ 3"
    assert render_inline(text) == (
        "<b>No</b> a &lt; b with <code>--x^2 **</code> and d&#x27; ~ d<sup>p</sup>, "
        "n<sup>14</sup>; see the page of <code>y</code>, 2 ^ 3"
    )
