"""The list of statements: complete, and in agreement with the experiments."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from statement_dates import KEPT, REWORDINGS, dates_of, under_old_dates

from experiments.reproducing.statements_page import COLUMNS, PAGE, at_full_size, known_answers, page
from experiments.shell import statements
from experiments.shell.experiment import experiments_of
from experiments.shell.statements import STATEMENTS
from rank_collapse.report.claims import ANSWERS, FINDING, MORE_THAN_HALF


def row(key, answer, sizes="paper", date="2026-11-24"):
    return dict(zip(COLUMNS, (key, answer, sizes, date, "within: x"), strict=True))


def test_the_page_is_the_table_with_its_answers():
    known = known_answers()
    assert page(known) == PAGE.read_text("utf-8"), "python tests/site_pages.py --write renews it"
    assert known.keys() <= STATEMENTS.keys()
    assert {r["answer"] for r in known.values()} <= {*ANSWERS, FINDING}
    text = page({"rate": row("rate", "holds in part"), "norm": row("norm", "holds")})
    assert "| **holds in part**<br>new seeds: holds | **rate** (theorems 2.2 and 2.3): " in text
    assert "| **holds**<br>confirmed | **norm** (section 3.3): " in text
    assert text.count("\n| **not run**") == len(STATEMENTS) - 2
    by_chance = 0.05 * sum(s.claimed is not None for s in STATEMENTS.values())
    assert f"{by_chance:.1f} statements of all" in text


def test_no_statistic_or_range_changes_under_an_old_date():
    kept, now = json.loads(KEPT.read_text()), dates_of(STATEMENTS)
    assert not under_old_dates(kept, now)
    assert kept == now, "PYTHONPATH=. python tests/statement_dates.py"
    for own in STATEMENTS.values():
        assert bool(own.changed) == (own.claimed is not None)
        assert not own.confirmed or own.confirmed[:10] >= own.changed[:10]
    assert all(STATEMENTS[key].statistic == texts["is"] for key, texts in REWORDINGS.items())
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
    assert (own.claimed is None) == own.source.startswith("found here")
    if own.claimed is not None:
        assert own.claimed[0] < own.claimed[1]
    assert own.each is None or own.claimed == MORE_THAN_HALF  # as the page says
    sources = (p.read_text() for p in Path(statements.__file__).parents[1].rglob("*.py"))
    with_key = [text for text in sources if re.search(rf'"{re.escape(key)}"', text)]
    assert len(with_key) > 1  # the list of statements, and an experiment


def test_answers_at_full_size_have_their_date():
    now = {
        "rate": row("rate", "holds in part", date="2026-11-23"),
        "norm": row("norm", "holds", "paper and quick"),
        "circle": row("circle", "holds", date="2000-01-01"),
        "width": row("width", FINDING),
    }
    assert at_full_size(now) == {
        "rate": "at full size, 2026-11-23: holds in part",
        "circle": "at full size, 2000-01-01, before its test changed: holds",
    }
