"""What a cell of a sweep costs the process and the scheduler that hand it out."""

import contextlib
import logging
import sys
import time
import types
from typing import Any

from experiments.benchmarks.timing import Report, Timing
from experiments.shell.sweep import cluster


@contextlib.contextmanager
def no_main():
    """Workers that start meanwhile do not import this binary, and JAX with it."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def empty_cells(options: Any, count: int = 10_000, places: int = 64) -> Report:
    """Cells that do nothing on a local cluster of as many places as GPUs of a large sweep.

    CPU is that of this process, which holds the scheduler and hands out; the workers are others.
    """
    import dask
    from distributed import Client, LocalCluster

    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set(cluster.SETTINGS))
        stack.enter_context(no_main())
        local = stack.enter_context(
            LocalCluster(
                n_workers=2,
                threads_per_worker=places // 2,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
                silence_logs=logging.CRITICAL,
            )
        )
        client = stack.enter_context(Client(local, set_as_default=False))
        used, begun = time.process_time(), time.perf_counter()
        for _, future in cluster.handed_out(client, range(count), int, lambda *_: ()):
            future.result()
        seconds, used = time.perf_counter() - begun, time.process_time() - used
    timing = Timing(f"{count} empty cells on {places} places", 0.0, [seconds])
    figures = {
        "ms of time for each cell": (1e3 * seconds / count, None),
        "ms of CPU for each cell, without workers": (1e3 * used / count, None),
        f"seconds a cell must last to keep {places} places busy": (places * seconds / count, None),
    }
    return Report([timing], timing.name, figures)
