"""Work of several processes: the points of one run's axes, and runs of `reproduce`.

Both go through an executor of `concurrent.futures`: processes of this machine, or the workers of a
Dask scheduler (--scheduler). Signals reach the parent alone, which then ends its workers; they save
their results at the next chunk.

A worker that measures points has its own folder below the run's, points/<number>, from which it
resumes after an interruption. It returns the arrays; only one process writes the run's own folder.
"""

import contextlib
import copy
import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.lab import devices, progress, provenance
from experiments.lab.flags import Flags, Mode, parse_flags
from experiments.lab.folder import RunFolder
from experiments.lab.grid import Options
from experiments.lab.provenance import JsonObject
from rank_collapse.printed import print_lines
from rank_collapse.runs.files import RunError, load_arrays, make_subfolder, read_object


@contextlib.contextmanager
def start_workers(jobs: int, scheduler: str | None = None) -> Iterator[futures.Executor]:
    """Starts so many processes, or connects to the workers of a Dask scheduler.

    Args:
        jobs: Processes.
        scheduler: Address of the scheduler; None for processes.

    Raises:
        RunError: A worker was ended, or the scheduler is lost.
        OSError: The scheduler does not answer.
        Stopped: A signal asked for it.
    """
    if scheduler is not None:
        from distributed import Client  # here: it takes a second

        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # of a lost one
        try:
            with Client(scheduler, timeout=10) as client:
                yield client.get_executor(pure=False)
        except (futures.CancelledError, TimeoutError, ValueError) as error:
            reason = str(error) or "the scheduler or its workers were lost"
            raise RunError(f"--scheduler={scheduler}: {reason}") from error
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of several processes spin
    start_resource_tracker()
    spawn = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(jobs, spawn, begin_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        progress.raise_if_stopped()
        raise RunError(
            "a worker process was killed, perhaps for lack of memory; fewer --jobs need less"
        ) from error
    finally:
        if progress.stop_requested():
            for process in multiprocessing.active_children():
                process.terminate()
        pool.shutdown(cancel_futures=True)


def start_resource_tracker() -> None:
    """Starts the process of Python that removes the semaphores of a process that ends at once.

    It removes them without a warning: a second signal ends this process before it can.
    """
    earlier = os.environ.get("PYTHONWARNINGS")
    silent = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{earlier},{silent}" if earlier else silent
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ["PYTHONWARNINGS"]
        if earlier is not None:
            os.environ["PYTHONWARNINGS"] = earlier


def submit_work(pool: futures.Executor, work: Callable, *arguments: Any) -> futures.Future:
    """Submits work to a pool, whose new processes inherit that Ctrl-C is blocked.

    Args:
        pool: Pool from `start_workers`.
        work: Function of a module.
        *arguments: Arguments of the function.
    """
    resource_tracker.ensure_running()  # which would unblock it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def iterate_ended(
    pool: futures.Executor,
    work: Mapping[Hashable, Sequence[Any]],
    limit: int,
    running: dict[futures.Future, Hashable],
) -> Iterator[tuple[Hashable, futures.Future]]:
    """Yields work as it ends. Work that a pool already has would continue after a signal.

    Args:
        pool: Pool from `start_workers`.
        work: {name: (function of a module, *arguments)}, in the order in which it begins.
        limit: Largest number of tasks that the pool has at a time.
        running: Gets {future: name} of tasks that have begun and were not yielded.

    Raises:
        Stopped: A signal asked for it.
    """
    waiting = list(work)
    while waiting or running:
        progress.raise_if_stopped()
        while waiting and len(running) < limit:
            name = waiting.pop(0)
            running[submit_work(pool, *work[name])] = name
        ended, _ = futures.wait(running, timeout=0.2, return_when=futures.FIRST_COMPLETED)
        for future in ended:
            yield running.pop(future), future


# Allocated objects between two searches for unreachable ones. A traced program consists of many
# objects, which are all reachable: with Python's 700, searches take a twentieth of the CPU time.
OBJECTS_BETWEEN_SEARCHES = 10_000


