"""Runs of one program on the devices: a group of them at a time, so many steps in one call.

A run is a seed at a point of the swept floats. Those of a group are at the same step. The loop over
the steps has a traced number of turns: one program serves all chunks, the last and shorter one too,
and the repetition that looks for the last finite state.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rank_collapse.runs import memory, seeds
from rank_collapse.runs.progress import Progress
from rank_collapse.training.engine.axes import Axes
from rank_collapse.training.engine.functions import Functions

LOOK = 0x6C6F6F6B  # folded into a seed's key for `look`, whose draws are no others'


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs at one step, on the host or, their state alone, on the devices.

    Attributes:
        points: Position among the points of the swept floats [r].
        seeds: Number of the seed [r].
        step: How many steps are done.
        state: Leaves [r, ...], random keys as their data.
        metrics: Each leaf in pieces [r, steps, ...] that follow each other.
        looks: Each leaf in pieces [r, looks, ...].
        look_steps: At which steps.
        finite_steps: How many steps a run was finite [r], -1 for all: its state is of then.
        exempt: Leaves of the state that were not finite before training [r, leaves].
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

    def __len__(self) -> int:
        return len(self.seeds)

    def names(self) -> list[tuple[int, int]]:
        """Lists (point, seed) of each run."""
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


def join_pieces(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Joins pieces [r, k, ...] along their second axis."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)


def join_runs(parts: Sequence[Runs]) -> Runs:
    """Joins runs that are at the same step."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def stack(name):
        trees = [getattr(part, name) for part in parts]
        return [[np.concatenate([join_pieces(t[i]) for t in trees])] for i in range(len(trees[0]))]

    def join(name):
        return np.concatenate([getattr(part, name) for part in parts])

    state = [np.concatenate(leaves) for leaves in zip(*(p.state for p in parts), strict=True)]
    return dataclasses.replace(
        first,
        **{name: join(name) for name in ("points", "seeds", "finite_steps", "exempt")},
        **{name: stack(name) for name in ("metrics", "looks")},
        state=state,
    )


