"""The result of a sweep: its axes, its runs by values, and runs that are none."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles.small_sweeps import run
from tests.support.refusals import each_is_refused, is_refused


def test_a_run_at_its_values_of_several_lists_is_that_run():
    """Arrays and lists among them; each state is made of its values."""

    def begin(key, hyper, array, size):
        return jnp.array([array[0], size[0], hyper["a"], hyper["b"]])

    def stay(state, hyper, index, **_):
        return state, {"loss": state[2]}

    lists = {"array": [np.zeros(2), np.ones(2)], "size": [[1], [2], [3]]}
    swept = {"a": [0.5, 0.25, 0.125], "b": [4, 5]}
    result = run(init=begin, step=stay, steps=1, static=lists, hyper=swept, first_seed=5)
    for array, size, a, b in itertools.product((0, 1), (1, 2, 3), *swept.values()):
        place = {"array": np.full(2, float(array)), "size": [size], "a": a, "b": b}
        assert result.state(6, **place).tolist() == [array, size, a, b]
    is_refused("array=array", result.state, 5, **place | {"array": np.full(2, 3.0)})


def test_whole_numbers_of_shorter_metrics_are_filled_with_nan():
    """Their dtype becomes one that has NaN; whole numbers of one length keep theirs."""

    def begin(key, hyper, size):
        return jnp.zeros(())

    def count(state, hyper, index, size):
        return state, {"ragged": index + jnp.arange(size), "even": index + jnp.arange(2)}

    result = run(init=begin, step=count, steps=2, seeds=1, hyper={}, static={"size": [1, 3]})
    ragged = result.metrics["ragged"]
    assert ragged.dtype == np.float64  # which has every whole number of 32 bits
    one, nan = ragged.sel(size=3, seed=0).values, np.nan
    np.testing.assert_array_equal(one, [[0, 1, 2], [1, 2, 3]])
    np.testing.assert_array_equal(ragged.sel(size=1, seed=0).values, [[0, nan, nan], [1, nan, nan]])
    assert result.metrics["even"].dtype == np.int32


def test_a_value_may_be_an_array_without_axes():
    def begin(key, hyper):
        return 1.0 * hyper["size"]

    def stay(state, hyper, index):
        return state, {"loss": state}

    result = run(init=begin, step=stay, steps=1, hyper={"size": [2, 4]})
    for value in (np.array(4), jnp.int32(4), np.int64(4)):
        assert result.state(jnp.int32(1), size=value) == 4


def test_a_run_that_is_none_is_named():
    result = run(static={}, quiet=True)
    each_is_refused(
        (lambda: result.state(5, rate=0.1), "seed=5 is not one of \\[0, 1\\]"),
        (lambda: result.state(0, rate=0.3), "rate=0.3 is not one of"),
        (lambda: result.state(0), "values of \\[\\], but this sweep has \\['rate'\\]"),
        (lambda: result.state(0, rate=0.1, size=2), "values of \\['rate', 'size'\\], but this"),
    )
    assert "Swept(metrics=['loss'], {'rate': 2" in repr(result)


@pytest.mark.full
def test_results_have_the_axes_and_coordinates_of_what_is_swept(whole):
    assert whole.metrics["loss"].dims == ("width", "rate", "seed", "step")
    assert whole.metrics["loss"].shape == (2, 2, 3, 25) and whole.metrics.attrs == {"scale": 0.5}
    assert whole.metrics["rate"].values.tolist() == [0.01, 6.0]
    assert whole.looks["norm"].dims == ("width", "rate", "seed", "step", "norm_0")
    assert whole.looks["norm"].dtype == np.float32
    assert whole.looks["step"].values.tolist() == [0, 10, 20, 25]
    assert list(whole.states) == [2, 4]
    assert set(whole.seconds) == {"compiling", "running"} and min(whole.seconds.values()) > 0
    assert whole.states[4]["weights"]["in"].shape == (3, 2, 3, 4)  # seeds first, then rates
    narrow = whole.looks["norm"].sel(width=2, rate=0.01)
    assert np.isfinite(narrow[..., :2]).all() and np.isnan(narrow[..., 2:]).all()
    norms = np.linalg.norm(whole.states[2]["weights"]["in"][:, 0], axis=1)
    np.testing.assert_allclose(narrow.sel(step=25)[:, :2], norms, rtol=1e-5)
    drawn = whole.looks["drawn"].sel(rate=0.01).values  # of the seed, at each look
    assert (drawn == drawn[:, :, :1]).all() and len(np.unique(drawn)) == 3
    assert whole.metrics["index"].sel(rate=0.01, width=2)[1].values.tolist() == list(range(25))
