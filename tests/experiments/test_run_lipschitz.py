"""Lipschitz constants of attention: power iteration against singular values, powers, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from experiments import run_lipschitz
from experiments.trained.opened_networks import UNTRAINED, Network
from experiments.trained.packages import PACKAGES
from experiments.verdicts import STATEMENTS
from tests.support.closeness import assert_close
from tests.support.counted import record_progress
from tests.support.golden_runs import check_arrays
from tests.support.runs import arrays, check_mistake, parsed, result_of, rows, run


def test_tables_have_what_was_measured(tmp_path):
    assert run(run_lipschitz, run_lipschitz.EXPERIMENT.presets["tiny"], tmp_path) == 0
    check_arrays("run_lipschitz", arrays(tmp_path))
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
    asked, made = [], []
    networks = [Network(name, None, {"x": [0] * 3}, None) for name in "ab"]

    def extend_part(folder, part, count, compute):
        asked.append((part, count, compute.args[0].label, compute.args[1]))
        return {}

    def make_dataset(arrays, tokens):
        depth = len(made) + 1  # the second network is deeper
        made.append(depth)
        values = np.full((len(arrays), 3, depth), float(depth))
        axes = {"tokens": tokens, "seed": range(3), "layer": range(1, depth + 1)}
        return xr.Dataset({"value": ([*axes], values)}, axes)

    monkeypatch.setattr(run_lipschitz, "extend_part", extend_part)
    monkeypatch.setattr(run_lipschitz, "make_dataset", make_dataset)
    options, folder = parsed(run_lipschitz, "--tokens=8,4,8,16"), SimpleNamespace(log=print)
    events = record_progress(monkeypatch, run_lipschitz)
    results = run_lipschitz.measure(options, networks, folder)
    activities = {
        name: [(f"measuring {name}, {n} tokens", print) for n in (4, 8, 16)] for name in "ab"
    }
    steps = *activities["a"], "step", *activities["b"], "step"
    assert events == [(2, "constants", print), *steps, "end"]
    assert asked == [(f"{name}, {n} tokens", 3, name, n) for name in "ab" for n in (4, 8, 16)]
    assert results.tokens.values.tolist() == [4, 8, 16]
    assert results.network.values.tolist() == ["a", "b"]
    np.testing.assert_array_equal(results.value[:, 0, 0], [[1, np.nan], [2, 2]])


def test_texts_from_an_index_on_are_measured_with_or_without_a_mask(monkeypatch):
    asked = []
    monkeypatch.setattr(run_lipschitz.smoothness, "measure_texts", lambda *a: asked.append(a))
    x, mask = np.arange(6).reshape(3, 2), np.ones((3, 2), bool)
    for inputs in ({"x": x, "mask": mask}, {"x": x, "mask": None}):
        run_lipschitz.measure_texts(Network("a", "source", inputs, None), 8, 1)
        source, few, num_tokens = asked.pop()
        assert (source, num_tokens) == ("source", 8)
        np.testing.assert_array_equal(few["x"], x[1:])
        assert few["mask"] is None if inputs["mask"] is None else len(few["mask"]) == 2


def test_numbers_of_each_network_are_over_its_own_layers():
    """Four networks of other depths: means over texts, then over the layers that there are."""
    tokens, depths = [4, 8, 16], (2, 3, 3, 2)
    networks = [Network(f"network {i}", None, {}, None) for i in range(4)]
    powers = np.random.default_rng(0).uniform(0.1, 0.5, (4, 2, 3))
    for index, depth in enumerate(depths):
        powers[index, :, depth:] = np.nan
    sizes = np.array(tokens)[:, None, None, None] ** powers * (1 + np.arange(4))[:, None, None]
    axes = {"tokens": tokens, "network": [n.label for n in networks], "seed": [0, 1]}
    axes |= {"layer": [1, 2, 3]}
    results = xr.Dataset({"largest": ([*axes], sizes), "change": ([*axes], sizes / 100)}, axes)
    results["power"] = ([*axes][1:], powers)
    lines = list(run_lipschitz.compare_results(results, networks))
    assert len(lines) == 4 * 7
    claims = list(run_lipschitz.judge_claims(results, networks))
    constants, (shares,) = (draw(results, networks).axes for draw in FIGURES)
    for index, depth in enumerate(depths):
        by_layer = powers[index, :, :depth].mean(axis=0)
        size = sizes[:, index, :, :depth]
        expected = [np.median(by_layer), by_layer.min(), by_layer.max()]
        expected += [np.median(size[n].mean(axis=0)) for n in range(3)]
        expected += [size.max() / 100]
        numbers = [line.measured for line in lines[7 * index : 7 * index + 7]]
        assert numbers == pytest.approx(expected)
        medians = np.median(powers[index, :, :depth], axis=1)
        assert claims[index].estimate == pytest.approx(np.median(medians))
        line = shares.lines[index]
        assert_close(line.get_xdata(), np.arange(1, depth + 1) / depth)
        assert_close(line.get_ydata(), by_layer)
        curves = constants[index].lines
        geometric = np.exp(np.log(size).mean(axis=1))
        for layer in range(depth):
            assert_close(curves[layer].get_ydata(), geometric[:, layer])
        assert not len(constants[index].xaxis.get_minorticklocs())
        start = np.median(geometric[0])
        for line, power in zip(curves[depth:], (0.25, 0.5), strict=True):
            assert_close(line.get_ydata(), start * (np.array(tokens) / 4) ** power)
    labels = [ax.get_ylabel() for ax in constants[:4]]
    assert labels == ["largest singular value", "", "", "largest singular value"]


FIGURES = run_lipschitz.constants_figure, run_lipschitz.powers_figure
