"""Trains the runs of a sweep: groups that fit into memory, chunk by chunk, with snapshots."""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from rank_collapse.checks import refuse_if
from rank_collapse.printed import format_count
from rank_collapse.runs.files import RunError
from rank_collapse.runs.progress import Progress
from rank_collapse.runs.seeds import fold_key
from rank_collapse.training.engine import processes
from rank_collapse.training.engine.axes import Axes
from rank_collapse.training.engine.files import SweepFolder
from rank_collapse.training.engine.functions import Functions
from rank_collapse.training.engine.program import Program
from rank_collapse.training.engine.result import Points
from rank_collapse.training.engine.runs import Runs, join_runs

MOST_NAMED = 8  # runs that are no longer finite, in one chunk


@dataclasses.dataclass
class Trainer:
    """Trains runs, and keeps those that are done.

    Attributes:
        functions: Functions of each point of the static values.
        axes, base_key, finite: Axes, base key and finite metrics of the sweep.
        mesh, at_once: Devices of the runs, and number of runs over which a device vmaps.
        steps, every: Steps of each run, and steps in one call.
        store: The folder, or None.
        progress: Counts steps of all runs.
        programs: Compiled programs by point, from another trainer of the same runs.
    """

    functions: Sequence[Functions]
    axes: Axes
    base_key: Any
    finite: Sequence[str] | None
    mesh: Mesh
    at_once: int | None
    steps: int
    every: int
    store: SweepFolder | None
    progress: Progress
    programs: dict[int, Program] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self._saved: dict[int, list[Runs]] = {}
        self._gathered: Mapping[int, list[Runs]] = defaultdict(list)
        self.seconds = {"compiling": 0.0, "running": 0.0}

    def train(self, numbers: np.ndarray, most: int) -> None:
        """Trains some seeds at all points, the combinations of static values, each of which has a
        program.

        Runs that the folder holds are taken from there; unfinished ones are continued.

        Args:
            numbers: Numbers of the seeds.
            most: The largest number of seeds in any such call, whose programs this call uses.

        Raises:
            ValueError: The folder has runs of more steps.
            RunError: A file of the folder is damaged or cannot be written.
        """
        share = processes.take_share(numbers)
        for point, functions in enumerate(self.functions):
            saved = self._load(point, share)
            missing = self._list_missing(saved, share)
            by_step: Mapping[int, list[Runs]] = defaultdict(list)
            for runs in saved:
                refuse_if(
                    runs.step > self.steps,
                    f"steps={self.steps}, but {self.store and self.store.path} has {runs.step} "
                    "steps: a sweep can be extended, not shortened",
                )
                by_step[runs.step].append(runs)
                self.progress.skip(runs.step * len(runs))
            done = by_step.pop(self.steps, [])
            unfinished = [join_runs(by_step[step]) for step in sorted(by_step, reverse=True)]
            if unfinished or len(missing):
                program = self._program(point, functions, most)
                for group in self._iterate_groups(program, unfinished, missing):
                    done.append(self._train_group(point, program, group))
            self._gathered[point].append(processes.gather(join_runs(done), len(numbers)))

    def _list_missing(self, saved, share):
        """Lists the runs that are not saved.

        Args:
            saved: Saved runs of one combination of static values.
            share: Numbers of the seeds that are wanted.

        Returns:
            Int [r, 2], (index of the swept values, seed) of each.
        """
        names = {name for runs in saved for name in runs.names()}
        wanted = itertools.product(share.tolist(), range(self.axes.num_hyper))
        missing = [(index, seed) for seed, index in wanted if (index, seed) not in names]
        return np.array(missing, int).reshape(-1, 2)

    def _iterate_groups(self, program, unfinished, missing):
        """Yields the runs that are to be trained, on the devices, as many as a program takes.

        Args:
            program: The compiled program.
            unfinished: Saved runs that are to be continued.
            missing: (index of the swept values, seed) of each run that is to be begun.
        """
        size = program.size
        for runs in unfinished:
            for start in range(0, len(runs), size):
                group = runs.take(np.arange(start, min(start + size, len(runs))))
                yield program.lay_out(group, self._make_inputs)
        for start in range(0, len(missing), size):
            indices, seeds = missing[start : start + size].T
            begun = program.begin(indices, seeds, self._make_inputs)
            yield program.look_at(begun)

    def points(self, numbers: np.ndarray) -> Points:
        """Returns all runs of the seeds that were trained.

        Args:
            numbers: Numbers of the seeds.
        """
        runs = [join_runs(self._gathered[point]) for point in range(len(self.functions))]
        return Points(self.axes, self.functions, runs, numbers)

    def _load(self, point, share):
        """Loads the saved runs of some seeds from the folder.

        Args:
            point: Index of the combination of static values.
            share: Numbers of the seeds.

        Returns:
            Runs, in groups that are at the same step; [] without a folder.
        """
        if self.store is None:
            return []
        if point not in self._saved:
            self._saved[point] = self.store.load(self.functions[point], point)
        # Without the last look of a sweep of fewer steps, all runs can be joined.
        look_steps = {*range(0, self.steps, self.every), self.steps}
        parts = []
        for runs in self._saved[point]:
            chosen = np.flatnonzero(np.isin(runs.seeds, share))
            if len(chosen):
                parts.append(runs.take(chosen).keep_looks(look_steps))
        return parts

    def _program(self, point, functions, most):
        """Returns the program for a combination of static values, compiled at its first use.

        Args:
            point: Index of the combination.
            functions: Its traced functions.
            most: The largest number of seeds.
        """
        if point not in self.programs:
            # Two runs at least on a device: a loop of one turn would be no loop, with other
            # rounding.
            least = self.mesh.size * (2 if self.at_once == 1 else 1)
            num_runs = self.axes.num_hyper * processes.count_share(most)
            program = Program(
                functions,
                hyper=[a[0] for a in self.axes.hyper_leaves(np.zeros(1, int))],
                key=self.base_key,
                mesh=self.mesh,
                every=max(1, min(self.every, self.steps)),
                at_once=self.at_once,
                size=-(-num_runs // least) * least,
                finite=self.finite,
            )
            begun = time.monotonic()
            with self.progress.time_activity("compiling"):
                program.compile(least)
            self.seconds["compiling"] += time.monotonic() - begun
            self.programs[point] = program
        return self.programs[point]

    def _make_inputs(self, indices, numbers):
        """Makes the keys and the swept values of some runs from their indices and seeds."""
        return fold_key(self.base_key, numbers), self.axes.hyper_leaves(indices)

    def _train_group(self, point, program, initial):
        """Trains runs that are on the devices to the last step; returns them on the host.

        Between chunks of steps it reports runs that stopped, and saves states when the folder's
        interval has passed. It also saves them before an interruption is passed on, so that the
        same call resumes there.

        Args:
            point: Index of the combination of static values.
            program: The compiled program.
            initial: The runs.
        """
        begun, runs, done, is_saved = time.monotonic(), initial, initial.step, False
        try:
            for runs, stopped in program.train(initial, self.steps):
                is_saved = False
                self._name_stopped(point, runs, stopped)
                if self.store is not None and self.store.is_due() and runs.step < self.steps:
                    self.store.save(point, program.to_host(runs))
                    is_saved = True
                made = len(runs) * (runs.step - done)
                self.progress.advance(made, partial(self._describe_metric, runs))
                done = runs.step
            runs = program.to_host(runs)
            if self.store is not None:
                self.store.save(point, runs)
        except RunError:  # of the folder: what it has stays
            raise
        except BaseException:
            if self.store is not None and not is_saved and 0 < runs.step < self.steps:
                self.store.save(point, program.to_host(runs))
            if self.store is not None:
                self.progress.say(f"stopped at step {runs.step}; the same call resumes")
            raise
        self.seconds["running"] += time.monotonic() - begun
        return runs

    def _name_stopped(self, point, runs, stopped):
        """Reports the first runs that stopped, with their reasons, and the number of the others.

        Args:
            point: Index of the combination of static values.
            runs: The runs on the devices.
            stopped: (position among these runs, reason) of each that stopped.
        """
        for position, reason in stopped[:MOST_NAMED]:
            name = self.axes.describe_run(
                point, int(runs.points[position]), int(runs.seeds[position])
            )
            last = runs.finite_steps[position]
            self.progress.say(
                f"{name}: {reason}; it keeps its state after {format_count(last, 'step')}"
            )
        if len(stopped) > MOST_NAMED:
            self.progress.say(f"and {format_count(len(stopped) - MOST_NAMED, 'more run')}")

    def _describe_metric(self, runs):
        """Describes the median of the first number that is measured, such as "loss 0.31"."""
        names = [*self.functions[0].metric_names]
        names.sort(key=lambda name: name != "loss")
        for name in names:
            pieces = runs.metrics[self.functions[0].metric_names.index(name)]
            last = pieces[-1][runs.finite_steps < 0, -1]
            if last.ndim == 1 and len(last) and last.dtype.kind in "fV":
                return f"{name} {np.median(last.astype(np.float64)):.4g}"
        return ""
