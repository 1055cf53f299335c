"""The notebooks of docs/ run, and show what their text says."""

import json

import jax
import numpy as np
import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.slow


def run_notebook(name):
    """The names that a notebook of docs/ defines."""
    cells = json.loads((REPOSITORY / "docs" / f"{name}.ipynb").read_bytes())["cells"]
    scope = {}
    with jax.numpy_rank_promotion("allow"):  # as it is elsewhere
        for cell in (c for c in cells if c["cell_type"] == "code"):
            exec(compile("".join(cell["source"]), name, "exec"), scope)
    return scope


def test_post_ln_has_no_gradient_of_queries_and_stays_at_a_guess():
    scope = run_notebook("deep_post_ln")
    ratio = {name: g["queries"][-1] / g["values"][-1] for name, g in scope["gradients"].items()}
    assert ratio["post"] < ratio["pre"] / 100 and ratio["post"] < ratio["deepnorm"] / 100
    losses = {name: float(found[1][-1]) for name, found in scope["after"].items()}
    assert losses["deepnorm"] < losses["post"] and losses["post"] > 2.2


def test_lengths_of_a_trained_model_are_worth_its_accuracy():
    scope = run_notebook("what_carries_the_output")
    assert scope["losses"][-1] < scope["losses"][0] / 2
    whole, none = scope["frozen"][-1], scope["values"][0]
    np.testing.assert_allclose(scope["shares"].sum(), whole - none, atol=1e-5)
    np.testing.assert_allclose(scope["truncated"][-1], whole, atol=0.01)


def test_two_failures_are_apart_in_the_diagram():
    scope = run_notebook("two_failures")
    assert scope["collapsed"][0, -1] and not scope["collapsed"][-1].any()
    assert scope["saturated"][:, 0].all() and not scope["saturated"][:, -1].any()


def test_a_model_layer_by_layer_in_a_notebook():
    scope = run_notebook("larger_than_memory")
    assert scope["seen"] == list(range(1, 9))


def test_a_model_of_ones_own_is_measured():
    scope = run_notebook("measure_your_model")
    with_skips, without = (scope["profiles"][skip]["residual_ratio"] for skip in (1.0, 0.0))
    assert without[-1] < 1e-3 < with_skips[-1] and scope["sizes"].shape == (13,)
