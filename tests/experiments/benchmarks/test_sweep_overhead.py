"""`sweep` beside loops written by hand at tiny size: all train the same seeds."""

import numpy as np

from experiments import benchmark
from experiments.benchmarks import sweep_overhead
from tests.oracles.benchmark_reports import parse_two_rounds


def test_sweep_and_the_loops_by_hand_train_the_same_seeds():
    tiny = benchmark.TINY["sweep_overhead"]
    report = sweep_overhead.time_overhead(parse_two_rounds(), **tiny)
    whole, swept, in_chunks, swept_in_chunks = (timing.output for timing in report.timings)
    assert whole.shape == (2, 6) and len(np.unique(whole)) == 12
    for output in (swept, in_chunks, swept_in_chunks):
        np.testing.assert_allclose(output, whole, rtol=1e-4)
    assert [limit for _, limit in report.figures.values()] == 2 * [sweep_overhead.LIMIT]
