"""Several processes of one run: how a binary joins, opens its folder, and leaves.

    export JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=0 python -m experiments.run_sort --distributed

Slurm, MPI and TPU pods need none of the variables. No process may wait for ever for one that has
stopped: a process that fails ends at once, without the barrier at which `jax.distributed` would
wait for the others, and those see the lost connection.
"""

import contextlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import jax

from rank_collapse.runs import processes
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "coordination")


def running() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def join() -> None:
    """Calls jax.distributed.initialize() with what the three variables say.

    Raises:
        ValueError: A variable is missing where no cluster says what it would, or is no number.
    """
    if jax.distributed.is_initialized():
        return
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    numbers = {}
    for name in VARIABLES[1:]:
        if name in given:
            if not given[name].isdecimal():
                raise ValueError(f"{name}={given[name]!r} is not a whole number")
            numbers[name] = int(given[name])
    count, index = (numbers.get(name) for name in VARIABLES[1:])
    if count is not None and index is not None and index >= count:
        raise ValueError(f"{VARIABLES[2]}={index} is not below {VARIABLES[1]}={count}")
    try:
        jax.distributed.initialize(given.get(VARIABLES[0]), count, index)
    except ValueError as error:
        absent = ", ".join(name for name in VARIABLES if name not in given)
        raise ValueError(
            f"--distributed: {error} Not set, and no Slurm, MPI or TPU pod found: {absent}"
        ) from error


def open_folder(path: Path, fields: dict[str, Any]) -> RunFolder:
    """A run folder, in every process if there are several: see `open_together`."""
    return open_together(path, fields) if running() else RunFolder(path, **fields)


def open_together(path: Path, fields: dict[str, Any]) -> RunFolder:
    """A run folder in every process: the primary opens and locks it, then the others read it.

    Args:
        path: The folder, on a file system that all processes share.
        fields: Further arguments of `RunFolder`.

    Raises:
        RunError: In all processes alike, if one of them cannot use the folder.
    """
    opened = error = None
    if processes.is_primary():
        opened, error = _open(path, fields)
    error = processes.text_from_primary(error or "")
    if error:
        raise RunError(error)
    if not processes.is_primary():
        opened, error = _open(path, fields | {"primary": False, "overwrite": False})
    seen = error or repr((sorted(opened.config.items()), sorted(opened.arrays), opened.summary))
    if not processes.same_everywhere(seen):
        if opened is not None:
            opened.close()
        raise RunError(
            f"{path} does not look the same in all processes ({error or 'here it can be read'}); "
            "--distributed needs a folder on a file system that all of them share"
        )
    return opened


def _open(path, fields):
    """(folder, None), or (None, why not)."""
    try:
        return RunFolder(path, **fields), None
    except (RunError, OSError) as error:
        return None, str(error)


@contextlib.contextmanager
def one_voice():
    """Only the primary prints to standard output; at the end every process waits for the others."""
    if not running():
        yield
        return
    silent = contextlib.nullcontext()
    if not processes.is_primary():
        silent = contextlib.redirect_stdout(io.StringIO())
    with silent:
        yield
    processes.same_everywhere("done")


def lost(error: BaseException) -> bool:
    """Whether an error says that another process has stopped."""
    return running() and any(word in str(error).lower() for word in LOST)


def leave(code: int) -> NoReturn:
    """Ends a process that failed, at once, so that the others do not wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if processes.is_primary():
        time.sleep(2)  # it is the coordinator: those that fail alike still report before it goes
    os._exit(code)
