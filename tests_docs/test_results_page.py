"""Results on the pages are filled in from the tables of one run of a commit that there is."""

import csv
import io
import re
import subprocess

import pytest

from experiments.lab.experiment import describe_experiment, list_experiments
from experiments.reproducing import results_page
from experiments.reproducing.filling import (
    COLUMNS,
    INTERVAL,
    PLACEHOLDER,
    RANGE,
    Texts,
    fill,
    find_missing,
    read_numbers,
    read_settings,
    read_texts,
    split_placeholder,
)
from experiments.reproducing.sections import REGISTERED, read_flag_values
from experiments.verdicts import PROTOCOL
from tests.support.folders import REPOSITORY

DOCS = REPOSITORY / "docs"
TEXTS = read_texts()
NUMBER = re.compile(r"(?<![\w.^/])\d[\d.,]*(?:e-?\d+)?(?!\w)")
RUNS = DOCS / results_page.RUNS  # there is none before a run of this version
WRITTEN = list(csv.DictReader(io.StringIO(RUNS.read_text("utf-8")))) if RUNS.exists() else []
NAMES = sorted({row["run"].partition("/")[0] for row in WRITTEN})


def list_literals(text):
    """Lists the numbers of a text that are no placeholders, nor in code."""
    plain = re.sub(r"`[^`]*`", "", PLACEHOLDER.sub("", text))
    return [number.rstrip(".,") for number in NUMBER.findall(plain)]


@pytest.mark.parametrize("name", list_experiments())
def test_a_number_is_a_placeholder_or_a_setting(name):
    texts = TEXTS[name]
    literals = {*list_literals(texts.result), *list_literals(texts.table)}
    assert literals <= {*texts.settings}
    for placeholder in PLACEHOLDER.findall(texts.result + texts.table):
        _, column, form = split_placeholder(placeholder)
        assert column in (*COLUMNS, INTERVAL, RANGE)
        format(1.5, form.removeprefix("10^"))
    page = (DOCS / "experiments" / f"{name}.md").read_text("utf-8")
    assert page.count("**Result.**") == 1
    assert page.count("<!-- filled -->") == bool(texts.table)


def test_no_text_is_of_no_experiment():
    assert set(TEXTS) == set(list_experiments())


@pytest.mark.parametrize("name", NAMES)
def test_pages_say_what_the_tables_have(name):
    numbers = read_numbers((DOCS / "results" / f"{name}.csv").read_bytes())
    numbers = {**numbers, **read_settings(read_flag_values(name, REGISTERED))}
    seeds = [int(row["seed"] or PROTOCOL.first_seed) for row in WRITTEN]
    if min(seeds) < PROTOCOL.first_seed:
        pytest.skip("the run on the registered seeds, which fills the pages, is still to come")
    assert not find_missing(TEXTS[name].result + TEXTS[name].table, numbers)
    filled = Texts(*(fill(text, numbers).strip() for text in TEXTS[name][:2]))
    page = (DOCS / "experiments" / f"{name}.md").read_text("utf-8")
    assert results_page.fill_page(page, filled) == page
    results = (DOCS / "results.md").read_text("utf-8")
    assert f"**Result.** {filled.result}".replace("](../", "](") in results
    captions = describe_experiment(name).figures.values()
    (section,) = [s for s in results.split("\n## ") if f"(results/{name}_0.png)" in s]
    assert any(caption in section for caption in captions)


@pytest.mark.parametrize(
    "commit", sorted({commit for row in WRITTEN for commit in row["commit"].split(" and ")})
)
def test_the_commit_of_the_run_is_in_the_repository(commit):
    git = ["git", "-C", str(REPOSITORY)]
    shallow = [*git, "rev-parse", "--is-shallow-repository"]
    answer = subprocess.run(shallow, capture_output=True, text=True, check=False)
    if answer.stdout.strip() != "false":
        pytest.skip("a clone without history")
    assert re.fullmatch(r"[0-9a-f]{40}", commit), "the tree of the run had changes"
    process = subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], check=False)
    assert process.returncode == 0
