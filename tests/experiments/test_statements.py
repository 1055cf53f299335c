"""The list of statements: complete, and in agreement with the experiments."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from statement_dates import KEPT, dates_of, under_old_dates

from experiments.shell import statements
from experiments.shell.experiment import experiments_of
from experiments.shell.statements import (
    NOT_RUN,
    PAGE,
    STATEMENTS,
    answered,
    at_full_size,
    page,
)

TRAINED = ("run_sort", "run_convex_hull", "run_memorization")


def test_the_page_is_the_table_with_its_answers():
    text = PAGE.read_text("utf-8")
    now = answered(text)
    assert page(now) == text and now.keys() == STATEMENTS.keys()
    other = dict.fromkeys(STATEMENTS, NOT_RUN) | {"rate": "**holds** (sizes “quick”): within: x."}
    assert answered(page({"rate": other["rate"]})) == other
    by_chance = 0.05 * sum(s.claimed is not None for s in STATEMENTS.values())
    assert f"on {by_chance:.1f} statements of all" in text


def test_no_statistic_or_range_changes_under_an_old_date():
    kept, now = json.loads(KEPT.read_text()), dates_of(STATEMENTS)
    assert not under_old_dates(kept, now)
    assert kept == now, "PYTHONPATH=. python tests/statement_dates.py"
    for own in STATEMENTS.values():
        assert bool(own.changed) == (own.claimed is not None)
        assert not own.confirmed or own.confirmed[:10] >= own.changed[:10]
    rate = STATEMENTS["rate"]
    wider = replace(rate, claimed=(2.0, 3.5))
    assert under_old_dates(kept, dates_of({"rate": wider})) == ["rate"]
    later = replace(wider, changed="2999-01-01, abcdef0")
    assert not under_old_dates(kept, dates_of({"rate": later}))
    assert under_old_dates(kept, dates_of({"rate": replace(rate, statistic="rate")})) == ["rate"]


@pytest.mark.parametrize("key", STATEMENTS)
def test_every_statement_says_what_decides_it(key):
    own = STATEMENTS[key]
    assert own.source and own.text.endswith(".") and own.statistic and own.experiments
    assert set(own.experiments) <= set(experiments_of())
    assert (own.claimed is None) == (own.source.startswith("found here")) == (not own.fails)
    if own.claimed is not None:
        assert own.claimed[0] < own.claimed[1]
    for name in own.experiments:  # whose source has the key
        folder = {
            "check_bounds": "bounds",
            "run_architectures": "architectures",
            "run_phase": "phase",
        }.get(name, "")
        folder = "trained" if name in TRAINED else folder
        files = [Path(statements.__file__).parents[1] / f"{name}.py"]
        files += sorted((files[0].parent / folder).glob("*.py")) if folder else []
        if name == "run_stability":
            files.append(files[0].parent / "stability" / "networks.py")
        assert any(re.search(rf'"{re.escape(key)}"', f.read_text()) for f in files), name


def test_the_committed_answers_are_of_full_size_and_dated():
    text = PAGE.read_text("utf-8")
    assert at_full_size(text).keys() == {
        key for key, now in answered(text).items() if "**" in now and "“paper”" in now
    }
    now = {
        "rate": "**holds in part** (sizes “paper”, 2026-11-23): within: x.",
        "norm": "**holds** (sizes “paper and quick”, 2026-11-23): within: x.",
        "circle": "**holds** (sizes “paper”, 2000-01-01): within: x.",
    }
    assert at_full_size(page(now)) == {
        "rate": "at full size, 2026-11-23: holds in part",
        "circle": "at full size, 2000-01-01, before its test changed: holds",
    }
