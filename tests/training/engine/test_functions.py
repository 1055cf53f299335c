"""Functions of a sweep as operations: names of metrics, unused values, other processes."""

import os

import jax
import jax.numpy as jnp
import pytest

from rank_collapse.runs.seeds import seed_mesh
from tests.oracles.small_sweeps import init, run, step
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
        (
            lambda: run(init=begin, step=named, static={"name": ["a", "b"]}),
            "with name=b they are \\['b'\\]",
        ),
        (
            lambda: run(init=begin, step=shaped, static={"size": [0, 1]}),
            "'a' has 0 axes, but it has 1",
        ),
    )


def test_a_look_takes_the_static_values_that_it_names():
    """Of several those alone; all of them where it takes any."""
    options = {"init": lambda key, hyper, **_: jnp.ones(3), "static": {"size": [1, 2], "shift": 5}}
    options |= {"step": lambda state, hyper, index, **_: (state, {}), "seeds": 1, "steps": 2}

    def look_at_size(state, hyper, key, size):
        return jnp.float32(size)

    def look_at_all(state, hyper, key, **static):
        return jnp.float32(10 * static["size"] + static["shift"])

    for look, first, second in ((look_at_size, 1, 2), (look_at_all, 15, 25)):
        looks = run(look=look, **options | {"hyper": {}}).looks["metric"]
        assert looks.values.tolist() == [[[first] * 2], [[second] * 2]]


def test_one_device_for_several_cores_is_said_where_runs_could_share_them(monkeypatch, capsys):
    """Not where there is one run alone, or a device for each core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    one, two = (seed_mesh(jax.devices()[:count]) for count in (1, 2))
    for mesh, seeds, rates, is_said in (
        (one, 2, 0.1, True),
        (one, 1, [0.1, 0.2], True),
        (one, 1, 0.1, False),
        (two, 2, 0.1, False),
    ):
        run(mesh=mesh, seeds=seeds, hyper={"rate": rates}, steps=0, quiet=False)
        said = capsys.readouterr().err
        assert ("has one CPU device for 4 cores; jax.config" in said) is is_said
        assert ("'jax_num_cpu_devices', 4)" in said) is is_said


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
    folder=sys.argv[2] + " of callables", quiet=True,
)
assert result.metrics.act.values.tolist()[:3] == ["cube", "tanh", "relu"], result.metrics
assert "0x" not in str(result.metrics) and result.metrics.attrs["gate"] == "silu"
assert result.state(1, act=leaky).shape == result.state(0, act=cube).shape == (3,)
"""


@pytest.mark.full
def test_functions_and_callables_are_the_same_in_another_process(tmp_path):
    """The fingerprint of a folder holds no address and no order of a set: it resumes."""
    program = PROGRAM.replace("6000", "3") + CALLABLES
    options = (1, tmp_path / "run", tmp_path / "out", 0)
    for _ in range(2):
        process = python("-c", program, *map(str, options))
        assert process.returncode == 0, process.stderr


@pytest.mark.full
def test_seeds_or_values_that_change_nothing_are_said(capsys):
    """In a function that a jit hides, too; not where one static value or the look alone uses it."""
    seeds_note, value_note = "init does not use its key", "no function uses hyper['scale']"
    fixed = {"init": lambda key, hyper: {"w": jax.random.normal(jax.random.key(0), (3,))}}
    hidden = {"init": jax.jit(lambda key, hyper: jax.jit(lambda k: {"w": jnp.ones(3)})(key))}
    scales = {"hyper": {"rate": 0.1, "scale": [1.0, 2.0]}}
    at_one_size = {
        "static": {"size": [1, 2]},
        "init": lambda key, hyper, size: init(key, hyper),
        "step": lambda state, hyper, index, size: step(
            {"w": state["w"] * (hyper["scale"] if size > 1 else 1.0)}, hyper, index
        ),
    }
    looked_at = {"look": lambda state, hyper, key: hyper["scale"]}
    begun_with = {"init": lambda key, hyper: {"w": hyper["scale"] * init(key, hyper)["w"]}}
    drawn_at_one_size = {
        "static": {"size": [1, 2]},
        "init": lambda key, hyper, size: init(key, hyper) if size > 1 else {"w": jnp.ones(3)},
        "step": lambda state, hyper, index, size: step(state, hyper, index),
    }
    cases = [
        ({}, ()),
        (fixed, (seeds_note,)),
        (hidden, (seeds_note,)),
        (fixed | {"seeds": 1}, ()),
        (scales, (value_note,)),
        (scales | fixed, (seeds_note, value_note)),
        (scales | at_one_size, ()),
        (scales | looked_at, ()),
        (scales | begun_with, ()),
        (drawn_at_one_size, ()),
        ({"hyper": {"rate": 0.1, "scale": 2.0}}, ()),
        ({"hyper": {"rate": 0.1, "key": [1.0, 2.0]}}, ("no function uses hyper['key']",)),
    ]
    for changes, notes in cases:
        run(**changes, quiet=False)
        lines = [line for line in capsys.readouterr().err.splitlines() if "use" in line]
        assert len(lines) == len(notes), (changes, lines)
        for line, note in zip(lines, notes, strict=True):
            assert note in line