class Program:
    """The compiled functions of one point of the static values.

    Args:
        functions: Of one run.
        axes: With the swept floats.
        base_key: Seed s has the key fold_in(base_key, s).
        mesh: The devices.
        every: The most steps in one call.
        at_once: Runs that a device vmaps over.
        num_runs: The most at a time that are wanted; fewer where memory does not hold them.
        finite: Names of the metrics that must be finite; None for all.
        progress: Says how long compiling took.

    Attributes:
        size: Runs at a time.
        seconds: How long compiling took.
    """

    def __init__(
        self,
        functions: Functions,
        *,
        axes: Axes,
        base_key: Any,
        mesh: Mesh,
        every: int,
        at_once: int | None,
        num_runs: int,
        finite: Sequence[str] | None,
        progress: Progress,
    ):
        self._axes, self._base_key, self._mesh, self._every = axes, base_key, mesh, every
        self._progress = progress
        self._by_seed, self._shared = (
            seeds.seed_sharding(mesh),
            NamedSharding(mesh, PartitionSpec()),
        )
        self._functions = functions
        self._must = [
            i
            for i, name in enumerate(functions.metric_names)
            if finite is None or name in finite
            if jnp.issubdtype(functions.metric_shapes[i].dtype, jnp.inexact)
        ]
        self._looped = at_once == 1
        # Two runs at least on a device: a loop of one turn would be no loop, with other rounding.
        least = mesh.size * (2 if self._looped else 1)
        self._compile(at_once, -(-num_runs // least) * least, least)

    def _compile(self, at_once, size, least):
        functions, every = self._functions, self._every
        init, step, look = functions.init, functions.step, functions.look
        num_leaves = len(functions.state_shapes)

        def begin(key, hyper, consts):
            leaves = init(consts, key, *hyper)
            return leaves, _are_finite(leaves)

        def advance(leaves, hyper, active, shared):
            start, stop, consts = shared
            turns_end = jnp.where(active, stop, start) if self._looped else stop

            def body(index, carry):
                state, kept = carry
                outputs = step(consts, *state, *hyper, index)
                kept = [
                    jax.lax.dynamic_update_index_in_dim(a, b, index - start, 0)
                    for a, b in zip(kept, outputs[num_leaves:], strict=True)
                ]
                return outputs[:num_leaves], kept

            empty = [jnp.zeros((every, *m.shape), m.dtype) for m in self._functions.metric_shapes]
            state, kept = jax.lax.fori_loop(start, turns_end, body, (leaves, empty))
            if not self._looped:
                state = [jnp.where(active, a, b) for a, b in zip(state, leaves, strict=True)]
            return state, kept, _are_finite(state)

        def run_look(leaves, hyper, key, consts):
            return look(consts, *leaves, *hyper, jax.random.fold_in(key, LOOK))

        def spread(fn, level=1):
            return seeds.run_seeds(fn, self._mesh, at_once=at_once, level=level)

        def by_seed(shapes, size):
            return [
                jax.ShapeDtypeStruct((size, *a.shape), a.dtype, sharding=self._by_seed)
                for a in shapes
            ]

        hyper = [
            jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
            for a in self._axes.hyper_leaves(np.zeros(1, int))
        ]
        key_shape = jax.ShapeDtypeStruct((), self._base_key.dtype)
        flag, number = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.int32)
        self._consts = [jax.device_put(f.consts, self._shared) for f in (init, step)]

        def shapes_of(consts):
            return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._shared) for a in consts]

        def compile_size(size):
            arguments = [by_seed(shapes, size) for shapes in (functions.state_shapes, hyper)]
            shared = (number, number, shapes_of(step.consts))
            return spread(advance).lower(*arguments, by_seed([flag], size)[0], shared).compile()

        with self._progress.time_activity("compiling"):
            self._advance, self.size = memory.compile_largest(compile_size, size, least, self._mesh)
            state, values = (
                by_seed(self._functions.state_shapes, self.size),
                by_seed(hyper, self.size),
            )
            keys = by_seed([key_shape], self.size)[0]
            self._begin = spread(begin, 0).lower(keys, values, shapes_of(init.consts)).compile()
            if look is not None:
                self._consts.append(jax.device_put(look.consts, self._shared))
                consts = shapes_of(look.consts)
                self._look = spread(run_look).lower(state, values, keys, consts).compile()
        self._select = jax.jit(_select_rows)

    def begin(self, points: np.ndarray, numbers: np.ndarray) -> Runs:
        """Makes the initial runs of some points and seeds; their state stays on the devices."""
        count = len(numbers)
        state, finite = self._begin(self._keys(numbers), self._values(points), self._consts[0])
        runs = Runs(
            points,
            numbers,
            0,
            state,
            [[np.zeros((count, 0, *m.shape), m.dtype)] for m in self._functions.metric_shapes],
            [[np.zeros((count, 0, *m.shape), m.dtype)] for m in self._functions.look_shapes],
            (),
            np.full(count, -1),
            ~np.asarray(finite)[:count],
        )
        return self.look_at(runs)

    def _keys(self, numbers):
        """Returns the keys of seeds, padded and laid out."""
        keys = seeds.fold_key(self._base_key, self._pad(numbers))
        return jax.device_put(keys, self._by_seed)

    def _values(self, points):
        """Returns the traced values of points, padded and laid out."""
        return jax.device_put(self._axes.hyper_leaves(self._pad(points)), self._by_seed)

    def _pad(self, array):
        return np.concatenate([array, np.repeat(array[-1:], self.size - len(array), axis=0)])

    def lay_out(self, runs: Runs) -> Runs:
        """Puts the state of runs on the devices."""
        state = []
        for leaf, shape in zip(runs.state, self._functions.state_shapes, strict=True):
            array = self._pad(leaf)
            if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
                array = jax.random.wrap_key_data(array, impl=key_kind(shape.dtype))
            state.append(jax.device_put(array, self._by_seed))
        return dataclasses.replace(runs, state=state)

    def to_host(self, runs: Runs) -> Runs:
        """Copies the state of runs to the host, random keys as their data."""
        count = len(runs)
        state = [
            np.asarray(
                jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a
            )[:count]
            for a in runs.state
        ]
        return dataclasses.replace(runs, state=state)

    def look_at(self, runs: Runs) -> Runs:
        """Adds what `look` gives now."""
        if not self._functions.look_shapes:
            return runs
        keys, values = self._keys(runs.seeds), self._values(runs.points)
        new = self._look(runs.state, values, keys, self._consts[2])
        looks = [
            [*pieces, np.asarray(array)[: len(runs), None]]
            for pieces, array in zip(runs.looks, new, strict=True)
        ]
        return dataclasses.replace(runs, looks=looks, look_steps=(*runs.look_steps, runs.step))

    def advance(self, runs: Runs, stop: int) -> tuple[Runs, list[tuple[int, str]]]:
        """Makes the steps up to a number; a run that is no longer finite keeps its last state.

        Args:
            runs: On the devices.
            stop: At most `every` steps from where they are.

        Returns:
            (runs, [(position, what happened)] of those that are no longer finite).
        """
        active = runs.finite_steps < 0
        if not active.any():
            return self._rest(runs, stop), []
        values = self._values(runs.points)
        state, metrics, finite = self._call(runs.state, values, active, runs.step, stop)
        new = [np.asarray(m)[: len(runs), : stop - runs.step] for m in metrics]
        wrong_step, wrong = self._find_wrong(new, len(runs), runs.step, stop)
        wrong_state = ~(finite | runs.exempt).all(axis=1)
        is_wrong = active & ((wrong_step < stop) | wrong_state)
        finite_steps, stopped = runs.finite_steps, []
        if is_wrong.any():
            first = np.where(is_wrong, wrong_step, -1)
            last, state = self._find_last_finite(runs, values, state, first, stop)
            finite_steps = np.where(is_wrong, last, finite_steps)
            for i in np.flatnonzero(is_wrong):
                name, value, at = "its state", "not finite", finite_steps[i]
                if wrong[i] >= 0:
                    name, at = self._functions.metric_names[wrong[i]], wrong_step[i]
                    metric = new[wrong[i]][i, at - runs.step]
                    value = value if metric.ndim else f"{metric}"
                stopped.append((int(i), f"{name} is {value} at step {at}"))
        pieces = [[*old, piece] for old, piece in zip(runs.metrics, new, strict=True)]
        new_runs = dataclasses.replace(
            runs, step=stop, state=state, metrics=pieces, finite_steps=finite_steps
        )
        return new_runs, stopped

    def _rest(self, runs, stop):
        """Counts steps that no run makes."""
        shape = len(runs), stop - runs.step
        pieces = [
            [*old, np.zeros((*shape, *m.shape), m.dtype)]
            for old, m in zip(runs.metrics, self._functions.metric_shapes, strict=True)
        ]
        return dataclasses.replace(runs, step=stop, metrics=pieces)

    def _call(self, state, values, active, start, stop):
        """Calls the program; returns (state, metrics, which leaves are finite [r, leaves])."""
        flags = np.zeros(self.size, bool)
        flags[: len(active)] = active
        shared = (np.int32(start), np.int32(stop), self._consts[1])
        flags = jax.device_put(flags, self._by_seed)
        state, metrics, finite = self._advance(state, values, flags, shared)
        return state, metrics, np.asarray(finite)[: len(active)]

    def _find_wrong(self, metrics, count, start, stop):
        """Finds the first step whose metrics are not finite [r], `stop` for none, and which."""
        first, which = np.full(count, stop), np.full(count, -1)
        for i in self._must:
            bad = ~np.isfinite(metrics[i])
            bad = bad.reshape(*bad.shape[:2], -1).any(axis=2)
            at = np.where(bad.any(axis=1), start + bad.argmax(axis=1), stop)
            which, first = np.where(at < first, i, which), np.minimum(at, first)
        return first, which

    def _find_last_finite(self, runs, values, state, first, stop):
        """Finds, of runs that are no longer finite, the last finite state before that.

        Args:
            first: The first step with a metric that is not [r], `stop` where the state alone is
                not, -1 of runs that are finite.

        Returns:
            (how many steps are done there [r], the states, with these in their places).
        """
        active, last = first >= 0, np.full(len(first), -1)
        # Of most it is the state that the step with the first wrong metric began with, or the one
        # before it. They are reached in one passage through the chunk.
        wanted = {int(s) for s in first[active]} | {int(s) - 1 for s in first[active]}
        current, step = runs.state, runs.step
        for target in sorted(s for s in wanted if runs.step <= s <= stop):
            current, _, finite = self._call(current, values, active, step, target)
            is_finite = (finite | runs.exempt).all(axis=1)
            step = target
            hit = active & is_finite & ((first == target) | (first - 1 == target))
            last = np.where(hit, target, last)
            state = self._put(hit, current, state)
        for i in np.flatnonzero(active & (last < 0)):
            low, high, row = runs.step, int(first[i]) - 1, np.arange(len(first)) == i
            best = runs.state
            while high - low > 1:
                middle = (low + high) // 2
                new, _, finite = self._call(runs.state, values, row, runs.step, middle)
                if (finite | runs.exempt)[i].all():
                    low, best = middle, new
                else:
                    high = middle
            last[i], state = low, self._put(row, best, state)
        return last, state

    def _put(self, rows, new, state):
        """Puts the states of some rows in place of others."""
        if not rows.any():
            return state
        flags = np.zeros(self.size, bool)
        flags[: len(rows)] = rows
        return self._select(jax.device_put(flags, self._by_seed), new, state)


def _select_rows(rows, new, state):
    return [
        jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
        for a, b in zip(new, state, strict=True)
    ]


def _are_finite(leaves):
    """Returns which leaves of a run are finite [leaves]; numbers that are whole always are."""
    flags = [
        jnp.isfinite(a).all() if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.bool_(True)
        for a in leaves
    ]
    return jnp.stack(flags)


def key_kind(dtype: Any) -> Any:
    """Returns the implementation of random keys of a dtype."""
    return jax.random.key_impl(jnp.zeros((), dtype))
