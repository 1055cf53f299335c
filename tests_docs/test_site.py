"""The site: pages that repeat the code are as the code is, and nothing is left out of them."""

import ast
import inspect
import json
import re

import pytest

import rank_collapse as rc
from experiments.lab.experiment import list_experiments
from experiments.reproducing import sections
from tests.support.folders import REPOSITORY
from tests_docs import site_pages
from tests_docs.site_pages import API, DOCS, WHOLE, add_badge, list_public, renew_blocks, repository

PAGES = sorted(DOCS.rglob("*.md"))
EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
MEASURED = ("benchmarks", "checkpoints", "monitoring", "sweeps", "accelerators", "limits")
NAV = (REPOSITORY / "mkdocs.yml").read_text("utf-8")


@pytest.mark.parametrize("path", [p for p in PAGES if "<!-- made:" in p.read_text("utf-8")])
def test_made_parts_are_current(path):
    text = path.read_text("utf-8")
    assert renew_blocks(text) == text, "site_pages --write renews it"


def test_a_made_part_follows_the_code(monkeypatch):
    page = "a\n<!-- made: measures -->\nold\n<!-- end -->\nb\n"
    monkeypatch.setattr(site_pages, "MEASURES", {"residual_ratio": rc.MEASURES["residual_ratio"]})
    lines = renew_blocks(page).splitlines()
    assert lines[:2] == ["a", "<!-- made: measures -->"] and lines[-2:] == ["<!-- end -->", "b"]
    assert len(lines) == 7 and lines[4].startswith("| `residual_ratio` | tokens | ‖res(X)‖/‖X‖")


ADDRESS = "https://github.com/owner/rank-collapse"


@pytest.mark.parametrize("notebook", sorted(DOCS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_opens_in_colab_when_there_is_an_address(notebook):
    text = notebook.read_text("utf-8")
    assert add_badge(notebook, repository()) == text, "site_pages --write renews it"
    first, *cells = json.loads(add_badge(notebook, ADDRESS))["cells"]
    (path,) = re.findall(
        r"colab.research.google.com/github/owner/rank-collapse/blob/main/([^)]+)",
        first["source"][0],
    )
    assert REPOSITORY / path == notebook
    assert cells == [c for c in json.loads(text)["cells"] if c["id"] != "colab"]


def test_every_experiment_has_a_page():
    pages = {p.stem for p in (DOCS / "experiments").glob("*.md")} - {"index"}
    assert pages == set(list_experiments())
    for page in pages:
        text = (DOCS / "experiments" / f"{page}.md").read_text("utf-8")
        assert re.search(r"\*\*The papers?\.\*\*", text)
        assert re.search(rf"python -m experiments\.({page}|reproduce .*--only={page})\b", text)
        came_out = sections.read_result(page)
        links = re.findall(r"\]\(([^)#]+)", came_out)
        assert all((DOCS / link).exists() for link in links), "links in it begin with ../"


def find_without_command(text):
    """Finds sections with a table of numbers, but without the command that made them.

    Tables between "filled" and "end" are written by the command on results.md.
    """
    text = re.sub(r"<!-- filled -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    titles = []
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        rows = re.findall(r"^\|.*\d.*\|.*\d.*\|.*\d.*\|$", section, re.MULTILINE)
        if len(rows) > 1 and not re.search(r"python -m|no command repeats it", section):
            titles.append(section.partition("\n")[0])
    return titles


def test_tables_of_measured_numbers_have_their_command():
    rows = "| 1 | 2 | 3 |\n| 4 | 5 | 6 |\n"
    assert find_without_command(f"## A\n{rows}## B\n`python -m experiments.b`\n{rows}") == ["A"]
    pages = [*(DOCS / "experiments").glob("*.md"), *(DOCS / f"{n}.md" for n in MEASURED)]
    assert [name for page in pages for name in find_without_command(page.read_text("utf-8"))] == []


def test_every_page_is_in_the_contents():
    listed = set(re.findall(r"[\w/]+\.md", NAV))
    assert listed == {str(p.relative_to(DOCS)) for p in PAGES}


def test_every_variant_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "variants.md").read_text("utf-8"), re.MULTILINE)
    assert [name for name in rc.network.VARIANTS if name not in rows] == []


# As the list of supported models calls them.
CALLED = {
    "xlm-roberta": "XLM-R",
    "gpt_neox": "GPT-NeoX",
    "gemma3_text": "Gemma 3",
    "dinov2": "DINOv2 with and without registers",
    "dinov2_with_registers": "DINOv2 with and without registers",
    "whisper": "the encoder of Whisper",
}


def test_every_family_is_in_the_list():
    """By its `model_type`, but for case, spaces and hyphens, as one entry of a list."""
    page = (DOCS / "checkpoints.md").read_text("utf-8")
    models = page.partition("## Supported models")[2].partition("\n\nTests")[0]

    def simplify(name):
        return re.sub(r"[\s_-]", "", name.lower())

    listed = {simplify(name) for name in re.split(r"[,;:()]|\band\b|\*", models)}
    listed |= {simplify(name) for name in CALLED.values() if name in models}
    names = [n for n in rc.pretrained.FAMILIES if simplify(CALLED.get(n, n)) not in listed]
    assert names == []


def test_every_public_name_is_in_the_api():
    documented = {name for page in API for name in list_public(page)}
    names = {name for name in rc.__all__ if not inspect.ismodule(getattr(rc, name))}
    assert names - {full.rpartition(".")[2] for full in documented} == set()
    assert "rank_collapse.network.surgery" in documented


def read_examples(page):
    """Reads the examples of one page."""
    return EXAMPLE.findall((DOCS / f"{page}.md").read_text("utf-8"))


def list_definitions(module):
    """Lists the public functions and classes of one file of the library."""
    path = REPOSITORY / "rank_collapse" / f"{module.replace('.', '/')}.py"
    nodes = ast.parse(path.read_text("utf-8")).body
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("page", API)
def test_every_public_name_has_an_example(page):
    nodes = [node for block in read_examples(f"api/{page}") for node in ast.walk(ast.parse(block))]
    used = {n.id for n in nodes if isinstance(n, ast.Name)}
    used |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    names = {full.rpartition(".")[2] for full in list_public(page)}
    for module in WHOLE.get(page, ()):
        names -= {module.rpartition(".")[2]}
        names |= list_definitions(module)
    assert names - used == set()


@pytest.mark.parametrize("page", [*(f"api/{page}" for page in API), "variants"])
def test_examples_run(page, tmp_path, monkeypatch):
    """From the first block of a page to its last; those of packages that are absent are skipped."""
    monkeypatch.chdir(tmp_path)
    scope, blocks = {}, read_examples(page)
    for block in blocks:
        for name in re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE):
            pytest.importorskip(name)
        exec(compile(block, f"examples of {page}", "exec"), scope)
    assert blocks
