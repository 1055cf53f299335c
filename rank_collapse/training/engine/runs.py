"""Runs that are at the same step: their states, metrics and looks."""

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs at one step. All their arrays are on the host, or their state alone is on the devices.

    Attributes:
        points: Position among the points of the swept floats [r].
        seeds: Number of the seed [r].
        step: How many steps are done.
        state: Leaves [r, ...], random keys as their data.
        metrics: Each leaf in pieces [r, steps, ...] that follow each other.
        looks: Each leaf in pieces [r, looks, ...].
        look_steps: At which steps.
        finite_steps: Number of steps for which a run was finite [r], −1 for all; the state is the
            state at that step.
        exempt: Leaves of the state that were not finite before training [r, leaves].
        inputs: (keys, leaves of the traced values) [padded runs] of runs that are on the devices.
    """

    points: np.ndarray
    seeds: np.ndarray
    step: int
    state: Sequence[Any]
    metrics: Sequence[Sequence[np.ndarray]]
    looks: Sequence[Sequence[np.ndarray]]
    look_steps: Sequence[int]
    finite_steps: np.ndarray
    exempt: np.ndarray
    inputs: Any = None

    def __len__(self) -> int:
        return len(self.seeds)

    def names(self) -> list[tuple[int, int]]:
        """Lists (index of the combination of swept numbers, seed) of each run."""
        return list(zip(self.points.tolist(), self.seeds.tolist(), strict=True))

    def take(self, positions: np.ndarray) -> "Runs":
        """Returns some of the runs; their state must be on the host."""

        def pick(leaves):
            return [[piece[positions] for piece in leaf] for leaf in leaves]

        return dataclasses.replace(
            self,
            points=self.points[positions],
            seeds=self.seeds[positions],
            state=[leaf[positions] for leaf in self.state],
            metrics=pick(self.metrics),
            looks=pick(self.looks),
            finite_steps=self.finite_steps[positions],
            exempt=self.exempt[positions],
        )

    def keep_looks(self, steps: Container[int]) -> "Runs":
        """Returns the runs with their looks at some steps alone."""
        places = [i for i, step in enumerate(self.look_steps) if step in steps]
        return dataclasses.replace(
            self,
            looks=[[join_pieces(pieces)[:, places]] for pieces in self.looks],
            look_steps=tuple(self.look_steps[i] for i in places),
        )


def join_pieces(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Joins arrays [r, k, ...] of consecutive steps along the axis of steps."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)


def join_runs(parts: Sequence[Runs]) -> Runs:
    """Joins runs that are at the same step."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def join(name):
        """Joins an array [r, ...] of every part."""
        return np.concatenate([getattr(part, name) for part in parts])

    def join_lists(name):
        """Joins a list of leaves of every part; each leaf is in pieces along the steps."""
        joined = []
        for leaves in zip(*(getattr(part, name) for part in parts), strict=True):
            joined.append([np.concatenate([join_pieces(pieces) for pieces in leaves])])
        return joined

    return dataclasses.replace(
        first,
        points=join("points"),
        seeds=join("seeds"),
        finite_steps=join("finite_steps"),
        exempt=join("exempt"),
        metrics=join_lists("metrics"),
        looks=join_lists("looks"),
        state=[np.concatenate(leaves) for leaves in zip(*(p.state for p in parts), strict=True)],
    )


def wrap_keys(leaf: Any, shape: Any) -> Any:
    """Converts the data of random keys to keys, where a leaf of such a shape and dtype holds
    keys."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(jnp.zeros((), shape.dtype)))
