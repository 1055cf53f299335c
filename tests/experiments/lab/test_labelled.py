"""Labelled arrays of results, and the legends of their curves."""

import numpy as np
import pytest
import xarray as xr

from experiments.lab import labelled


def test_a_variable_that_lacks_a_name_has_nan_there():
    arrays = {"loss/b": np.ones(2), "ratio/a": np.zeros(2), "ratio/b": np.full(2, 3.0)}
    dataset = labelled.make_dataset(arrays, ("variant",))
    assert list(dataset) == ["loss", "ratio"] and dataset.loss.dims == ("seed", "variant")
    by_variant = {name: dataset.sel(variant=name) for name in "ab"}
    assert by_variant["a"].loss.isnull().all() and (by_variant["b"].loss == 1).all()
    assert (by_variant["a"].ratio == 0).all() and (by_variant["b"].ratio == 3).all()


@pytest.mark.parametrize("count", [3, 12, 300])
def test_many_curves_have_a_short_legend(count):
    values = xr.DataArray(np.ones((2, count, 3)), dims=("seed", "gain", "layer"))
    values = values.assign_coords(gain=np.arange(count), layer=np.arange(3))
    ax = labelled.plot_facets(values, hue="gain")[1][0, 0]
    _, names = ax.get_legend_handles_labels()
    assert names[0] == "0" and len(names) == min(count, 12)
