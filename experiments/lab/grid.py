"""The points of a run's axes that are measured side by side, each by a worker.

A worker has a folder of its own below the run's, points/<number>, from which it goes on where it
was interrupted. It returns the arrays: the run's own folder is written by one process.
"""

import contextlib
import copy
import multiprocessing
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab import devices, progress
from experiments.lab.flags import Flags, arguments_of, parse, precision
from experiments.lab.folder import RunFolder
from experiments.lab.pool import workers


def measured_here(experiment: str, arguments: Sequence[str], number: int) -> dict[str, np.ndarray]:
    """What a worker finds of one group of points, by the names of the run's arrays.

    Args:
        experiment: The experiment's module.
        arguments: Its flags, with the folder of this group.
        number: Of the group; of a point whose flags are invalid the parent says so.
    """
    from experiments.lab.experiment import experiment_of  # here: it imports this file

    own = experiment_of(experiment)
    options = parse(copy.deepcopy(own.flags), arguments)
    in_main = threading.current_thread() is threading.main_thread()  # not so of a Dask worker
    if in_main:
        devices.start(options.num_devices)
    signals = progress.stopping() if in_main else contextlib.nullcontext()
    with signals, precision(options), jax.default_matmul_precision("highest"):
        group = groups_of(options)[number]
        with own.opened(options, own.setup(group[0])) as run:
            for point in group:
                with contextlib.suppress(ValueError):
                    own.measure(point, own.setup(point), run.at(point.prefix))
            return run.arrays


def groups_of(options: Flags) -> list[list[Flags]]:
    """The points that are computed together, group by group."""
    return list({id(point.group): point.group for point in options.points()}.values())


def measure_side_by_side(own: Any, options: Flags, run: RunFolder) -> None:
    """Measures what the run lacks of groups of points, where workers are asked for."""
    if not options.axes or "jobs" not in options or not run.writable or run.complete:
        return
    left = {
        number: group
        for number, group in enumerate(groups_of(options))
        if not all(run.part(point.prefix.rstrip("/")) for point in group)
    }
    shared = devices.accelerated() or multiprocessing.parent_process() is not None
    jobs = min(len(left), options.jobs or (1 if shared else devices.cores()))
    if not left or (jobs < 2 and options.scheduler is None):
        return
    given = arguments_of(options)
    given += [f"--num_devices={options.num_devices or max(1, devices.cores() // jobs)}"]
    places = {number: Path(run.path).resolve() / "points" / str(number) for number in left}
    with (
        progress.Progress(len(left), "points", log=run.log) as bar,
        workers(jobs, options.scheduler) as pool,
    ):
        running = {
            pool.submit(measured_here, own.module, [*given, f"--output_dir={path}"], number): path
            for number, path in places.items()
        }
        for future in futures.as_completed(running):
            run.save_arrays(future.result())
            move_files(running[future], run.path)
            bar.advance()
    shutil.rmtree(run.path / "points", ignore_errors=True)


def move_files(folder: Path, target: Path) -> None:
    """Lines that were written while a group was trained, beside the run's own."""
    for path in folder.glob("metrics/*"):
        (target / "metrics").mkdir(exist_ok=True)
        os.replace(path, target / "metrics" / path.name)
