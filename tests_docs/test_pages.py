"""Every page is two links away from the README and from index.md; the README has few numbers."""

import re

import pytest

from tests.support.folders import REPOSITORY

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
NUMBER = re.compile(r"(?<![\w.−-])[−-]?\d[\d.,]*(?:e-?\d+)?")
MOST_NUMBERS = 2.0  # per 100 words of the README


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


def count_numbers(text):
    """Counts numbers and words of the prose of a page: without code, tables and pictures."""
    prose = "\n".join(
        line for line in CODE.sub("", text).splitlines() if not line.startswith(("|", "![", ">"))
    )
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return len(NUMBER.findall(prose)), len(prose.split())


def test_the_readme_has_few_numbers():
    text = README.read_text("utf-8")
    numbers, words = count_numbers(text)
    assert 100 * numbers <= MOST_NUMBERS * words
    for row in re.findall(r"^\|(?!---).*\|$", text.partition("## Results")[2], re.MULTILINE)[1:]:
        assert len(NUMBER.findall(row.split("|")[2])) <= 2, row
