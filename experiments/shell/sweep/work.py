"""What a process does for a sweep: unit after unit, until there is none left for it."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial

import jax

from experiments.shell import cli, exhausted, signals
from experiments.shell.flag_values import Flags
from experiments.shell.sweep import merge, workers
from experiments.shell.sweep.folder import SweepFolder
from experiments.shell.sweep.grid import axes_of, cells_of
from rank_collapse.runs.files import InUseError, RunError

# A program that is compiled again for another cell is read from the cache, also a quick one.
_KEPT_SECONDS = 0.2
_DYING_SECONDS = 10


def run(main: Callable, options: Flags, arguments: list[str]) -> int:
    """Runs the grid that --sweep asks for, or this process's part of it, and shows it.

    Args:
        main: Of the binary; called with the flags of one cell.
        options: The flags of the sweep.
        arguments: Of the command line.

    Returns:
        The exit code: 0, or 1 where a cell failed.

    Raises:
        flags.Error, ValueError, RunError: A sweep that cannot be.
    """
    if "distributed" in options and options.distributed:
        raise ValueError("--distributed shares the seeds of one run; a sweep takes --workers")
    axes = axes_of(options.sweep)
    cells = cells_of(options, axes, arguments)
    index, parts = slice_of(options.slice)
    if options.overwrite and parts > 1:
        raise ValueError("--overwrite in a slice would delete what other slices have finished")
    sweep = SweepFolder(options, axes, cells, options.sweep_shows or options.shows)
    if options.overwrite:
        sweep.clear()
    begun = time.time()
    sweep.open(parts * options.workers)
    if options.workers > 1:
        workers.run(sweep, arguments)
    cli.set_up_devices(options)
    first, last = (len(sweep.units) * i // parts for i in (index, index + 1))
    compute(main, sweep, sweep.units[first:last], begun)
    return merge.show(sweep)


def slice_of(text: str | None) -> tuple[int, int]:
    """(i, n) of --slice=i/n, by default those of a Slurm array; (0, 1) where there is none.

    Raises:
        ValueError: It is not written so.
    """
    variables = os.environ.get("SLURM_ARRAY_TASK_ID"), os.environ.get("SLURM_ARRAY_TASK_COUNT")
    source = "--slice"
    if not text and all(variables):
        source = "SLURM_ARRAY_TASK_ID, _MIN, _STEP and _COUNT:"
        least = os.environ.get("SLURM_ARRAY_TASK_MIN", "0")
        step = os.environ.get("SLURM_ARRAY_TASK_STEP", "1")
        with contextlib.suppress(ValueError, ZeroDivisionError):
            text = f"{(int(variables[0]) - int(least)) // int(step)}/{variables[1]}"
    if not text:
        return 0, 1
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(f"{source}={text} is not i/n with i from 0 to n − 1")
    return int(found[1]), int(found[2])


def compute(main: Callable, sweep: SweepFolder, mine: list[list[str]], since: float) -> None:
    """Computes units that no other process has, one after the other.

    Args:
        main: Of the binary.
        sweep: The opened folder.
        mine: Its units, of which this process takes what it gets.
        since: When it began.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min(
        _KEPT_SECONDS, jax.config.jax_persistent_cache_min_compile_time_secs
    ))  # fmt: skip
    last, programs = None, {}
    while (found := sweep.next_unit(mine, since, last)) is not None:
        names, claim = found
        with claim:
            if sweep.groups[names[0]] != last:
                last, programs = sweep.groups[names[0]], {}
            unit = sweep.unit(names)
            for name in sweep.left(names):
                done = len(sweep.cells) - len(sweep.left())
                print(f"[{done + 1}/{len(sweep.cells)}] {name}", file=sys.stderr, flush=True)
                options = sweep.cells[name].options
                options.belong_to(unit=unit, programs=programs)
                options.output_dir = str(sweep.folder_of(name))
                compute_cell(partial(main, options), sweep, name)
                signals.check()
            sweep.drop(unit)


def _once_free(main):
    """main(), again for a while where a process that was killed still has its folder.

    The claim on the cell is this process's; the lock of a dying one goes with its last thread.
    """
    limit = time.monotonic() + _DYING_SECONDS
    while True:
        try:
            return main()
        except InUseError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def compute_cell(main: Callable, sweep: SweepFolder, name: str) -> None:
    """Runs one cell; what goes wrong in it is noted, and the others go on."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _once_free(main)
        if not sweep.done(name):
            raise RunError("it left no summary.json")
    except (ValueError, RunError, OSError, MemoryError) as error:
        _failed(sweep, name, " ".join((str(error) or type(error).__name__).split()))
    except jax.errors.JaxRuntimeError as error:
        if not exhausted.out_of_memory(error):
            raise
        _failed(sweep, name, exhausted.one_line(error))


def _failed(sweep, name, reason):
    print(f"{name}: {reason}", file=sys.stderr, flush=True)
    sweep.fail(name, reason)
