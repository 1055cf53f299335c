"""Which runs are no longer finite, the metric that shows it first, and their last finite states."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def are_finite(leaves: Sequence[Any]) -> jax.Array:
    """Returns which leaves of a run are finite [leaves]; numbers that are whole always are."""
    flags = [
        jnp.isfinite(a).all() if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.bool_(True)
        for a in leaves
    ]
    return jnp.array(flags, bool)


def select_rows(rows: jax.Array, new: Sequence[Any], state: Sequence[Any]) -> list[jax.Array]:
    """Puts the states of some runs in place of others.

    Args:
        rows: Which runs [r] have a new state.
        new, state: Leaves [r, ...] of the new states, and of those of the other runs.
    """
    return [
        jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
        for a, b in zip(new, state, strict=True)
    ]


def find_wrong(
    metrics: Sequence[np.ndarray], must: Sequence[int], count: int, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the first step of each run whose metrics are not finite.

    Args:
        metrics: Arrays [runs, steps, ...].
        must: Indices of the metrics that must be finite.
        count: Number of runs.
        start, stop: The first step, and the step after the last.

    Returns:
        (the step [r], `stop` if there is none; the number of the metric [r], −1 if there is none).
    """
    first, wrong_metric = np.full(count, stop), np.full(count, -1)
    for i in must:
        bad = ~np.isfinite(metrics[i])
        bad = bad.reshape(*bad.shape[:2], -1).any(axis=2)
        at = np.where(bad.any(axis=1), start + bad.argmax(axis=1), stop)
        wrong_metric, first = np.where(at < first, i, wrong_metric), np.minimum(at, first)
    return first, wrong_metric


def find_last_finite(
    make_steps: Callable,
    put: Callable,
    start_state: Sequence[Any],
    state: Sequence[Any],
    first: np.ndarray,
    start: int,
    stop: int,
) -> tuple[np.ndarray, Sequence[Any]]:
    """Finds the last finite state of each run that is no longer finite, by making its steps again.

    Args:
        make_steps: (state, which runs make steps [r], the first step, the step after the last) →
            (the state after them, which runs have a finite one [r]).
        put: (which runs [r], new, state) → the state, with that of these runs from `new`.
        start_state, state: Leaves [r, ...] of the states before `start`, and before `stop`.
        first: The first step with a metric that is not finite [r]; `stop` where only the state is
            not finite, −1 for finite runs.
        start, stop: The first step, and the step after the last.

    Returns:
        (number of steps done there [r], the states, with these states in place of the later ones).
    """
    active, last = first >= 0, np.full(len(first), -1)
    # Of most it is the state that the step with the first wrong metric began with, or the one
    # before it. They are reached in one passage through the chunk.
    wanted = {int(s) for s in first[active]} | {int(s) - 1 for s in first[active]}
    current, step = start_state, start
    for target in sorted(s for s in wanted if start <= s <= stop):
        current, is_finite = make_steps(current, active, step, target)
        step = target
        is_near = (first == target) | (first - 1 == target)
        hit = is_near & is_finite
        last = np.where(hit, target, last)
        state = put(hit, current, state)
    for i in np.flatnonzero(active & (last < 0)):
        low, high, row = start, int(first[i]) - 1, np.arange(len(first)) == i
        best = start_state
        while high - low > 1:
            middle = (low + high) // 2
            new, is_finite = make_steps(start_state, row, start, middle)
            if is_finite[i]:
                low, best = middle, new
            else:
                high = middle
        last[i], state = low, put(row, best, state)
    return last, state
