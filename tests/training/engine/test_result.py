"""The result of a sweep: its axes, its runs by values, and runs that are none."""

import numpy as np

from tests.oracles.small_sweeps import run, with_static
from tests.support.refusals import each_is_refused, is_refused


def test_a_run_at_an_array_is_that_run():
    result = run(
        **with_static(array=[np.zeros(2), np.ones(2)], size=[[1], [2]]), hyper={"rate": 0.1}
    )
    assert result.state(1, array=np.ones(2), size=[2])["w"].shape == (3,)
    is_refused("array=array", result.state, 0, array=np.full(2, 3.0), size=[1])


def test_a_run_that_is_none_is_named():
    result = run(static={}, quiet=True)
    each_is_refused(
        (lambda: result.state(5, rate=0.1), "seed=5 is not one of \\[0, 1\\]"),
        (lambda: result.state(0, rate=0.3), "rate=0.3 is not one of"),
        (lambda: result.state(0), "values of \\[\\], but this sweep has \\['rate'\\]"),
    )
    assert "Swept(metrics=['loss'], {'rate': 2" in repr(result)


def test_results_have_the_axes_and_coordinates_of_what_is_swept(whole):
    assert whole.metrics["loss"].dims == ("width", "rate", "seed", "step")
    assert whole.metrics["loss"].shape == (2, 2, 3, 25) and whole.metrics.attrs == {"scale": 0.5}
    assert whole.metrics["rate"].values.tolist() == [0.01, 6.0]
    assert whole.looks["norm"].dims == ("width", "rate", "seed", "step", "norm_0")
    assert whole.looks["step"].values.tolist() == [0, 10, 20, 25]
    assert list(whole.states) == [2, 4]
    assert whole.states[4]["weights"]["in"].shape == (3, 2, 3, 4)  # seeds first, then rates
    narrow = whole.looks["norm"].sel(width=2, rate=0.01)
    assert np.isfinite(narrow[..., :2]).all() and np.isnan(narrow[..., 2:]).all()
    norms = np.linalg.norm(whole.states[2]["weights"]["in"][:, 0], axis=1)
    np.testing.assert_allclose(narrow.sel(step=25)[:, :2], norms, rtol=1e-5)
    drawn = whole.looks["drawn"].sel(rate=0.01).values  # of the seed, at each look
    assert (drawn == drawn[:, :, :1]).all() and len(np.unique(drawn)) == 3
    assert whole.metrics["index"].sel(rate=0.01, width=2)[1].values.tolist() == list(range(25))
