"""What a process does for a sweep: one cell after the other, or all through workers."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax

from experiments.shell import memory, signals
from experiments.shell.devices import set_up_devices
from experiments.shell.flag_values import Flags
from experiments.shell.process import Ended, run_in_workers
from experiments.shell.sweep import cluster, merge
from experiments.shell.sweep.child import LINES, SHARE, killed
from experiments.shell.sweep.folder import BRIEFLY, SweepFolder
from experiments.shell.sweep.grid import Cell, axes_of, cells_of, units_of
from rank_collapse.runs.files import RunError

# A program that is compiled again for another cell is read from the cache, also a quick one.
_KEPT_SECONDS = 0.2


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
    sweep = SweepFolder(options, axes, cells, options.sweep_shows or options.shows)
    if options.only_cells:  # of a sweep by workers, which the other flags are about
        for number in options.only_cells:
            if number >= len(cells):
                raise ValueError(f"--only_cells={number} is not one of 0 to {len(cells) - 1}")
        set_up_devices(options)
        compute(main, sweep, [[cells[number] for number in options.only_cells]])
        return 0
    index, parts = slice_of(options.slice)
    shared = options.workers > 1 or options.scheduler is not None
    if options.overwrite and parts > 1:
        raise ValueError("--overwrite in a slice would delete what other slices have finished")
    if shared and parts > 1:
        raise ValueError("--slice and --workers or --scheduler exclude each other")
    if options.workers > 1 and options.scheduler is not None:
        raise ValueError("--workers and --scheduler exclude each other")
    if options.overwrite:
        sweep.clear()
    if shared:
        jax.config.update("jax_platforms", "cpu")  # accelerators are the workers'
        share = by_scheduler if options.scheduler else by_workers
        with sweep.run_folder() as folder:
            share(sweep, [*arguments, f"--output_dir={sweep.root.resolve()}"])
            return merge.show(sweep, folder)
    set_up_devices(options)
    units = units_of(cells, options.joined, parts)
    mine = units[len(units) * index // parts : len(units) * (index + 1) // parts]
    if parts == 1:
        with sweep.run_folder() as folder:
            compute(main, sweep, mine)
            return merge.show(sweep, folder)
    sweep.run_folder(wait=BRIEFLY).close()
    compute(main, sweep, mine)
    with sweep.run_folder(wait=BRIEFLY) as folder:
        return merge.show(sweep, folder)


def by_scheduler(sweep: SweepFolder, arguments: Sequence[str]) -> None:
    """The cells by the workers of --scheduler."""
    with cluster.opened(sweep.options.scheduler) as client:
        waiting = sweep.waiting(cluster.slots(client))
        cluster.compute(client, sweep, waiting, [*cluster.program(), *arguments])


def by_workers(sweep: SweepFolder, arguments: Sequence[str]) -> None:
    """The cells by --workers, processes of this machine; those whose process was killed once more.

    Raises:
        ValueError: There are fewer GPUs.
    """
    count, found = sweep.options.workers, cluster.gpus()
    if found and count > len(found):
        raise ValueError(f"--workers={count}, but only {len(found)} GPUs exist")
    own = [{"CUDA_VISIBLE_DEVICES": gpu, SHARE: "1"} for gpu in found[:count]]
    environments = own or [{SHARE: str(count)}] * count
    left, again = sweep.waiting(count), []

    def ended(unit: str, how: Ended) -> None:
        names = units[unit]
        if killed(how.code) and names not in again:
            again.append(names)
        sweep.account(names, how.code, how.printed.splitlines()[-LINES:])

    while left:
        units = {", ".join(names): names for names in left}
        commands = {
            unit: [cluster.program()[-1], *arguments, sweep.only(names)]
            for unit, names in units.items()
        }
        before = list(again)
        run_in_workers(commands, environments, ended, str(sweep.path))
        left = [names for names in again if names not in before]


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
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(f"{source}={text} is not i/n with i from 0 to n − 1")
    return int(found[1]), int(found[2])


def compute(main: Callable, sweep: SweepFolder, units: Sequence[Sequence[Cell]]) -> None:
    """Computes cells in this process, those of a unit as one ensemble, one unit after the other.

    Args:
        main: Of the binary.
        sweep: The folder.
        units: This process's.
    """
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs",
        min(_KEPT_SECONDS, jax.config.jax_persistent_cache_min_compile_time_secs),
    )
    group, programs = None, {}
    done = len(sweep.cells) - len(sweep.left())
    for cells in units:
        if cells[0].group != group:
            group, programs = cells[0].group, {}
        unit = sweep.unit(cells)
        for name in sweep.left([cell.name for cell in cells]):
            done += 1
            if not sweep.options.only_cells:  # else the process that hands them out says it
                print(f"[{done}/{len(sweep.cells)}] {name}", file=sys.stderr, flush=True)
            options = sweep.cells[name].options
            options.belong_to(unit=unit, programs=programs)
            options.output_dir = str(sweep.folder_of(name))
            compute_cell(partial(main, options), sweep, name)
            signals.check()
        sweep.drop(unit)


def compute_cell(main: Callable, sweep: SweepFolder, name: str) -> None:
    """Runs one cell; what goes wrong in it is noted, and the other cells run."""
    sweep.forget_failure(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main()
        if not sweep.done(name):
            raise RunError("it left no summary.json")
    except memory.MISTAKES as error:
        reason = memory.reason_of(error)
        print(f"{name}: {reason}", file=sys.stderr, flush=True)
        sweep.fail(name, reason)
