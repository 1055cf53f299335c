"""The site: pages that repeat the code are as the code is, and nothing is left out of them."""

import inspect
import re

import pytest
import site_pages
from conftest import REPOSITORY
from site_pages import API, DOCS, made, public

import rank_collapse as rc
from experiments.shell.experiment import experiments_of

PAGES = sorted(DOCS.rglob("*.md"))
NAV = (REPOSITORY / "mkdocs.yml").read_text("utf-8")


@pytest.mark.parametrize("path", [p for p in PAGES if "<!-- made:" in p.read_text("utf-8")])
def test_made_parts_are_current(path):
    text = path.read_text("utf-8")
    assert made(text) == text, "python tests/site_pages.py --write renews it"


def test_a_made_part_follows_the_code(monkeypatch):
    page = "a\n<!-- made: measures -->\nold\n<!-- end -->\nb\n"
    monkeypatch.setattr(site_pages, "MEASURES", {"residual_ratio": rc.MEASURES["residual_ratio"]})
    lines = made(page).splitlines()
    assert lines[:2] == ["a", "<!-- made: measures -->"] and lines[-2:] == ["<!-- end -->", "b"]
    assert len(lines) == 7 and lines[4].startswith("| `residual_ratio` | tokens | ‖res(X)‖/‖X‖")


def test_every_experiment_has_a_page():
    pages = {p.stem for p in (DOCS / "experiments").glob("*.md")} - {"index"}
    assert pages == set(experiments_of())
    for page in pages:
        text = (DOCS / "experiments" / f"{page}.md").read_text("utf-8")
        assert "**The paper.**" in text and "**What came out.**" in text
        assert f"python -m experiments.{page}" in text


def test_every_page_is_in_the_contents():
    named = set(re.findall(r"[\w/]+\.md", NAV))
    assert named == {str(p.relative_to(DOCS)) for p in PAGES}


def test_every_public_name_is_in_the_api():
    shown = {name for page in API for name in public(page)}
    objects = {name: getattr(rc, name) for name in rc.__all__}
    alone = {n for n, o in objects.items() if getattr(o, "__module__", "") not in shown}
    names = {n for n in alone if not inspect.ismodule(objects[n])}
    assert len(names) > 80 and names - {full.rpartition(".")[2] for full in shown} == set()
    assert "rank_collapse.network.surgery" in shown