def begin_worker() -> None:
    """Lets a worker end when its parent is killed, except while it waits for work; searches for
    unreachable objects less often.

    While it waits it holds the lock of the queue; the others would wait for it for ever.
    """

    def wait():
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    gc.set_threshold(OBJECTS_BETWEEN_SEARCHES)
    threading.Thread(target=wait, daemon=True).start()
    signal.signal(signal.SIGTERM, progress.note_signal)


def measure_side_by_side(options: Flags, points: Sequence[Options], run: RunFolder) -> None:
    """Measures the missing groups of points in workers, if the flags ask for workers.

    Args:
        options: Flags of the run.
        points: Flags of its points.
        run: Run that gets the arrays.
    """
    in_worker = multiprocessing.parent_process() is not None
    if "scheduler" in options and options.scheduler is not None and not options.axes:
        text = f"--scheduler={options.scheduler} is not used: a single point is measured here"
        print_lines(text, file=sys.stderr)
    missing = {point.number for point in points if not run.part(point.prefix.rstrip("/"))}
    is_parallel = options.axes and "jobs" in options and missing and not options.grows
    if not (is_parallel and run.writable) or run.summary:
        return
    limit = 1 if in_worker or devices.has_accelerator() else devices.count_cores()
    # Of all groups, not of those that are missing: a resumed run has the same devices.
    jobs = min(1 + points[-1].number, options.jobs or limit)
    if jobs < 2 and options.scheduler is None:
        return
    num_devices = options.num_devices or max(1, devices.count_cores() // jobs)
    module = module_name(options.experiment)
    folders = {number: run.path.resolve() / "points" / str(number) for number in missing}
    running: dict[futures.Future, int] = {}

    def describe_workers():
        numbers = sorted(running.copy().values())
        return "; ".join(f"{n}: {progress.read_activity(folders[n])}" for n in numbers)

    with (
        progress.Progress(len(missing), "points", log=run.log, details=describe_workers) as bar,
        start_workers(min(jobs, len(missing)), options.scheduler) as pool,
    ):
        work = {
            number: (measure_points, module, options.typed, folders[number], num_devices, number)
            for number in sorted(missing)
        }
        most = len(missing) if options.scheduler else jobs  # a scheduler takes all, and cancels
        try:
            for number, future in iterate_ended(pool, work, most, running):
                arrays, environments = future.result()
                run.add_environments(environments)
                run.keep_arrays(arrays)
                for path in folders[number].glob("metrics/*"):  # written while a group was trained
                    make_subfolder(run.path / "metrics")
                    os.replace(path, run.path / "metrics" / path.name)
                bar.advance()
        finally:
            run.flush_arrays()


def module_name(experiment: object) -> str:
    """Finds the module of an experiment by the name of its folder.

    Raises:
        ValueError: There is no such module.
    """
    modules = {path.stem for path in Path(__file__).parents[1].glob("*.py")}
    for name in (f"run_{experiment}", str(experiment)):
        if name in modules and name.startswith(("run_", "check_")):
            return f"experiments.{name}"
    raise ValueError(f"{experiment!r} is not the name of an experiment")


def measure_points(
    module: str, arguments: Sequence[str], folder: Path, num_devices: int, number: int
) -> tuple[dict[str, np.ndarray], list[JsonObject]]:
    """Measures one group of points in a worker.

    Args:
        module: The experiment's.
        arguments: Arguments of the run.
        folder: Folder of this group.
        num_devices: Number of devices of this worker.
        number: Number of the group; if a point cannot be measured, the parent process says so.

    Returns:
        Arrays by the names of the full run's, and the environments in which they were made: a
        worker of a cluster may be another machine, with another commit.
    """
    experiment = importlib.import_module(module)
    options = parse_flags(copy.deepcopy(experiment.FLAGS), arguments)
    options.output_dir, options.run_name, options.overwrite = str(folder), None, False
    options.num_devices = num_devices
    options.mode = Mode(worker_group=number)
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # not so of a Dask worker
            devices.start_devices(options.num_devices)
            stack.enter_context(progress.handle_signals())
            # Its log says what it does; lines of several workers would be mixed.
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(jax.default_matmul_precision("highest"))
        stack.enter_context(contextlib.suppress(ValueError))
        experiment.main(options)
    saved = folder / "arrays.npz"
    if not saved.exists():
        return {}, []
    return load_arrays(saved), provenance.list_environments(read_object(folder / "config.json"))
