"""check_profiles: a tiny run, what counts as wrong, and bad input."""

import json

import numpy as np
import pytest

from experiments import check_profiles
from experiments.checks import profiles
from experiments.shell import cli


def execute(folder, *arguments):
    arguments = [f"--output_dir={folder}", "--workers=1", *arguments]
    return cli.execute(check_profiles.main, check_profiles.FLAGS, arguments)


def test_a_run_counts_every_draw_and_is_made_again_from_its_arrays(tmp_path, monkeypatch):
    arguments = ("--cases=1 head", "--num_draws=3", "--max_digits=300")
    assert execute(tmp_path, *arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for method in profiles.METHODS:
        assert sum(summary[f"{method}/{verdict}"] for verdict in profiles.VERDICTS) == 3
    assert summary["certified/wrong"] == summary["pairs64/wrong"] == 0
    (tmp_path / "results.csv").unlink()
    monkeypatch.setattr(profiles, "compare", lambda *a, **k: pytest.fail("computed again"))
    assert execute(tmp_path, *arguments) == 0
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * len(profiles.METHODS)


def test_verdicts():
    nan = np.nan
    proved = np.array([[1.0, -5.0, -2e4]] * 5)
    proved[1, 2] = nan
    profile = proved + 0.009
    profile[1, 2] = -2e4
    profile[2, 1:] = nan
    profile[3, 2] -= 21  # a thousandth of 2e4 is 20
    profile[4] = 1.0, -5.011, nan
    found = [profiles.VERDICTS[v] for v in profiles.verdicts(profile, proved)]
    assert found == ["right", "unproved", "refused", "wrong", "wrong"]


def test_more_draws_leave_the_others_as_they_are():
    case, name = profiles.CASES["skip, 2 heads, 6 tokens"], "skip, 2 heads, 6 tokens"
    few, many = (profiles.draw(case, check_profiles.case_keys(0, name, n)) for n in (2, 3))
    np.testing.assert_array_equal(few[1], many[1][:2])
    np.testing.assert_array_equal(few[2].skip_gain, many[2].skip_gain[:2])


def test_a_kind_that_does_not_exist_is_named(tmp_path, capsys):
    assert execute(tmp_path, "--cases=perceptron") == 2
    assert "perceptron" in capsys.readouterr().err
