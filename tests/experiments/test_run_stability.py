"""The binary at tiny size, its numbers, and its errors."""

import csv
import json

import numpy as np
import pytest
from second_run import check_second_run

from experiments import run_stability
from experiments.shell import cli
from experiments.stability import measure, results

TINY = ["--designs=post,admin_const", "--depths=1,2,4", "--layer_depths=1,4", "--num_seeds=2"]
TINY += ["--d_model=8", "--num_heads=2", "--num_tokens=6", "--mlp=none", "--nolog_residual"]
TINY += ["--num_devices=1"]


def execute(*arguments):
    return cli.execute(run_stability.main, run_stability.FLAGS, arguments)


def test_writes_rows_figures_and_a_summary(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    assert execute(*TINY, f"--output_dir={folder}") == 0
    summary = json.loads((folder / "summary.json").read_text())
    post, admin = (summary["designs"][name] for name in ("post", "admin_const"))
    assert post["branches"] == [1, 2, 4] and summary["seeds"] == 2
    assert post["largest_row_error"] < 1e-5
    assert post["last_branch"] > admin["last_branch"] - 1e-6 > 0
    assert len(post["query_gradient_over_expected"]) == 4
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * (2 + 3 + 5)
    last = [r for r in rows if r["design"] == "post" and r["layer"] == r["depth"] == "4"]
    np.testing.assert_allclose(
        np.mean([float(r["change.random"]) for r in last]), post["change_random"][-1], rtol=1e-5
    )
    for name in run_stability.ENTRY.captions:
        assert (folder / "figures" / f"{name}.png").stat().st_size > 10_000
    claims = run_stability.ENTRY.claims(summary)
    assert len(claims) >= 2 and all(c.interval and c.seeds == 2 for c in claims)
    assert {c.verdict for c in claims} == {"undecided"}  # two seeds
    more = [c.verdict for c in run_stability.ENTRY.claims(summary | {"seeds": 9})]
    assert len(more) == len(claims)
    assert run_stability.ENTRY.compare(summary)
    assert "Exponents" in run_stability.ENTRY.reading(summary)
    monkeypatch.setattr(measure, "_of_group", lambda *a: pytest.fail("computed again"))
    check_second_run(lambda: execute(*TINY, f"--output_dir={folder}"), folder, capsys)


def test_layers_past_a_networks_own_change_nothing():
    """A network of 2 layers inside one of 4 is the one of 2: gains, and what is cut away."""
    options = cli.parse(run_stability.FLAGS, [*TINY, "--designs=pre,depth_scaled", "--mlp=relu"])
    for group in run_stability.groups_of(options, [2, 4]):
        short, long = group.cases
        assert (short.depth, long.depth, short.branches, long.branches) == (2, 4, 4, 8)
        skip, branch = (group.gains[name].mlp for name in ("skip", "branch"))
        np.testing.assert_array_equal(skip[0], [1, 1, 1, 1])
        assert np.all(branch[0, :2] > 0) and not branch[0, 2:].any() and branch[1].all()


def test_exponents_of_the_laws():
    n = np.array([12, 24, 48, 96])
    np.testing.assert_allclose(results.exponents(n, np.stack([3.0 * n, n**0.5])), [1, 0.5])
    laws = results.law_exponents(n)
    assert abs(laws["O(N)"] - 1) < 1e-9 and 0.2 < laws["O(log N)"] < 0.4 and laws["O(1)"] < 0.05


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--designs=nowhere", "design 'nowhere' is not one of"),
        ("--designs=", "--designs is empty"),
        ("--designs=admin", "--designs=admin has gains that a batch decides"),
        ("--depths=6", "--depths=6 is fewer than two depths"),
        ("--layer_depths=6,x", "--layer_depths=x is not a positive integer"),
        ("--num_heads=3", "num_heads=3 does not divide d_model=8"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, capsys, flag, message):
    assert execute(*TINY, flag, f"--output_dir={tmp_path / 'x'}") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
