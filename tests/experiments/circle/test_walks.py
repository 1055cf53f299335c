"""Walks on the circle and what a network fed with its own output does, by hand."""

import jax.numpy as jnp
import numpy as np

from experiments.circle import walks as circle
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


def test_circle_walks_step_by_step_on_the_two_halves():
    data = circle.make_examples(1000)
    assert data.inputs.shape == (499, 2, 2)
    np.testing.assert_array_equal(data.inputs[1:], data.labels[:-1])
    radius = np.linalg.norm(np.asarray(data.inputs), axis=-1)
    np.testing.assert_allclose(radius, 0.3, rtol=1e-5)
    angle = 2 * np.pi / 1000
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    assert_close(data.labels, np.asarray(data.inputs) @ turn, atol=1e-6)
    is_refused("num_points=3", circle.make_examples, 3)


def test_roll_out_feeds_back_the_output_or_its_sum():
    start = jnp.asarray([[1.0, 0.0], [0.0, 2.0]])
    path = circle.roll_out(lambda x: 0.5 * x, start, 4)
    assert_close(path[:, 0, 0], [1, 0.5, 0.25, 0.125])
    path = circle.roll_out(lambda x: 0.5 * x, start, 4, skip=True)
    assert_close(path[:, 0, 0], [1, 0.5, 0.75, 1.125])
    assert_close(circle.distance(path)[0], np.sqrt(5))


def test_batch_before_is_added_in_the_order_of_training():
    walk = circle.make_examples(22)  # 10 examples in batches of 4, 4 and 2
    with_before = circle.add_batch_before(walk, 4)
    x, before = np.asarray(walk.inputs), np.zeros((4, 2, 2))
    for begin in range(0, 10, 4):
        batch = x[begin : begin + 4]
        wanted = batch + before[: len(batch)]
        np.testing.assert_array_equal(with_before.inputs[begin : begin + 4], wanted)
        before = batch
    np.testing.assert_array_equal(with_before.labels, walk.labels)


def test_head_gap_by_hand():
    weights = jnp.asarray([[[0.75, 0.25], [0.5, 0.5]], [[0.125, 0.875], [1.0, 0.0]]])
    np.testing.assert_array_equal(circle.head_gap(weights), [0.25, -0.875])
