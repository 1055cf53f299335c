"""The CPU time of experiments is divided among tracing, compiling and all else."""

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import experiment_parts
from experiments.benchmarks.experiment_parts import COMPILING, TRACING, Parts
from rank_collapse.runs.files import RunError


def test_events_are_of_the_programs_compiled_in_the_context():
    shapes = iter(range(2, 9))

    @jax.jit
    def add_ones(x):
        return x + 1

    def call():
        jax.block_until_ready(add_ones(jnp.zeros(next(shapes))))

    call()
    with experiment_parts.record_events() as events:
        call()
    count = len(events)
    call()
    assert len(events) == count  # of the context alone
    assert {COMPILING, *TRACING} <= {event for event, _ in events}


def test_events_are_summed_by_kind():
    events = [(COMPILING, 2.0), (TRACING[0], 0.25), ("/other", 9.0), (COMPILING, 1.0)]
    parts = experiment_parts.sum_events([*events, (TRACING[1], 0.5)], 8.0)
    assert parts == Parts(8.0, 0.75, 3.0, 2)
    line = experiment_parts.describe_parts("run_sort", parts)
    assert line == "run_sort: 8.0 s of CPU, 3.0 s to compile 2 programs, 0.8 s to trace them"
    sums = experiment_parts.sum_parts({"a": parts, "b": Parts(2.0, 0.25, 0.0, 1)})
    assert sums == {
        "CPU s of all": (10.0, None),
        "share of compiling": (0.3, None),
        "share of tracing": (0.1, None),
        "programs of all": (3.0, None),
    }


@pytest.mark.full
def test_an_experiment_is_timed_in_its_own_process():
    parts = experiment_parts.time_experiment("run_path_counts", ["--heads=2", "--layers=3"])
    assert parts.cpu_seconds > parts.compiling_seconds >= 0
    with pytest.raises(RunError, match=r"run_path_counts failed: .*layers"):
        experiment_parts.time_experiment("run_path_counts", ["--layers=no"])
