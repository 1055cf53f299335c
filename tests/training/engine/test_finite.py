"""The last finite state of each run, and what shows that a run is no longer finite."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.training import sweep
from rank_collapse.training.engine.finite import (
    are_finite,
    find_last_finite,
    find_wrong,
    select_rows,
)


def test_the_search_ends_where_each_run_was_finite_last():
    """Each run breaks in one step of 3 to 8, or in none; a metric shows that at any step.

    A run alone ends where it does among others, which make the search stop at their steps too.
    """
    start, stop, never = 3, 9, 100
    pairs = list(itertools.product([*range(start, stop), never], range(start, stop + 1)))
    pairs = [(at, first) for at, first in pairs if at != never or first < stop]
    broken, first = np.array([*pairs, (never, -1)]).T

    def search(rows):
        def make_steps(state, active, start, stop):
            (x,) = state
            for index in range(start, stop):
                x = np.where(active, np.where(index == broken[rows], np.inf, x + 1), x)
            return [x], np.isfinite(x)

        before = [np.arange(len(first), dtype=float)[rows]]
        after, _ = make_steps(before, True, start, stop)
        chunk = before, after, first[rows], start, stop
        return *find_last_finite(make_steps, select_rows, *chunk), before

    last, (x,), before = search(slice(None))
    alone = [search([i])[:2] for i in range(len(first))]
    np.testing.assert_array_equal([row[0] for row, _ in alone], last)
    np.testing.assert_array_equal([states[0][0] for _, states in alone], x)
    expected = np.minimum(broken, first)
    np.testing.assert_array_equal(last, expected)
    np.testing.assert_array_equal(x[:-1], before[0][:-1] + expected[:-1] - start)
    assert x[-1] == before[0][-1] + stop - start  # a finite run keeps its later state


def test_the_first_wrong_metric_is_the_earliest_of_those_that_must_be_finite():
    steps = np.arange(10, 14)
    first_rows = np.array([[99, 12, 99, 99], [11, 12, 99, 13], [10, 10, 10, 10]])
    metrics = [np.where(steps < at[:, None], 1.0, np.nan) for at in first_rows]
    vector = np.stack([metrics[1], np.ones((4, 4))], axis=-1)  # [runs, steps, 2]
    step, metric = find_wrong([metrics[0], vector, metrics[2]], [0, 1], 4, 10, 14)
    assert step.tolist() == [11, 12, 14, 13] and metric.tolist() == [1, 0, -1, 1]
    step, metric = find_wrong([], [], 2, 10, 14)
    assert step.tolist() == [14, 14] and metric.tolist() == [-1, -1]


def test_leaves_that_are_not_finite():
    leaves = [jnp.ones((2, 3)), jnp.array([1.0, jnp.nan]), jnp.inf, jnp.array(1j * jnp.inf)]
    leaves += [jnp.arange(3), jnp.bool_(False), jax.random.key(0)]
    leaves = [jnp.asarray(leaf) if isinstance(leaf, float) else leaf for leaf in leaves]
    assert are_finite(leaves).tolist() == [True, False, False, False, True, True, True]


def test_what_was_never_finite_is_no_divergence(tmp_path):
    """A mask of -inf, a best loss of inf and a metric that is measured at some steps alone.

    Also of a sweep that goes on; a leaf beside them that is infinite later is one.
    """

    def begin(key, hyper):
        return {"mask": jnp.array([0, -jnp.inf]), "best": jnp.inf, "far": jnp.inf, "x": 1.0}

    def improve(state, hyper, index):
        sometimes = jnp.where(index % 2 == 0, state["x"], jnp.nan)
        best = jnp.minimum(state["best"], state["x"])
        x = jnp.where(index == hyper["at"], jnp.inf, state["x"] / 2)
        changed = {"x": x, "best": best, "far": state["far"] + 1}
        return state | changed, {"x": state["x"], "some": sometimes}

    options = {"seeds": 1, "every": 2, "quiet": True, "hyper": {"at": [9, 2]}}
    sweep(begin, improve, finite=["x"], steps=2, folder=tmp_path, **options)
    result = sweep(begin, improve, finite=["x"], steps=4, folder=tmp_path, **options)
    assert result.diverged_at.values.tolist() == [[-1], [2]]
    assert result.states["best"].tolist() == [[0.125, 0.5]]
    assert np.isnan(result.metrics["some"][0]).values.tolist() == [[False, True] * 2]
    strict = sweep(begin, improve, steps=4, **options)
    assert strict.diverged_at.values.tolist() == [[1], [1]]
    assert strict.states["x"].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("every", [1, 4, 9, 32])
@pytest.mark.parametrize("at_once", [1, None])
def test_the_last_finite_state_is_kept_whatever_shows_it(every, at_once):
    """Metrics that show it at once, a step later or never."""

    def begin(key, hyper):
        return {"x": 0.0, "count": 0, "data": hyper["at"] * jnp.ones(2)}

    def advance(state, hyper, index):
        x = jnp.where(index == hyper["at"], jnp.inf, state["x"] + 1)
        shown = jnp.where(index >= hyper["at"] + hyper["delay"], jnp.nan, 1.0)
        return state | {"x": x, "count": state["count"] + 1}, {"shown": shown}

    at, delay = [0, 5, 9, 13], [0, 1, 6, 100]
    result = sweep(
        begin,
        advance,
        steps=14,
        seeds=1,
        every=every,
        hyper={"at": at, "delay": delay},
        at_once=at_once,
        quiet=True,
    )
    expected = np.broadcast_to(np.array(at)[:, None], (4, 4))
    np.testing.assert_array_equal(result.diverged_at[..., 0], expected)
    np.testing.assert_array_equal(result.states["count"][0], expected)
    np.testing.assert_array_equal(result.states["x"][0], expected)
    np.testing.assert_array_equal(result.states["data"][0, ..., 0], expected)
    finite = np.isfinite(result.metrics["shown"].values).sum(axis=-1)[..., 0]
    np.testing.assert_array_equal(finite, expected + (np.array(delay) > 0))


def test_a_run_that_stops_is_told_by_what_is_not_finite_first(capsys):
    """A number with its value, an array without, the state where no metric shows it."""

    def begin(key, hyper):
        return {"x": 0.0}

    def advance(state, hyper, index):
        x = jnp.where(index == 3, jnp.nan, state["x"] + 1)
        late = jnp.where(index >= 2 + hyper["a"], -jnp.inf, 1.0)
        vector = jnp.where((index >= 1 + hyper["b"]) & (jnp.arange(2) > 0), jnp.nan, 0j)
        return {"x": x}, {"vector": vector, "late": late}

    hyper = {"a": [0, 100], "b": [0, 100]}
    finite = ["late", "vector"]
    result = sweep(begin, advance, steps=6, seeds=1, every=6, hyper=hyper, finite=finite)
    assert result.metrics["vector"].dtype == np.complex64
    lines = [line for line in capsys.readouterr().err.splitlines() if "keeps" in line]
    causes = [line.partition("): ")[2].partition(";")[0] for line in lines]
    assert causes == [
        "vector is not finite at step 1",
        "late is -inf at step 2",
        "vector is not finite at step 1",
        "its state is not finite at step 3",
    ]
    kept = [line.rpartition("; ")[2] for line in lines]
    assert kept == [
        f"it keeps its state after {n}" for n in ("1 step", "2 steps", "1 step", "3 steps")
    ]
    assert ["seed 0 (a=0, b=0)" in lines[0], "seed 0 (a=0, b=100)" in lines[1]] == [True] * 2
