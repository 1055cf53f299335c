"""The pages are short, and every page is two links away from the README and from index.md."""

import re

import pytest
from two_processes import REPOSITORY

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
GENERATED = {DOCS / name for name in ("results.md", "statements.md", "columns.md")}
MADE = re.compile(r"<!-- made: \w+ -->.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.−-])[−-]?\d[\d.,]*(?:e-?\d+)?")
MOST_LINES, MOST_WORDS, MOST_NUMBERS = 110, 20_000, 2.0  # of README; of docs; per 100 words


def list_pages():
    """Lists the pages and notebooks of the site."""
    return [*DOCS.rglob("*.md"), *DOCS.glob("*.ipynb")]


def follow_links(page):
    """Returns the pages and notebooks that a page links to."""
    targets = LINK.findall(CODE.sub("", page.read_text("utf-8")))
    paths = {(page.parent / target).resolve() for target in targets if "://" not in target}
    return paths & {path.resolve() for path in list_pages()}


@pytest.mark.parametrize("start", [README, DOCS / "index.md"], ids=lambda page: page.name)
def test_every_page_is_two_links_away(start):
    near = follow_links(start)
    reached = {start.resolve(), *near}.union(*(follow_links(p) for p in near if p.suffix == ".md"))
    unreached = [path.name for path in list_pages() if path.resolve() not in reached]
    assert unreached == []


def count_words(page):
    """Counts the words that a page has by hand: as `wc -w`, without what the code makes."""
    return len(MADE.sub("", page.read_text("utf-8")).split())


def test_the_pages_are_short():
    pages = {page for page in DOCS.rglob("*.md") if page.parent != DOCS / "api"} - GENERATED
    words = {page.name: count_words(page) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])


def count_numbers(text):
    """Counts numbers and words of the prose of a page: without code, tables and pictures."""
    prose = "\n".join(
        line for line in CODE.sub("", text).splitlines() if not line.startswith(("|", "![", ">"))
    )
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return len(NUMBER.findall(prose)), len(prose.split())


def test_the_readme_is_short():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    numbers, words = count_numbers(text)
    assert 100 * numbers <= MOST_NUMBERS * words
    for row in re.findall(r"^\|(?!---).*\|$", text.partition("## Results")[2], re.MULTILINE)[1:]:
        assert len(NUMBER.findall(row.split("|")[2])) <= 2, row
