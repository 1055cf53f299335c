"""Which run the rows of docs/statements.md say they are of."""

import json
from types import SimpleNamespace

import pytest

from experiments.reproducing import statements_page
from experiments.verdicts import claims, mean_row
from experiments.verdicts.statements import STATEMENTS

ROW = mean_row("rate", "a setting", [3.0, 3.1, 2.9])


@pytest.mark.parametrize(
    ("flags", "first_seed"),
    [
        ({"seed": 1000, "first_seed": 0}, 1000),
        ({"seed": 0, "first_seed": 2000}, 2000),
        ({"seed": 7}, 7),
        ({}, ""),
    ],
)
def test_rows_say_their_first_seed_and_command(flags, first_seed, tmp_path, monkeypatch):
    """With `seed` keys are of another stream, with `first_seed` further seeds of the same."""
    config = {
        "config": {"experiment": "collapse", **flags},
        "execution": {
            "command": "python -m experiments.run_collapse --depth=2 --output_dir=/x --run_name=y"
        },
        "environment": {"git": "a1" * 20},
        "layout": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        statements_page, "read_run", lambda module, folder: SimpleNamespace(claims=[ROW])
    )
    ((row, run),) = statements_page.read_run_rows(tmp_path)
    assert row is ROW
    assert run["experiment"] == "run_collapse" and run["first_seed"] == first_seed
    assert run["command"] == "python -m experiments.run_collapse --depth=2"
    assert run["commit"].startswith("a1a1")


def test_fresh_seeds_are_said_to_be_fresh():
    origin = {"experiment": "run_sort", "commit": "b2" * 20}
    rows = [origin | {"first_seed": seed} for seed in ("3000", "4000", "")]
    text = statements_page.describe_origin(rows)
    assert "from 3000 on" in text and "one run, of commit b2b2b2b2" in text
    second = {"experiment": "run_lens", "commit": "c3" * 20, "first_seed": "3000"}
    text = statements_page.describe_origin([*rows, second])
    assert text == (
        "The rows are from runs of the commits b2b2b2b2, c3c3c3c3, all with seeds from 3000 on."
    )
    changed = second | {"commit": f"{'c3' * 20}-dirty"}
    text = statements_page.describe_origin([*rows, changed])
    assert text.startswith("The run with the registered seeds is still to come")
    stale = statements_page.describe_origin([*rows, origin | {"first_seed": "1000"}])
    assert stale.startswith("The run with the registered seeds is still to come")


def test_a_row_that_no_run_has_names_no_run():
    """Each of the others names its own run."""
    key, first, second, third = find_statement_with_settings()
    runs = [
        {"experiment": f"run_{name}", "first_seed": seed} for name, seed in (("a", 1), ("b", 2))
    ]
    rows = [mean_row(key, setting, [3.0, 3.1, 2.9]) for setting in (first, third)]
    judged = list(statements_page.judge_run_rows(list(zip(rows, runs, strict=True))))
    by_setting = {row["setting"]: (row["experiment"], row["first_seed"]) for row in judged}
    assert by_setting[first] == ("run_a", 1) and by_setting[third] == ("run_b", 2)
    assert by_setting[second] == ("", "")
    missing = next(row for row in judged if row["setting"] == second)
    assert missing["draws"] == 0 and missing["estimate"] is None


def find_statement_with_settings():
    """Returns a registered statement's key and three of its settings."""
    return next((k, *s.settings[:3]) for k, s in STATEMENTS.items() if len(s.settings) >= 3)


def test_the_protocol_names_the_level_at_which_statements_are_judged(monkeypatch):
    """The one of `claims`, half of it on each side; the count of errors by chance is of it, too."""
    assert statements_page.ERROR == claims.ERROR
    for error, whole, side in ((claims.ERROR, "5 %", "2.5 %"), (0.01, "1 %", "0.5 %")):
        monkeypatch.setattr(statements_page, "ERROR", error)
        text = " ".join(statements_page.describe_protocol().split())
        assert f"probability of at most {whole}, whenever" in text
        assert f"correction at {side} on each side" in text
        sentence = statements_page.count_sentence(dict.fromkeys(map(str, range(60)), claims.HOLDS))
        assert f"At most {60 * error:.1f} of these answers" in sentence
