"""Lipschitz constants of attention: power iteration against singular values, powers, bad input."""

import pytest

from experiments import run_lipschitz
from experiments.trained.opened_networks import UNTRAINED
from experiments.trained.packages import PACKAGES
from experiments.verdicts import STATEMENTS
from tests.support.runs import check_mistake, result_of, rows, run


def test_tables_have_what_was_measured(tmp_path):
    assert run(run_lipschitz, run_lipschitz.EXPERIMENT.presets["tiny"], tmp_path) == 0
    results, networks = result_of(run_lipschitz, tmp_path)
    assert [network.label for network in networks] == [*UNTRAINED]
    table = rows(tmp_path)
    assert len(table) == 2 * 3 * 3 * 3  # networks, texts, layers, numbers of tokens
    row = next(r for r in table if r["network"] == "llama" and r["tokens"] == "6")
    place = {"network": "llama", "seed": int(row["seed"]), "layer": int(row["layer"])}
    expected = results.largest.sel(tokens=6, **place).item()
    assert float(row["largest"]) == pytest.approx(expected) and expected > 0


def test_registered_networks_are_those_of_the_packages():
    assert {*STATEMENTS["lipschitz growth"].settings} == {*PACKAGES}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=8,16"], "--tokens needs three numbers or more"),
        (["--networks=nothing"], "--networks=nothing is not one of"),
    ],
)
def test_what_is_refused(flags, message, tmp_path, capsys):
    check_mistake(run_lipschitz, ["--untrained", *flags], message, tmp_path, capsys)
