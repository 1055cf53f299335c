"""Walks on the circle and what a network fed with its own output does, by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.circle import walks as circle
from rank_collapse.training.tasks.examples import Examples
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
    assert circle.make_examples(4).inputs.shape == (1, 2, 2)
    is_refused("num_points=3", circle.make_examples, 3)
    # The first walks from point 0 to point 499, the second from there to point 998.
    places = 2 * np.pi / 1000 * np.array([[0, 499], [499, 998]])
    points = 0.3 * np.stack([np.cos(places), np.sin(places)], axis=-1)
    assert_close(np.stack([data.inputs[0], data.labels[-1]]), points, atol=1e-6)


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


def make_case(*, program, step):
    """Makes (task, fake forward pass) of a network that maps points by `step`."""
    task = SimpleNamespace(recipe=SimpleNamespace(config="config"), program=program)

    def forward(model, points, config):
        assert (model, config) == (MODEL, "config")
        return step(points)

    return task, forward


MODEL = SimpleNamespace(network="network", classifier="classifier")


@pytest.mark.parametrize("is_summed", [False, True])
def test_what_is_measured_of_a_walk_is_of_the_inputs_of_the_network(is_summed, monkeypatch):
    """A linear network; with sums it reads the sum of all points so far, and moves equal points."""
    matrix, seen = jnp.array([[-0.4, 0.25], [-0.25, -0.4]]), []
    monkeypatch.setattr(circle, "COLLAPSED_STEPS", 3)
    task, forward = make_case(program="x" + circle.SUMS * is_summed, step=lambda x: x @ matrix)
    monkeypatch.setattr(circle, "forward", forward)

    def fake_apply(network, states, config):
        assert (network, config) == ("network", "config")
        weights = jnp.stack([states[:1, :1] + states[1:, 1:], 2 * states[:1, :1]])
        return SimpleNamespace(
            attention=jnp.broadcast_to(weights.reshape(1, 2, 1, 1), (3, 2, 2, 2))
        )

    monkeypatch.setattr(circle, "input_states", lambda network, points, config: points + 1)
    monkeypatch.setattr(circle.rc, "apply", fake_apply)
    monkeypatch.setattr(circle, "head_gap", lambda attention: attention[..., 0, 0])

    def fake_log(network, classifier, start, config, num_steps, *, skip):
        seen.append((network, classifier, config, num_steps, skip))
        return start.sum() + jnp.arange(num_steps)

    monkeypatch.setattr(circle.recurrence, "log_roll_out", fake_log)
    data = {
        "walk": Examples(jnp.arange(8.0).reshape(2, 2, 2), jnp.zeros((2, 2, 2))),
        "train": Examples(jnp.arange(12.0).reshape(3, 2, 2) / 8, jnp.ones((3, 2, 2))),
    }
    measured = circle.measure_walk(4, task, MODEL, data, None)
    linear, state = np.asarray(matrix), np.arange(4.0).reshape(2, 2)
    path, inputs = [state], [state]
    for _ in range(3):
        output = inputs[-1] @ linear
        path.append(output)
        inputs.append(inputs[-1] + output if is_summed else output)
    assert_close(measured["trajectory"], path)
    assert_close(measured["distance"], [np.linalg.norm(p[0] - p[1]) for p in path])
    errors = np.asarray(data["train"].inputs) @ linear - 1
    assert_close(measured["error"], np.sqrt((errors**2).sum(axis=-1).mean() / 4))
    assert_close(measured["log10_distance"], 6 + np.arange(4.0))
    gaps = [[i[0, 0] + i[1, 1] + 2, 2 * i[0, 0] + 2] for i in inputs]
    assert_close(measured["head_gap"], np.broadcast_to(np.array(gaps)[:, None], (4, 3, 2)))
    recurrent = linear + is_summed * np.eye(2)
    assert_close(measured["jacobian_across"], recurrent.T, atol=1e-6)
    end = inputs[-1].mean(axis=0)
    for _ in range(circle.COLLAPSED_STEPS):
        end, moved = end @ recurrent, np.linalg.norm(end @ recurrent - end)
    assert_close(measured["equal_points_moved"], moved, rtol=1e-4, atol=1e-12)
    assert seen == [("network", "classifier", "config", 4, is_summed)]


def make_walks():
    """Makes results of a case of three seeds, of which the second diverged."""
    distances = np.array([[1.0, 0.3, 1e-4], [1, 1, 1], [1.0, 0.5, 0.4]])
    gaps = np.array([[[0.5, -0.25], [0.5, 0.25]], [[0.5, 0.5]] * 2, [[0.25, 0.5], [-0.5, -0.25]]])
    gaps = gaps[:, None]  # of two layers; the signs differ in the first layer of the first seed
    return {
        "distance": distances,
        "log10_distance": np.log10(distances) - 8 * np.array([[0, 0, 1], [0, 0, 0], [0, 0, 0]]),
        "error": np.array([0.125, 0.25, 0.5]),
        "head_gap": np.concatenate([gaps, -gaps], axis=1),
        "jacobian_across": np.array([np.diag([0.5, 0.25]), np.eye(2), np.diag([-0.9, 0.5])]),
        "equal_points_moved": np.array([0.9e-5, 0.0, 1.1e-5]),
        "diverged_at": np.array([-1, 2, -1]),
        "model": "weights",
    }


def test_numbers_of_a_seed_are_those_of_its_walk():
    case = make_walks()
    numbers = circle.measure_seeds(case)
    assert numbers["diverged"].tolist() == [0, 1, 0]
    assert numbers["step_error"].tolist() == [0.125, 0.25, 0.5]
    assert numbers["distance_at_end"].tolist() == [1e-4, 1, 0.4]
    assert numbers["fell"].tolist() == [True, False, False]
    assert numbers["at_rest"].tolist() == [True, True, False]
    assert_close(numbers["multiplier"], [0.5, 1, 0.9])
    assert np.isnan(numbers["predicted_steps"][2]) and numbers["predicted_steps"][0] > 0
    expected = np.log(circle.LOW / circle.HIGH) / np.log(0.5)
    assert_close(numbers["predicted_steps"][0], expected, rtol=0.1)
    # only at the start, and within one layer
    assert numbers["opposite_at_start"].tolist() == [True, False, False]
    assert_close(circle.log10_at_end(case), [np.log10(circle.LOW), np.nan, np.log10(0.4)])


def test_seeds_that_diverged_are_left_out_of_a_case():
    ((key, case),) = circle.fine_cases({"attention+mlp, d=32": make_walks()}).items()
    assert key == ("attention+mlp", 32) and case["name"] == "attention+mlp, d=32"
    assert case["seed"].tolist() == [0, 2] and "model" not in case
    assert case["distance"].tolist() == make_walks()["distance"][[0, 2]].tolist()
    order = circle.measure_seeds(make_walks())["order"]
    expected = [order[0]] if np.isfinite(order[0]) else []
    assert case["orders"].tolist() == expected


def test_orders_are_those_of_the_seeds_that_fell():
    """The third seed ends apart in float32, whatever the logarithms say."""
    case = make_walks()
    case["log10_distance"] = -7.0 * np.array([[3.0], [2.0], [1.5]]) ** (np.arange(5.0))
    ((_, measured),) = circle.fine_cases({"base, d=32": case}).items()
    assert_close(measured["order"], [3.0, 1.5], rtol=1e-6)
    assert_close(measured["orders"], [3.0], rtol=1e-6)
