"""A sweep of a few numbers, steps that are built from functions, and the files of a folder."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.training import sweep

DATA = {"shift": np.arange(3.0)}


def init(key, hyper):
    return {"w": jax.random.normal(key, (3,))}


def step(state, hyper, index):
    loss = jnp.sum(state["w"] ** 2)
    return {"w": (1 - hyper["rate"]) * state["w"] + DATA["shift"]}, {"loss": loss}


def run(**changes):
    options = {"init": init, "step": step, "steps": 4, "seeds": 2, "every": 2, "quiet": True}
    return sweep(**options | {"hyper": {"rate": [0.1, 0.2]}} | changes)


def with_static(**static):
    """Returns changes with values of static that init and step take."""
    return {
        "static": static,
        "init": lambda key, hyper, **_: init(key, hyper),
        "step": lambda state, hyper, index, **_: step(state, hyper, index),
    }


def list_files(folder):
    """Returns the bytes of all files of a folder."""
    paths = [p for p in Path(folder).rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}
