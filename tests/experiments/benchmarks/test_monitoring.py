"""Benchmark of `rc.monitor`: the steps that it times differ in their scalars alone."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import monitoring
from tests.oracles.benchmark_reports import parse_two_rounds


def test_each_step_is_one_of_gradient_descent_with_its_scalars(monkeypatch):
    """A network that multiplies its tokens by one weight, and the mean squared error by hand."""
    cases, networks = {}, set()

    def note(config):
        sizes = config.depth, config.num_heads, config.d_model
        networks.add((*sizes, config.norm_placement, config.mlp))

    def apply(params, x, config):
        note(config)
        return SimpleNamespace(output=params["w"] * x)

    def monitored(params, x, config, *, attention):
        note(config)
        return params["w"] * x, {"attention": attention}

    weights = {"w": jnp.array(2.0)}
    monkeypatch.setattr(monitoring, "compare_cases", lambda c, rounds, _: cases.update(c))
    monkeypatch.setattr(monitoring.rc, "init", lambda key, config: weights)
    monkeypatch.setattr(monitoring.rc, "apply", apply)
    monkeypatch.setattr(monitoring.rc, "monitored", monitored)
    monitoring.time_monitor(parse_two_rounds(), 3, 2, 8, 5)
    x, target = np.asarray(jax.random.normal(jax.random.key(1), (2, 5, 8)), float)
    error = 2 * x - target
    names = ("step, plain", "step, states", "step, states and attention")
    assert (*cases,) == names
    for name, scalars in zip(names, ({}, {"attention": False}, {"attention": True}), strict=True):
        step, arguments = cases[name]
        params, loss, measured = step(*arguments)
        np.testing.assert_allclose(loss, np.mean(error**2), rtol=1e-5)
        slope = np.mean(2 * error * x)
        np.testing.assert_allclose(params["w"], 2.0 - 1e-3 * slope, rtol=1e-6)
        assert measured == scalars
    assert networks == {(3, 2, 8, "pre", "gelu")}
