"""Parts of a training step: products counted as often as a step has them, shares of all parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import training_benchmarks, training_parts
from rank_collapse.runs.seeds import seed_mesh
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


def test_each_distinct_product_is_counted_as_often_as_the_step_has_it():
    def step(state, square, last):
        state, _ = jax.lax.scan(lambda a, _: (jnp.tanh(a @ square), None), state, None, length=3)
        return state @ last

    closed = jax.make_jaxpr(step)(jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((4, 2)))
    products = training_parts._make_products(closed, seed_mesh(jax.devices()[:1]))
    assert sorted(times for _, _, times in products) == [1, 3]
    assert {copies for _, copies, _ in products} == {training_parts.MOST_COPIES}
    for call, _, _ in products:
        call()


@pytest.mark.full
def test_a_step_without_a_part_is_timed_beside_the_whole_step():
    report = training_parts.time_training_parts(
        "sort", parse_two_rounds(), training_benchmarks.TINY
    )
    names = [timing.name for timing in report.timings]
    parts = [f"without {part}" for part in training_parts.PARTS]
    assert names[:6] == ["whole step", *parts, "without all of these"] and len(names) == 8
    assert all(len(timing.seconds) == 2 and timing.best > 0 for timing in report.timings)
    assert find_figure(report, "padding") == 0  # all sequences have one length
    values = [find_figure(report, f"share of {name}") for name in ("all", "its products at their")]
    assert find_figure(report, "remainder") == pytest.approx(1 - np.sum(values))
