"""Results of run_lens: what cannot fail is not tested."""

import jax
import numpy as np
import pytest
import xarray as xr

from experiments.lens import influence, lens_results
from experiments.trained import opened_networks
from rank_collapse import pretrained
from tests.support.closeness import assert_close

SETTINGS = opened_networks.UNTRAINED["llama"] | {"initializer_range": 0.5}


@pytest.fixture(scope="module")
def llama():
    return pretrained.random_like(SETTINGS, jax.random.key(0))


def make_network(label, depth, **fields):
    settings = SETTINGS | {"num_hidden_layers": depth}
    source = pretrained.open_random(settings, jax.random.key(0))
    return opened_networks.Network(label, source, {}, None, **fields)


def test_what_cannot_fail_is_not_tested_and_nothing_is_claimed_of_initial_weights():
    opened = [
        make_network("deep", 8),
        make_network("shallow", 4),
        make_network("drawn at init", 8, is_initialised=True),
    ]
    axes = {
        "start": [lens_results.EARLY],
        "network": [network.label for network in opened],
        "direction": [*influence.DIRECTIONS],
        "position": [*influence.POSITIONS],
        "seed": np.arange(8),
    }
    shape = [len(values) for values in axes.values()]
    names = ("mean_length_frozen", "mean_length_exact", "cosine")
    values = xr.DataArray(np.arange(np.prod(shape), dtype=float).reshape(shape), axes, [*axes])
    results = xr.Dataset({name: values + i / 10 for i, name in enumerate(names)})
    tested = {(row.key, row.setting): row for row in lens_results.judge_claims(results, opened)}
    assert {*tested} == {
        ("frozen lengths", "deep"),
        ("exact lengths", "deep"),
        ("frozen direction", "deep"),
        ("frozen direction", "shallow"),
    }
    draws = values.sel(start=0.13, network="deep", direction="random", position="later")
    row = tested["exact lengths", "deep"]
    assert_close(row.estimate, float(np.median(draws)) + 0.1)
    other = results.assign_coords(start=[0.5])
    assert not list(lens_results.judge_claims(other, opened))


@pytest.mark.parametrize("missing", [[], [0], [0, 1], [0, 1, 2]])
def test_a_mean_over_texts_leaves_out_those_without_a_number(missing):
    """One text has no interval, and no text has no line."""
    network = make_network("deep", 8)
    axes = {
        "start": [lens_results.EARLY],
        "network": ["deep"],
        "direction": [lens_results.PLACE["direction"]],
        "position": [lens_results.PLACE["position"]],
        "seed": np.arange(3),
    }
    draws = np.array([0.25, 0.5, 1.0])
    draws[missing] = np.nan
    values = xr.DataArray(draws.reshape(1, 1, 1, 1, 3), axes, [*axes])
    results = xr.Dataset(dict.fromkeys(lens_results.SUMMARIES, values))
    lines = list(lens_results.compare_results(results, [network]))
    present = draws[~np.isnan(draws)]
    assert len(lines) == len(lens_results.SUMMARIES) * (len(present) > 0)
    for line in lines:
        assert line.measured == present.mean()
        assert line.note.startswith("95 % ") == (len(present) > 1)
