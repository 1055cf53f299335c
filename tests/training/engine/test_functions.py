"""Functions of a sweep as operations: names of metrics, and the same in another process."""

import jax.numpy as jnp

from tests.oracles.small_sweeps import run
from tests.oracles.swept_networks import (
    PROGRAM,
)
from tests.support.processes import python
from tests.support.refusals import each_is_refused


def test_a_static_value_changes_no_name():
    def named(state, hyper, index, name):
        return state, {name: 1.0}

    def shaped(state, hyper, index, size):
        return state, {"a": jnp.ones((1,) * size)}

    def begin(key, hyper, **static):
        return jnp.ones(3)

    each_is_refused(
        (lambda: run(init=begin, step=named, static={"name": ["a", "b"]}), "with name=b \\['b'\\]"),
        (lambda: run(init=begin, step=shaped, static={"size": [0, 1]}), "'a' has 0 axes, and 1 wi"),
    )


def test_a_function_is_the_same_in_another_process(tmp_path):
    """The fingerprint of a folder holds no address and no order of a set."""
    options = (1, tmp_path / "run", tmp_path / "out")
    for _ in range(2):
        process = python("-c", PROGRAM.replace("1200", "3"), *map(str, options))
        assert process.returncode == 0, process.stderr


CALLABLES = """
import functools, sys, jax, jax.numpy as jnp
from rank_collapse.training import sweep
def cube(x):
    return x**3
leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
result = sweep(
    lambda key, hyper, act, gate: jax.random.normal(key, (3,)),
    lambda state, hyper, index, act, gate: (act(state), {"sum": gate(state).sum()}),
    steps=2, seeds=2, static={"act": [cube, jnp.tanh, jax.nn.relu, leaky], "gate": jax.nn.silu},
    folder=sys.argv[1], quiet=True,
)
assert result.metrics.act.values.tolist()[:3] == ["cube", "tanh", "relu"], result.metrics
assert "0x" not in str(result.metrics) and result.metrics.attrs["gate"] == "silu"
assert result.state(1, act=leaky).shape == result.state(0, act=cube).shape == (3,)
"""


def test_callables_as_static_values_resume_in_another_process(tmp_path):
    for _ in range(2):
        process = python("-c", CALLABLES, str(tmp_path / "run"))
        assert process.returncode == 0, process.stderr
