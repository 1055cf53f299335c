"""--scheduler: cells on a Dask cluster, each in a child process of its worker.

A child starts JAX with clean devices: its share of the worker's cores, or a GPU of its own where
workers have the resource "GPU". Where a worker is lost its cells run again on another, from their
own last chunk; the lease of a cell's folder keeps a process that is ending from writing beside it.
"""

import contextlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.shell import process, signals
from experiments.shell.sweep.folder import SweepFolder
from rank_collapse.runs.files import RunError, lease

ANSWER = 12  # seconds for a scheduler to answer
ENDING = 40.0  # seconds for children to save what they have
LOST = "the scheduler is lost; what is done stays"
RETRIES = 1  # of a child that was killed; workers that are lost count apart
SETTINGS = {
    "distributed.scheduler.worker-ttl": "5 minutes",  # children compile: workers always answer
    "distributed.scheduler.allowed-failures": 5,
    "distributed.comm.timeouts.connect": f"{ANSWER}s",
    "distributed.admin.large-graph-warning-threshold": "1GB",
}


@contextlib.contextmanager
def opened(address: str) -> Iterator[Any]:
    """A client of the cluster of a scheduler.

    Raises:
        ValueError: The package is missing.
        RunError: The scheduler does not answer.
    """
    if importlib.util.find_spec("distributed") is None:
        raise ValueError("--scheduler needs `pip install distributed`")
    import cloudpickle
    import dask
    from distributed import Client

    for name in ("distributed", "distributed.client", "distributed.utils", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # what we say ourselves
    cloudpickle.register_pickle_by_value(process)  # a worker needs nothing of ours, see `compute`
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(SETTINGS))
        try:
            client = stack.enter_context(Client(address, timeout=ANSWER, set_as_default=False))
        except (OSError, ValueError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise RunError(f"--scheduler={address} does not answer: {reason}") from error
        print(f"dashboard: {client.dashboard_link}", file=sys.stderr, flush=True)
        yield client


def hosts(client: Any) -> tuple[dict[str, int], bool]:
    """{address of a host: cells at a time}, and whether each of them has a GPU."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    by_gpu = any(worker["resources"].get("GPU") for worker in workers)
    found: dict[str, int] = {}
    for worker in workers:
        count = int(worker["resources"].get("GPU", 0)) if by_gpu else worker["nthreads"]
        found[worker["host"]] = found.get(worker["host"], 0) + count
    return found, by_gpu


def compute(sweep: SweepFolder, arguments: Sequence[str]) -> None:
    """The cells by the workers of --scheduler, as many units at a time as there are places for.

    Raises:
        ValueError: The package is missing.
        RunError: The scheduler does not answer, or was lost.
    """
    folder, title = os.getcwd(), str(sweep.path)

    def given(names, places):
        return title, sweep.command(arguments, names), folder, places

    try:
        with opened(sweep.options.scheduler) as client:
            units = sweep.waiting(max(1, sum(hosts(client)[0].values())))
            for names, future in handed_out(client, units, process.on_dask, given):
                if future.cancelled():
                    raise RunError(LOST)
                error = future.exception()
                code, lines = (None, []) if error else future.result()
                sweep.account(names, code, lines, " ".join(str(error or "").split()))
    except BaseException:  # the children save what they have and end
        for name in sweep.left():
            if sweep.folder_of(name).exists():
                with contextlib.suppress(RunError):
                    lease(sweep.folder_of(name), wait=ENDING).close()
        raise


def handed_out(
    client: Any, tasks: Sequence[Any], run: Callable, given: Callable[[Any, dict], tuple]
) -> Iterator[tuple[Any, Any]]:
    """(task, its future) as they end, as many at a time as the cluster has places for.

    Args:
        client: From `opened`.
        tasks: In order.
        run: Called on a worker.
        given: (task, `hosts`) → its arguments.

    Raises:
        RunError: The scheduler was lost.
    """
    # Dask pickles what can be imported here by its name, which fails on a host that cannot import
    # it; a lambda goes by value.
    by_value = lambda *given: run(*given)  # noqa: E731
    waiting, running, said = list(tasks), {}, False
    try:
        while waiting or running:
            places, by_gpu = hosts(client)
            if not places and not said:
                said = True
                print("sweep: waiting for a worker", file=sys.stderr, flush=True)
            while waiting and len(running) < sum(places.values()):
                task, needed = waiting.pop(0), {"GPU": 1} if by_gpu else None
                future = client.submit(
                    by_value, *given(task, places), pure=False, retries=RETRIES, resources=needed
                )
                running[future] = task
            end, done = time.monotonic() + 1, []
            while not done and time.monotonic() < end:
                signals.check()
                if client.status != "running":
                    raise RunError(LOST)
                time.sleep(0.01)
                done = [future for future in running if future.done()]
            for future in done:
                yield running.pop(future), future
    finally:
        with contextlib.suppress(Exception):
            client.cancel(list(running))
