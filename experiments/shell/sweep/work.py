"""What a process does for a sweep: one cell after the other, or all through workers."""

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax

from experiments.shell import memory, signals
from experiments.shell.devices import gpus, set_up_devices
from experiments.shell.flag_values import Flags
from experiments.shell.process import LINES, SHARE, Ended, killed, run_in_workers
from experiments.shell.sweep import cluster, merge
from experiments.shell.sweep.folder import BRIEFLY, SweepFolder
from experiments.shell.sweep.grid import Cell, axes_of, units_of
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
    sweep = SweepFolder(options, axes_of(options.sweep))
    cells, (index, parts) = list(sweep.cells.values()), slice_of(options.slice)
    by_scheduler, by_workers = options.scheduler is not None, options.workers > 1
    numbers, shared = options.only_cells, by_scheduler or by_workers
    if "distributed" in options and options.distributed:
        raise ValueError("--distributed shares the seeds of one run; a sweep takes --workers")
    if numbers and max(numbers) >= len(cells):
        raise ValueError(f"--only_cells={max(numbers)} is not one of 0 to {len(cells) - 1}")
    if numbers:  # of a sweep by workers, which the other flags are about
        set_up_devices(options)
        compute(main, sweep, [[cells[number] for number in numbers]])
        return 0
    if options.overwrite and parts > 1:
        raise ValueError("--overwrite in a slice would delete what other slices have finished")
    if shared and parts > 1:
        raise ValueError("--slice and --workers or --scheduler exclude each other")
    if by_workers and by_scheduler:
        raise ValueError("--workers and --scheduler exclude each other")
    if options.overwrite:
        sweep.clear()
    if shared:
        jax.config.update("jax_platforms", "cpu")  # accelerators are the workers'
        work = partial(cluster.compute if by_scheduler else in_workers, sweep, arguments)
    else:
        set_up_devices(options)
        units = units_of(cells, parts)
        mine = units[len(units) * index // parts : len(units) * (index + 1) // parts]
        work = partial(compute, main, sweep, mine)
    wait = BRIEFLY if parts > 1 else 0.0
    with sweep.run_folder(wait) as folder:
        if parts == 1:
            work()
            return merge.show(sweep, folder)
    work()  # other slices have the folder meanwhile
    with sweep.run_folder(wait) as folder:
        return merge.show(sweep, folder)


def in_workers(sweep: SweepFolder, arguments: Sequence[str]) -> None:
    """The cells by --workers, processes of this machine; those whose process was killed once more.

    Raises:
        ValueError: There are fewer GPUs.
    """
    count, found = sweep.options.workers, gpus()
    if found and count > len(found):
        raise ValueError(f"--workers={count}, but only {len(found)} GPUs exist")
    own = [{"CUDA_VISIBLE_DEVICES": gpu, SHARE: "1"} for gpu in found[:count]]
    units = {", ".join(names): names for names in sweep.waiting(count)}
    commands = {unit: sweep.command(arguments, names) for unit, names in units.items()}
    died = {}

    def ended(unit: str, how: Ended) -> None:
        if killed(how.code):
            died[unit] = commands[unit]
        sweep.account(units[unit], how.code, how.printed.splitlines()[-LINES:])

    run = partial(run_in_workers, ended=ended, title=str(sweep.path))
    run(commands, own or [{SHARE: str(count)}] * count)
    if died:
        run(dict(died), own or [{SHARE: str(count)}] * count)


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
    """Computes cells in this process, one unit after the other.

    What goes wrong in a cell is noted, and the other cells run.

    Args:
        main: Of the binary.
        sweep: The folder.
        units: This process's.
    """
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs",
        min(_KEPT_SECONDS, jax.config.jax_persistent_cache_min_compile_time_secs),
    )
    done = len(sweep.cells) - len(sweep.left())
    for cells in units:
        group, names = sweep.group_of(cells), [cell.name for cell in cells]
        for name in sweep.left(names):
            done += 1
            if not sweep.options.only_cells:  # else the process that hands them out says it
                print(f"[{done}/{len(sweep.cells)}] {name}", file=sys.stderr, flush=True)
            options = sweep.cells[name].options
            options.join(group)
            options.output_dir = str(sweep.folder_of(name))
            sweep.note_of(name).unlink(missing_ok=True)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    main(options)
                if not sweep.done(name):
                    raise RunError("it left no summary.json")
            except memory.MISTAKES as error:
                reason = memory.reason_of(error)
                print(f"{name}: {reason}", file=sys.stderr, flush=True)
                sweep.fail(name, reason)
            signals.check()
        if not sweep.left(names):
            shutil.rmtree(group.folder, ignore_errors=True)
