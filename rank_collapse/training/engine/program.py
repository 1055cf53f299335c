"""Runs of one program on the devices: a group of them at a time, several steps in one call.

A group of runs is padded to `size` runs. Leaves are the arrays of the state in order; those that
`step` returns unchanged (data) are neither carried nor checked. Inputs are the keys and the traced
values of the runs.

A run is a seed at a point of the swept floats. All runs of a group are at the same step. The loop
over the steps has a traced length, so one program serves all chunks, including the shorter last one
and the repetition that finds the last finite state.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rank_collapse.runs import memory, seeds
from rank_collapse.runs.states import is_key
from rank_collapse.training.engine.finite import (
    are_finite,
    find_last_finite,
    find_wrong,
    select_rows,
)
from rank_collapse.training.engine.functions import Functions
from rank_collapse.training.engine.runs import Runs, wrap_keys

LOOK = 0x6C6F6F6B  # folded into a seed's key for `look`, whose draws are no others'


class Program:
    """The compiled functions of one point of the static values.

    Args:
        functions: Traced functions of one run.
        hyper: Shapes of the leaves of its traced values.
        key: Shape and dtype of its key.
        mesh: The devices.
        every: The most steps in one call.
        at_once: Runs that a device vmaps over.
        size: Runs at a time, a multiple of the devices.
        finite: Names of the metrics that must be finite; None for all.
        freezes: Whether a run that is no longer finite keeps its last finite state; if not, it
            continues, and the states' memory is reused.

    Attributes:
        functions, every: The functions, and the largest number of steps in one call.
        size: Runs at a time; `compile` makes it fewer where memory does not hold them.
    """

    def __init__(
        self,
        functions: Functions,
        *,
        hyper: Sequence[Any],
        key: Any,
        mesh: Mesh,
        every: int,
        at_once: int | None,
        size: int,
        finite: Sequence[str] | None = None,
        freezes: bool = True,
    ):
        self.functions, self._hyper, self._key = functions, hyper, key
        self._mesh, self.every, self._at_once, self.size = mesh, every, at_once, size
        self._freezes, self._advance, self._look = freezes, None, None
        self._by_seed, self._flags = seeds.seed_sharding(mesh), (b"", None)
        shared = NamedSharding(mesh, PartitionSpec())
        traced = functions.init, functions.step, functions.look
        self._consts = [f and jax.device_put(f.consts, shared) for f in traced]
        self._must = [
            i
            for i, name in enumerate(functions.metric_names)
            if finite is None or name in finite
            if jnp.issubdtype(functions.metric_shapes[i].dtype, jnp.inexact)
        ]
        # `begin` runs once: quick compilation counts, not speed. (Many copies of threefry are slow
        # to optimise.)
        self._begin = self._spread(self._begin_run, level=0)
        self._select = jax.jit(select_rows)

    def _spread(self, fn, **options):
        return seeds.run_seeds(fn, self._mesh, at_once=self._at_once, **options)

    def _begin_run(self, key, hyper, consts):
        leaves = self.functions.init(consts, key, *hyper)
        return leaves, are_finite(leaves) if self._freezes else None

    def _advance_run(self, changing, unchanged, hyper, active, shared):
        """Makes the steps from start to stop of one run; an inactive run keeps its state.

        Args:
            changing, unchanged: Leaves of the state that steps change, and the others.
            hyper: Values of the run.
            active: Whether the run makes steps.
            shared: (start, stop, constants of the programs), the same for all runs.

        Returns:
            (the changed leaves, metrics [steps, ...], for each changed leaf whether it is finite;
            None if runs that diverge are not stopped).
        """
        start, stop, consts = shared
        is_looped = self._at_once == 1
        turns_end = jnp.where(active, stop, start) if is_looped else stop

        def body(index, carry):
            """Makes one step: (changed leaves, metrics with those of this step at its index)."""
            changing, metrics = carry
            state = self._join(changing, unchanged)
            outputs = self.functions.step(consts, *state, *hyper, index)
            metrics = [
                jax.lax.dynamic_update_index_in_dim(a, b, index - start, 0)
                for a, b in zip(metrics, outputs[len(state) :], strict=True)
            ]
            return self._split(outputs[: len(state)])[0], metrics

        shapes = self.functions.metric_shapes
        empty = [jnp.zeros((self.every, *m.shape), m.dtype) for m in shapes]
        new, metrics = jax.lax.fori_loop(start, turns_end, body, (changing, empty))
        if not is_looped and self._freezes:
            new = [jnp.where(active, a, b) for a, b in zip(new, changing, strict=True)]
        return new, metrics, are_finite(new) if self._freezes else None

    def _look_run(self, leaves, hyper, key, consts):
        return self.functions.look(consts, *leaves, *hyper, jax.random.fold_in(key, LOOK))

    def _split(self, leaves):
        """Splits leaves of the state: (those that steps change, the others)."""
        changing, unchanged = [], []
        for leaf, is_unchanged in zip(leaves, self.functions.unchanged, strict=True):
            (unchanged if is_unchanged else changing).append(leaf)
        return changing, unchanged

    def _join(self, changing, unchanged):
        """Joins what `_split` split."""
        remaining_changing, remaining_unchanged = iter(changing), iter(unchanged)
        return [
            next(remaining_unchanged) if is_unchanged else next(remaining_changing)
            for is_unchanged in self.functions.unchanged
        ]

    def _by_run(self, shapes, size):
        return [
            jax.ShapeDtypeStruct((size, *a.shape), a.dtype, sharding=self._by_seed) for a in shapes
        ]

    def compile(self, least: int) -> None:
        """Compiles every program that is not compiled yet, for as many runs as fit into memory.

        Args:
            least: The fewest runs, a multiple of the devices.
        """
        if self._advance is not None:
            return
        functions = self.functions
        advance = self._spread(self._advance_run, donate=() if self._freezes else (0,))
        flag, number = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.int32)

        def compile_size(size):
            """Compiles the steps between two looks for a number of runs."""
            parts = *self._split(functions.state_shapes), self._hyper, [flag]
            *arguments, flags = (self._by_run(shapes, size) for shapes in parts)
            shared = number, number, self._consts[1]
            return advance.lower(*arguments, flags[0], shared).compile()

        self._advance, self.size = memory.compile_largest(
            compile_size, self.size, least, self._mesh
        )
        if functions.look is not None:
            parts = functions.state_shapes, self._hyper, [self._key]
            state, values, keys = (self._by_run(shapes, self.size) for shapes in parts)
            look = self._spread(self._look_run)
            self._look = look.lower(state, values, keys[0], self._consts[2]).compile()

    def begin(self, points: np.ndarray, numbers: np.ndarray, make_inputs: Callable) -> Runs:
        """Makes runs before training, whose state stays on the devices.

        Args:
            points, numbers: Indices of the points and numbers of the seeds, [r] each.
            make_inputs: (points, numbers) → their keys, and the leaves of their traced values.
        """
        count, functions = len(numbers), self.functions
        inputs = self._lay_out_inputs(points, numbers, make_inputs)
        state, finite = self._begin(*inputs, self._consts[0])
        exempt = np.zeros((count, len(state)), bool)  # not used if runs that diverge continue
        if self._freezes:
            exempt = ~np.asarray(finite)[:count]
        return Runs(
            points,
            numbers,
            0,
            state,
            [[np.zeros((count, 0, *m.shape), m.dtype)] for m in functions.metric_shapes],
            [[np.zeros((count, 0, *m.shape), m.dtype)] for m in functions.look_shapes],
            (),
            np.full(count, -1),
            exempt,
            inputs,
        )

    def _lay_out_inputs(self, points, numbers, make_inputs):
        """Makes the keys and values of runs, and puts them on the devices."""
        # Padded before: groups of any size compile the same small programs that make keys.
        repeats = 0, self.size - len(numbers)
        inputs = make_inputs(*(np.pad(names, repeats, "edge") for names in (points, numbers)))
        return jax.device_put(inputs, self._by_seed)

    def lay_out(self, runs: Runs, make_inputs: Callable) -> Runs:
        """Puts runs on the devices.

        Args:
            runs: Runs on the host.
            make_inputs: See `begin`.
        """
        leaves = map(wrap_keys, runs.state, self.functions.state_shapes)
        state = seeds.shard_seeds(list(leaves), self._mesh, self.size)
        inputs = self._lay_out_inputs(runs.points, runs.seeds, make_inputs)
        return dataclasses.replace(runs, state=state, inputs=inputs)

    def unflatten(self, runs: Runs) -> Any:
        """Returns the states of runs as the pytree that `init` returns, [size, ...]."""
        return jax.tree.unflatten(jax.tree.structure(self.functions.init.out), runs.state)

    def unflatten_look(self, leaves: Sequence[Any]) -> Any:
        """Returns leaves as the pytree that `look` returns."""
        return jax.tree.unflatten(jax.tree.structure(self.functions.look.out), leaves)

    def to_host(self, runs: Runs) -> Runs:
        """Copies the state of runs to the host, random keys as their data."""
        leaves = [jax.random.key_data(a) if is_key(a) else a for a in runs.state]
        return dataclasses.replace(runs, state=seeds.to_host(leaves, len(runs)), inputs=None)

    def look_at(self, runs: Runs) -> Runs:
        """Adds what `look` gives now."""
        if not self.functions.look_shapes:
            return runs
        keys, values = runs.inputs
        new = self._look(runs.state, values, keys, self._consts[2])
        looks = [
            [*pieces, np.asarray(array)[: len(runs), None]]
            for pieces, array in zip(runs.looks, new, strict=True)
        ]
        return dataclasses.replace(runs, looks=looks, look_steps=(*runs.look_steps, runs.step))

    def train(self, runs: Runs, steps: int) -> Iterator[tuple[Runs, list[tuple[int, str]]]]:
        """Makes the steps up to a number, and looks after each call.

        Args:
            runs: Runs on the devices.
            steps: Steps of each run.

        Yields:
            After each call (runs, [(position, message)] for the runs that are no longer finite).
        """
        while runs.step < steps:
            stop = min(steps, (runs.step // self.every + 1) * self.every)
            runs, stopped = self.advance(runs, stop)
            runs = self.look_at(runs)
            yield runs, stopped

    def advance(self, runs: Runs, stop: int) -> tuple[Runs, list[tuple[int, str]]]:
        """Makes the steps up to a number; a run that is no longer finite keeps its last finite
        state.

        Args:
            runs: Runs on the devices.
            stop: At most `every` steps from where they are.

        Returns:
            (runs, [(position, message)] for the runs that are no longer finite).
        """
        active = runs.finite_steps < 0
        end = stop if active.any() else runs.step  # no turn where no run makes it
        state, metrics, finite = self._call(runs, runs.state, active, runs.step, end)
        new = [np.asarray(m)[: len(runs), : stop - runs.step] for m in metrics]
        pieces = [[*old, piece] for old, piece in zip(runs.metrics, new, strict=True)]
        advanced = dataclasses.replace(runs, step=stop, state=state, metrics=pieces)
        if not self._freezes:
            return advanced, []
        if finite.all() and all(np.isfinite(new[i]).all() for i in self._must):
            return advanced, []  # as most calls do, with no further search
        wrong_step, wrong = find_wrong(new, self._must, len(runs), runs.step, stop)
        is_wrong = active & ((wrong_step < stop) | ~self._has_finite(runs, finite))
        if not is_wrong.any():
            return advanced, []
        first = np.where(is_wrong, wrong_step, -1)

        def make_steps(state, active, start, stop):
            state, _, finite = self._call(runs, state, active, start, stop)
            return state, self._has_finite(runs, finite)

        last, state = find_last_finite(
            make_steps, self._put, runs.state, state, first, runs.step, stop
        )
        finite_steps, stopped = np.where(is_wrong, last, runs.finite_steps), []
        for i in np.flatnonzero(is_wrong):
            message = f"its state is not finite at step {finite_steps[i]}"
            if wrong[i] >= 0:
                name, step = self.functions.metric_names[wrong[i]], wrong_step[i]
                metric = new[wrong[i]][i, step - runs.step]
                value = "not finite" if metric.ndim else f"{metric}"
                message = f"{name} is {value} at step {step}"
            stopped.append((int(i), message))
        return dataclasses.replace(advanced, state=state, finite_steps=finite_steps), stopped

    def _call(self, runs, state, active, start, stop):
        """Call the compiled steps.

        Args:
            runs: The runs.
            state: Leaves of their state.
            active: Bool [r], which runs make steps.
            start, stop: The first step, and the step after the last.

        Returns:
            (state, metrics, which leaves are finite [r, changing]). Unchanged leaves count as
            finite. The third is None if runs that diverge are not stopped.
        """
        flags = self._lay_out_flags(active)
        changing, unchanged = self._split(state)
        shared = np.int32(start), np.int32(stop), self._consts[1]
        changing, metrics, finite = self._advance(
            changing, unchanged, runs.inputs[1], flags, shared
        )
        if self._freezes and not changing:
            # JAX cannot read a result of size 0 that is the only result on several devices.
            finite = np.ones((len(active), 0), bool)
        elif self._freezes:
            finite = np.asarray(finite)[: len(active)]
        return self._join(changing, unchanged), metrics, finite

    def _has_finite(self, runs, finite):
        """Returns which runs have a finite state [r], of what `_call` says of its leaves."""
        exempt = runs.exempt[:, ~np.array(self.functions.unchanged)]
        return (finite | exempt).all(axis=1)

    def _lay_out_flags(self, flags):
        """Puts a flag for each run on the devices, padded with False."""
        padded = np.zeros(self.size, bool)
        padded[: len(flags)] = flags
        if padded.tobytes() != self._flags[0]:  # most calls have those of the last one
            self._flags = padded.tobytes(), jax.device_put(padded, self._by_seed)
        return self._flags[1]

    def _put(self, rows, new, state):
        """Puts the states of some rows in place of others."""
        if not rows.any():
            return state
        return self._select(self._lay_out_flags(rows), new, state)
