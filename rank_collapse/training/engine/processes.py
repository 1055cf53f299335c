"""Processes that share the seeds of a sweep, as `jax.distributed` starts them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from rank_collapse.training.engine.runs import Runs, join_pieces


def is_first() -> bool:
    """Returns whether this process prints and makes the folder."""
    return jax.process_index() == 0


def count_share(num_seeds: int) -> int:
    """Returns the number of seeds that each process has: the last ones may be repeated."""
    return -(-num_seeds // jax.process_count())


def take_share(numbers: np.ndarray) -> np.ndarray:
    """Returns the seeds of this process."""
    repeats = count_share(len(numbers)) * jax.process_count() - len(numbers)
    padded = np.concatenate([numbers, np.repeat(numbers[-1:], repeats)])
    return padded[jax.process_index() :: jax.process_count()]


def gather(runs: Runs, num_seeds: int) -> Runs:
    """Joins the runs of all processes, on each of them.

    Args:
        runs: Runs of this process, all done, with their state on the host.
        num_seeds: Seeds of all processes.
    """
    if jax.process_count() == 1:
        return runs
    from jax.experimental import multihost_utils

    size = count_share(num_seeds) * (len(runs) // len(np.unique(runs.seeds)))
    fields = {
        "points": runs.points,
        "seeds": runs.seeds,
        "finite_steps": runs.finite_steps,
        "exempt": runs.exempt,
        "state": list(runs.state),
        "metrics": [[join_pieces(p)] for p in runs.metrics],
        "looks": [[join_pieces(p)] for p in runs.looks],
    }

    def exchange(array: np.ndarray) -> Any:
        """Joins the arrays of all processes, padded to one size."""
        padded = np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
        # As bytes: what is gathered keeps its dtype, 64 bits too.
        raw = np.frombuffer(np.ascontiguousarray(padded).tobytes(), np.uint8)
        everyone = np.asarray(multihost_utils.process_allgather(raw))
        gathered = np.frombuffer(everyone.tobytes(), array.dtype)
        return gathered.reshape(jax.process_count() * size, *array.shape[1:])

    return dataclasses.replace(runs, **jax.tree.map(exchange, fields))
