"""Names of the dimensions of arrays: the table, axes of any number, and arrays without a row."""

import json

import numpy as np
import pytest

from experiments.lab import dimensions
from experiments.lab.dimensions import describe_array, dump_descriptions


def test_the_first_row_that_fits_counts():
    described = describe_array("run_collapse", "a/swept/1", 2)
    assert described["dimensions"] == ["seed", "layer"]
    assert "gain of the MLPs" in described["meaning"]
    assert describe_array("collapse", "a/swept/1", 2) == described  # name of a folder of runs


def test_weights_have_any_number_of_axes():
    dimensions = describe_array("run_sort", "a/model/w_q", 4)["dimensions"]
    assert dimensions == ["seed", "axis_1", "axis_2", "axis_3"]


@pytest.mark.parametrize(
    ("experiment", "name", "ndim"),
    [("run_collapse", "a/swept/1", 3), ("run_lipschitz", "a/other", 2), ("run_none", "x", 1)],
)
def test_arrays_without_a_row_are_named(experiment, name, ndim):
    with pytest.raises(LookupError, match=f"no array '{name}' of {experiment} with {ndim} axes"):
        describe_array(experiment, name, ndim)


def test_arrays_without_a_row_are_left_out_of_the_file():
    arrays = {"a/largest": np.ones((2, 3)), "b": np.ones(2)}
    described = json.loads(dump_descriptions("run_lipschitz", arrays))
    assert list(described) == ["a/largest"]
    assert described["a/largest"]["dimensions"] == ["text", "layer"]


def test_a_row_of_all_experiments_counts_and_the_first_that_fits_alone(monkeypatch):
    rows = [
        {"experiments": "run_a b", "arrays": "x*", "dimensions": "seed", "meaning": "first"},
        {"experiments": "run_a", "arrays": "x*", "dimensions": "seed layer", "meaning": "second"},
        {"experiments": "all", "arrays": "y", "dimensions": "layer", "meaning": "of all"},
    ]
    monkeypatch.setattr(dimensions, "read_dictionary", lambda: rows)
    assert describe_array("b", "xy", 1) == {"dimensions": ["seed"], "meaning": "first"}
    assert describe_array("anything", "y", 1)["meaning"] == "of all"
    for experiment, name, ndim in (("a", "xy", 2), ("c", "xy", 1), ("a", "y", 2)):
        with pytest.raises(LookupError, match=f"no array '{name}' of {experiment}"):
            describe_array(experiment, name, ndim)
    described = json.loads(dump_descriptions("a", {"y": np.ones(7), "xy": np.ones((2, 2))}))
    assert described == {"y": {"dimensions": ["layer"], "meaning": "of all"}}
