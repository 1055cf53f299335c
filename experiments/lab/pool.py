"""Work of several processes: the points of one run's axes, and runs of `reproduce`.

Both go through an executor of `concurrent.futures`: processes of this machine, or the workers of a
Dask scheduler (--scheduler). Signals reach the parent alone, which then ends its workers: they save
what they have at the next chunk.

A worker that measures points has a folder of its own below the run's, points/<number>, from which
it goes on where it was interrupted. It returns the arrays: the run's own folder is written by one
process.
"""

import contextlib
import copy
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab import devices, progress
from experiments.lab.flags import Flags, list_arguments, parse_flags
from experiments.lab.folder import RunFolder
from rank_collapse.runs.files import RunError, load_arrays


@contextlib.contextmanager
def start_workers(jobs: int, scheduler: str | None = None) -> Iterator[futures.Executor]:
    """So many processes, or the workers of a Dask scheduler by its address.

    Raises:
        RunError: A worker was ended, or the scheduler is lost.
        OSError: The scheduler does not answer.
        Stopped: A signal asked for it.
    """
    if scheduler is not None:
        from distributed import Client  # here: it takes a second

        try:
            with Client(scheduler, timeout=10) as client:
                yield client.get_executor(pure=False)
        except (futures.CancelledError, TimeoutError, ValueError) as error:
            reason = str(error) or "the scheduler or its workers were lost"
            raise RunError(f"--scheduler={scheduler}: {reason}") from error
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of several processes spin
    spawn = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(jobs, spawn, end_with_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        progress.raise_if_stopped()
        raise RunError("a worker was ended (out of memory?): fewer --jobs take less") from error
    finally:
        if progress.stop_requested():
            for process in multiprocessing.active_children():
                process.terminate()
        pool.shutdown(cancel_futures=True)


def submit_work(pool: futures.Executor, work: Callable, *arguments: Any) -> futures.Future:
    """Hands work to a pool, whose new processes inherit that Ctrl-C is blocked."""
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def iterate_ended(running: Mapping[futures.Future, Any]) -> Iterator[futures.Future]:
    """Yields futures as they end.

    Raises:
        Stopped: A signal asked for it.
    """
    left = set(running)
    while left:
        progress.raise_if_stopped()
        ended, left = futures.wait(left, timeout=0.2, return_when=futures.FIRST_COMPLETED)
        yield from ended


def end_with_parent() -> None:
    """Ends a worker whose parent is killed."""

    def wait():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def measure_side_by_side(options: Flags, run: RunFolder) -> None:
    """Measures what the run lacks of groups of points, where workers are asked for."""
    done = options.reading or options.worker_group is not None or not run.writable or run.complete
    if done or not options.axes or "jobs" not in options:
        return
    points = options.points()
    left = {point.number for point in points if not run.part(point.prefix.rstrip("/"))}
    shared = devices.has_accelerator() or multiprocessing.parent_process() is not None
    most = options.jobs or (1 if shared else devices.count_cores())
    # Of all groups, not of those that are left: a resumed run has the same devices.
    jobs = min(1 + points[-1].number, most)
    if not left or (jobs < 2 and options.scheduler is None):
        return
    arguments = list_arguments(options)
    arguments += [f"--num_devices={options.num_devices or max(1, devices.count_cores() // jobs)}"]
    module = module_name(options.experiment)
    with (
        progress.Progress(len(left), "points", log=run.log) as bar,
        start_workers(min(jobs, len(left)), options.scheduler) as pool,
    ):
        running = {}
        for number in sorted(left):
            place = Path(run.path).resolve() / "points" / str(number)
            work = module, [*arguments, f"--output_dir={place}"], number
            running[submit_work(pool, measure_points, *work)] = place
        try:
            for future in iterate_ended(running):
                run.keep_arrays(future.result())
                move_metrics(running[future], run.path)
                bar.advance()
        finally:
            run.flush_arrays()


def module_name(experiment: Any) -> str:
    """Finds the module of an experiment by the name of its folder.

    Raises:
        ValueError: There is none.
    """
    modules = {path.stem for path in Path(__file__).parents[1].glob("*.py")}
    for name in (f"run_{experiment}", str(experiment)):
        if name in modules and name.startswith(("run_", "check_")):
            return f"experiments.{name}"
    raise ValueError(f"{experiment!r} is the name of no experiment")


def measure_points(module: str, arguments: Sequence[str], number: int) -> dict[str, np.ndarray]:
    """Measures one group of points in a worker.

    Args:
        module: The experiment's.
        arguments: Its flags, with the folder of this group.
        number: Of the group; of a point that cannot be measured the parent says so.

    Returns:
        Arrays by the names of the whole run's.
    """
    experiment = importlib.import_module(module)
    options = parse_flags(copy.deepcopy(experiment.FLAGS), arguments)
    vars(options)["worker_group"] = number
    in_main = threading.current_thread() is threading.main_thread()  # not so of a Dask worker
    if in_main:
        devices.start_devices(options.num_devices)
    signals = progress.handle_signals() if in_main else contextlib.nullcontext()
    with signals, jax.default_matmul_precision("highest"), contextlib.suppress(ValueError):
        experiment.main(options)
    saved = Path(options.output_dir) / "arrays.npz"
    return load_arrays(saved) if saved.exists() else {}


def move_metrics(folder: Path, target: Path) -> None:
    """Moves lines that were written while a group was trained to the run's own."""
    for path in folder.glob("metrics/*"):
        (target / "metrics").mkdir(exist_ok=True)
        os.replace(path, target / "metrics" / path.name)
