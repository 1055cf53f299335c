"""A small network that a sweep trains, its results as plain arrays, and programs that sweep it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.folders import REPOSITORY

INPUTS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


TARGETS = np.sin(INPUTS.sum(axis=1))


def init(key, hyper, width=4):
    """A network of one hidden layer; its key draws the batches."""
    key_in, key_out, key_data = jax.random.split(key, 3)
    weights = {
        "in": jax.random.normal(key_in, (3, width)),
        "out": hyper["scale"] * jax.random.normal(key_out, (width,)),
    }
    return {"weights": weights, "key": key_data, "mean": jnp.zeros((), jnp.bfloat16)}


def step(state, hyper, index, width=4):
    """A step of gradient descent on a batch of the step."""
    key = jax.random.fold_in(state["key"], index)
    batch = jax.random.randint(key, (8,), 0, 16)

    def compute_loss(weights):
        outputs = jnp.tanh(jnp.asarray(INPUTS)[batch] @ weights["in"]) @ weights["out"]
        return jnp.mean((outputs - jnp.asarray(TARGETS)[batch]) ** 2)

    loss, slope = jax.value_and_grad(compute_loss)(state["weights"])
    weights = jax.tree.map(lambda w, g: w - hyper["rate"] * g, state["weights"], slope)
    mean = 0.5 * state["mean"] + loss.astype(jnp.bfloat16)
    return state | {"weights": weights, "mean": mean}, {"loss": loss, "index": index}


def measure(state, hyper, key):
    return {
        "norm": jnp.linalg.norm(state["weights"]["in"], axis=0),
        "drawn": jax.random.uniform(key),
    }


# Runs of rate 6 are soon no longer finite.
SWEPT = {"hyper": {"rate": [0.01, 6.0], "scale": 0.5}, "static": {"width": [2, 4]}}


WHOLE = SWEPT | {"steps": 25, "seeds": 3, "every": 10, "look": measure, "quiet": True}


def list_leaves(result):
    """Lists metrics, looks and states as plain arrays."""
    states = jax.tree.leaves(result.states)
    data = [jax.random.key_data(a) if isinstance(a, jax.Array) else a for a in states]
    looks = [] if result.looks is None else list(result.looks.data_vars.values())
    values = [*result.metrics.data_vars.values(), *looks, result.diverged_at, *data]
    return [np.asarray(a).astype(np.float64) for a in values]


def assert_same_bits(a, b):
    for x, y in zip(list_leaves(a), list_leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# Arguments: number of devices, folder, file of the leaves, seconds that each call waits first.
PROGRAM = """
import sys, pickle, time, jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from rank_collapse.training import sweep
from rank_collapse.training.engine.program import Program
from tests.oracles.swept_networks import WHOLE, init, list_leaves, step
advance = Program.advance
Program.advance = lambda *arguments: time.sleep(float(sys.argv[4])) or advance(*arguments)
options = WHOLE | {"steps": 6000, "seeds": 5, "folder": sys.argv[2] or None}
result = sweep(init, step, **options)
pickle.dump(list_leaves(result), open(sys.argv[3], "wb"))
"""


def start(errors, *arguments):
    """Starts a Python program with the tests on its path."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-c", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=errors)


def assert_same_files(a, b):
    """Compares two results that `list_leaves` made."""
    for x, y in zip(*(np.load(path, allow_pickle=True) for path in (a, b)), strict=True):
        np.testing.assert_array_equal(x, y)
