"""Lipschitz constants of attention: power iteration against singular values, powers, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from experiments import run_lipschitz
from experiments.trained.opened_networks import UNTRAINED, Network
from experiments.trained.packages import PACKAGES
from experiments.verdicts import STATEMENTS
from tests.support.runs import check_mistake, parsed, result_of, rows, run


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


def test_texts_are_as_long_as_the_longest_and_skipped_ones_are_loaded_first(monkeypatch):
    asked = []

    def load_networks(options, num_texts):
        asked.append((options.max_tokens, num_texts))
        return ["a", "b"]

    monkeypatch.setattr(run_lipschitz, "load_networks", load_networks)
    monkeypatch.setattr(run_lipschitz, "skip_texts", lambda network, count: (network, count))
    flags = ("--num_texts=3", "--skip_texts=2", "--tokens=16,64,8")
    opened = run_lipschitz.open_networks(parsed(run_lipschitz, *flags))
    assert asked == [(64, 5)] and opened == [("a", 2), ("b", 2)]
    for tokens in ("8,16", "8,16,16"):
        options = parsed(run_lipschitz, f"--tokens={tokens}")
        with pytest.raises(ValueError, match="--tokens needs three numbers or more"):
            run_lipschitz.open_networks(options)


def test_every_number_of_tokens_is_measured_once_and_has_its_own_part(monkeypatch):
    asked, networks = [], [Network(name, None, {"x": [0] * 3}, None) for name in "ab"]

    def extend_part(folder, part, count, compute):
        asked.append((part, count, compute.args[0].label, compute.args[1]))
        return {}

    def make_dataset(arrays, tokens):
        values = np.zeros((len(arrays), 3))
        return xr.Dataset({"value": (("tokens", "seed"), values)}, {"tokens": tokens})

    monkeypatch.setattr(run_lipschitz, "extend_part", extend_part)
    monkeypatch.setattr(run_lipschitz, "make_dataset", make_dataset)
    options, folder = parsed(run_lipschitz, "--tokens=8,4,8,16"), SimpleNamespace(log=print)
    results = run_lipschitz.measure(options, networks, folder)
    assert asked == [(f"{name}, {n} tokens", 3, name, n) for name in "ab" for n in (4, 8, 16)]
    assert results.tokens.values.tolist() == [4, 8, 16]
    assert results.network.values.tolist() == ["a", "b"]
