"""Runs as arrays: some of them, those of several groups, and keys as data."""

import jax
import numpy as np

from rank_collapse.training.engine.runs import Runs, join_pieces, join_runs, wrap_keys


def make_runs(*seeds):
    """Makes runs whose arrays are built from the number of the seed, in two pieces of metrics."""
    s = np.array(seeds)
    metrics = [[100.0 * s[:, None] + np.arange(2), 100.0 * s[:, None] + 2 + np.arange(1)]]
    looks = [[1000.0 * s[:, None]]]
    return Runs(s % 2, s, 3, [10.0 * s], metrics, looks, [0], s - 1, s[:, None] > 4)


def read(runs):
    """Reads what a run is in plain lists."""
    return (
        runs.names(),
        runs.state[0].tolist(),
        join_pieces(runs.metrics[0]).tolist(),
        join_pieces(runs.looks[0]).tolist(),
        runs.finite_steps.tolist(),
        runs.exempt.tolist(),
    )


def test_some_runs_are_those_of_their_seeds_alone():
    assert read(make_runs(3, 4, 5).take(np.array([2, 0]))) == read(make_runs(5, 3))


def test_runs_of_two_groups_are_those_of_all_seeds():
    joined = join_runs([make_runs(3, 4), make_runs(5)])
    assert len(joined) == 3 and read(joined) == read(make_runs(3, 4, 5))
    alone = make_runs(3)
    assert join_runs([alone]) is alone


def test_data_of_keys_become_keys_again():
    keys = jax.random.split(jax.random.key(7, impl="rbg"), 3)
    wrapped = wrap_keys(jax.random.key_data(keys), jax.eval_shape(lambda: keys[0]))
    assert wrapped.dtype == keys.dtype and (wrapped == keys).all()
    assert wrap_keys(3, jax.ShapeDtypeStruct((), np.int32)) == 3
