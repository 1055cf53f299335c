"""The examples of docs/extending.md: each checklist is followed in a copy of the repository.

All steps together pass the tests that the checklist names; without one of them a test that it
names beside the file fails.
"""

import csv
import os
import subprocess
import sys
import tomllib
from types import ModuleType

import pytest

from experiments.lab import cli, read_run
from experiments.lab.folder import RunFolder
from experiments.verdicts.claims import Statement
from experiments.verdicts.statements import STATEMENTS
from tests.support.folders import REPOSITORY
from tests_docs.guide import copy_tree, make_change, read_checklist

# {section: the word in the ids of those cases of a table's tests that are of the example}
SECTIONS = {
    "A named attention variant": "relu",
    "A field of the configuration": "score_clip",
    "A measure": "measure",
    "A checkpoint family": "helium",
    "An experiment": "run_ranks",
}
# Tests with a case for each row of a table, of which the example is one.
ROW_TESTS = (
    "test_what_is_covered_is_right",
    "test_an_experiment_keeps_to_the_contract",
    "test_states_attentions_and_logits",
    "test_entries_are_those_of_transformers_and_absent_ones_its_defaults",
    "test_a_variant_is_what_its_paper_says",
    "test_a_number_is_a_placeholder_or_a_setting",
)
CHECKLISTS = {section: read_checklist(section) for section in SECTIONS}
STEPS = [
    pytest.param(section, index, id=f"{SECTIONS[section]}-{index}-{step.file}")
    for section, checklist in CHECKLISTS.items()
    for index, step in enumerate(checklist.steps)
]


def follow(tree, section, without=None):
    """Makes a copy of the repository with the steps of a section but one."""
    copy_tree(tree)
    for index, step in enumerate(CHECKLISTS[section].steps):
        if index != without:
            make_change(tree, step)
    return tree


def run_python(tree, *arguments):
    """Runs Python in a copy of the repository; returns (exit code, output).

    Messages that list all names are not compared, since the page says to write them anew.
    """
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(tree)}
    environment["REWRITE_GOLDEN"] = "1"
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def run_tests(tree, section, tests):
    """Runs tests (file, function) in a copy, and stops at the first that fails."""
    words = []
    for _, name in tests:
        is_of_row = name in ROW_TESTS
        words.append(f"({name} and {SECTIONS[section]})" if is_of_row else name)
    files = sorted({file for file, _ in tests})
    return run_python(
        tree, "-m", "pytest", "-n", "0", "-x", "-m", "", "-k", " or ".join(words), *files
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_the_steps_of_a_checklist_fit_the_files(section, tmp_path):
    checklist = CHECKLISTS[section]
    tree = follow(tmp_path / "tree", section)
    for step in checklist.steps:
        if step.file.endswith((".py", ".pyi")):
            compile((tree / step.file).read_text("utf-8"), step.file, "exec")
        assert checklist.tests[step.file], f"no test is named beside {step.file}"


def test_every_test_that_the_page_names_exists():
    named = {
        pair
        for checklist in CHECKLISTS.values()
        for pairs in checklist.tests.values()
        for pair in pairs
    }
    missing = [
        (file, name)
        for file, name in named
        if f"def {name}(" not in (REPOSITORY / file).read_text("utf-8")
    ]
    assert len(named) > 20 and missing == []


@pytest.mark.full
@pytest.mark.parametrize("section", SECTIONS)
def test_all_steps_of_a_checklist_pass_its_tests(section, tmp_path):
    tree = follow(tmp_path / "tree", section)
    code, output = run_python(tree, "-m", "tests_docs.site_pages", "--write")
    assert code == 0, output
    checklist = CHECKLISTS[section]
    new_tests = {
        (s.file, "test_") for s in checklist.steps if s.is_new and s.file.startswith("tests/")
    }
    named = {pair for pairs in checklist.tests.values() for pair in pairs}
    named.add(("tests_docs/test_site.py", "test_made_parts_are_current"))
    for tests in filter(None, (sorted(named), sorted(new_tests))):
        code, output = run_tests(tree, section, tests)
        assert code == 0, output


@pytest.mark.full
@pytest.mark.parametrize(("section", "index"), STEPS)
def test_without_a_step_a_test_that_the_page_names_fails(section, index, tmp_path):
    tree = follow(tmp_path / "tree", section, without=index)
    tests = CHECKLISTS[section].tests[CHECKLISTS[section].steps[index].file]
    code, output = run_tests(tree, section, tests)
    assert code in (1, 2), output  # a test failed, or its file cannot be imported


@pytest.fixture
def ranks(monkeypatch):
    """The page's experiment in this process, with its statement registered."""
    steps = CHECKLISTS["An experiment"].steps
    (text,) = (step.text for step in steps if step.file == "experiments/run_ranks.py")
    (hunk,) = (step.text for step in steps if step.file.endswith("statements.toml"))
    added = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] == "+")
    for key, fields in tomllib.loads(added).items():
        monkeypatch.setitem(STATEMENTS, key, Statement(**fields))
    module = ModuleType("experiments.run_ranks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, "experiments/run_ranks.py", "exec"), module.__dict__)
    return module


def test_the_experiment_of_the_page_runs_and_is_read_again(ranks, tmp_path, monkeypatch):
    tiny = ranks.EXPERIMENT.presets["tiny"]
    arguments = [*tiny, "--weight_scale=0.5,1", "--jobs=1", f"--output_dir={tmp_path}"]
    assert cli.execute(ranks.main, ranks.FLAGS, arguments) == 0
    table = (tmp_path / "results.csv").read_bytes()
    rows = list(csv.DictReader(table.decode().splitlines()))
    assert len(rows) == 2 * 2 * 2  # scales, seeds, the input and a layer
    assert all(1 <= float(row["effective_rank"]) <= 4 for row in rows)
    figure = tmp_path / "figures" / "ranks.png"
    figure.unlink()
    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("measured again"))
    assert cli.execute(ranks.main, ranks.FLAGS, arguments) == 0
    assert figure.exists() and (tmp_path / "results.csv").read_bytes() == table
    assert [*ranks.EXPERIMENT.figures] == ["ranks"] and all(ranks.EXPERIMENT.figures.values())
    claims = read_run(ranks, tmp_path).claims
    assert {row.setting for row in claims} == {"weight scale 0.5", "weight scale 1"}
