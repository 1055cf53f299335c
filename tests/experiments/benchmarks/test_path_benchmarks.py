"""Benchmarks of path sums at tiny size: what they time agrees."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import benchmark
from experiments.benchmarks import (
    path_benchmarks,
)
from rank_collapse.paths.sets import classify_states
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


@pytest.mark.full
def test_path_benchmarks_compare_what_is_equal():
    report = path_benchmarks.time_exact_paths(parse_two_rounds(), **benchmark.TINY["exact_paths"])
    assert all(len(t.seconds) == 2 and t.compile_seconds > 0 for t in report.timings)
    assert 0 <= find_figure(report, "Frobenius") < 1e-5
    report = path_benchmarks.time_head_contributions(
        parse_two_rounds(), **benchmark.TINY["head_contributions"]
    )
    assert report.timings[0].output.shape == (2, 2, 4, 8)
    report = path_benchmarks.time_recomputed_paths(parse_two_rounds(), depth=2, num_sequences=3)
    assert find_figure(report, "difference") < 1e-5


def test_single_paths_are_added_up_to_the_sets_that_are_classified(monkeypatch):
    """States stand for a path and its tokens; the logits of a set are those of their sum."""
    cases = {}

    def compute_state(params, x, config, path, *, no_sub_path):
        assert no_sub_path and config.depth == 2 and path.shape == (2,)
        weights = jnp.sin(jnp.arange(48.0)) + params
        return jnp.sin(path[0] + 3.0 * path[1] + x[:, None]) * weights[None]

    def classify_sets(params, x, config, paths, classifier, *, no_sub_path):
        """Evaluates sets of paths [k, r, p, l] in loops."""
        states = jnp.stack(
            [
                sum(
                    compute_state(params, x, config, path, no_sub_path=no_sub_path)
                    for path in paths
                )
                for paths in paths.reshape(-1, *paths.shape[2:])
            ]
        )
        return classify_states(classifier, states.reshape(*paths.shape[:2], *states.shape[1:]))

    def draw_paths(key, lengths, *sizes):
        assert [*lengths] == [0, 1, 2] and sizes == (5, 5, 2, 2)
        return jnp.asarray(np.random.default_rng(0).integers(-1, 2, (3, 5, 5, 2)))

    monkeypatch.setattr(path_benchmarks, "compare_cases", lambda c, rounds, _: cases.update(c))
    monkeypatch.setattr(path_benchmarks.rc, "init", lambda key, config: jnp.array(0.5))
    monkeypatch.setattr(path_benchmarks.rc.paths, "sample_path_sets", draw_paths)
    monkeypatch.setattr(path_benchmarks.rc.paths, "path_state", compute_state)
    monkeypatch.setattr(path_benchmarks.rc.paths, "path_set_logits", classify_sets)
    path_benchmarks.time_recomputed_paths(parse_two_rounds(), depth=2, num_sequences=3)
    alone, together = (fn(*arguments) for fn, arguments in cases.values())
    assert alone.shape == (3, 3, 5, 8, 10)  # sequences, lengths, repeats, tokens, letters
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)
    assert len(np.unique(np.asarray(alone)[:, 1:, :, 0, 0])) > 5
