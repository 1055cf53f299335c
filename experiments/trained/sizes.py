"""What a run of an ensemble takes in memory."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.shell import memory
from rank_collapse.runs.seeds import on_cpu, seed_sharding
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.recipe import Hyper


def bytes_of_a_run(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes: its data, its state, and a copy of that on the way to a checkpoint.

    Args:
        ensemble: What trains it.
        hyper: Floats, or arrays [s]; their names count.
    """
    size = ensemble.mesh.size
    state, data, _ = shapes_of(ensemble, hyper, size)
    each = (2 * memory.size_of(state) + memory.size_of(data)) // size
    if not on_cpu(ensemble.mesh):  # there a device vmaps over its seeds, and a step needs as much
        each += step_bytes(ensemble, hyper)
    return each


def shapes_of(ensemble: Ensemble, hyper: Hyper, size: int) -> tuple[Any, Any, Hyper]:
    """Shapes of the states, the data and the traced values of so many runs."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), size))
    one = jax.ShapeDtypeStruct((size,), jnp.float32)
    hyper = jax.tree.map(lambda _: one, hyper)
    return *jax.eval_shape(ensemble.begin, keys, hyper, None), hyper


def step_bytes(ensemble: Ensemble, hyper: Hyper) -> int:
    """What one run takes in a step beside its arguments, as XLA says of one run a device."""
    sharding = seed_sharding(ensemble.mesh)
    shapes = shapes_of(ensemble, hyper, ensemble.mesh.size)
    laid = jax.tree.map(lambda a: a.update(sharding=sharding), shapes)
    analysis = ensemble.chunk.lower(*laid, jnp.int32(0)).compile().memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
