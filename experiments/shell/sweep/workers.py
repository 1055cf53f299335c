"""--workers: processes of this machine that share a sweep, its cores and its memory."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments.shell.flag_values import Flags
from experiments.shell.process import Children
from experiments.shell.sweep.folder import SweepFolder
from experiments.shell.sweep.grid import without

SHARED = ("num_devices", "memory_gb")  # each worker has its part

# As a run without --memory_gb does, in a process of its own: on a GPU this one takes no memory.
_DEFAULT = """
import sys
import jax
from experiments.shell import memory
print(memory.budget(None, jax.local_devices()[: int(sys.argv[1])]))
"""


def run(sweep: SweepFolder, arguments: Sequence[str]) -> None:
    """Starts them and waits until all have ended, however they end.

    What they print is in <folder>/worker-<i>.log. Whatever a worker that died had begun another
    takes over, or this process when all have ended.

    Args:
        sweep: The opened folder.
        arguments: Of the command line.
    """
    count, options = sweep.options.workers, sweep.options
    devices = options.num_devices or max(1, cores() // count)
    own = [
        *without(arguments, ("workers", "overwrite", "output_dir", "run_name", *SHARED)),
        f"--num_devices={devices}", f"--output_dir={sweep.path}", *memory_flag(options, devices),
    ]  # fmt: skip
    command = [*program(), *own]
    logs = [sweep.path / f"worker-{i}.log" for i in range(count)]
    total, known = len(sweep.cells), -1
    # No Progress: it would start JAX, which on a GPU takes the memory that the workers need.
    with Children() as children:
        started = [children.start(command, log) for log in logs]
        while any(child.poll() is None for child in started):
            time.sleep(0.5)
            done = total - len(sweep.left())
            if done != known:
                known = done
                print(f"sweep: {done} of {total} cells", file=sys.stderr, flush=True)
    for child, log in zip(started, logs, strict=True):
        if child.returncode not in (0, 1):
            code = child.returncode
            print(f"sweep: a worker ended with exit code {code}, see {log}", file=sys.stderr)


def memory_flag(options: Flags, devices: int) -> list[str]:
    """--memory_gb of one of n workers: the n-th part of what is asked for, or of what is free.

    Nothing for a binary without that flag, or where JAX does not start, as the workers will say.

    Args:
        options: Of the sweep.
        devices: Of a worker.
    """
    if "memory_gb" not in options:
        return []
    whole = options.memory_gb
    if not whole:
        command = [sys.executable, "-c", _DEFAULT, str(devices)]
        found = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if found.returncode:
            return []
        whole = int(found.stdout) / 1e9
    return [f"--memory_gb={whole / options.workers}"]


def program() -> list[str]:
    """How this binary is started."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    main = ["-m", spec.name] if spec is not None else [sys.argv[0]]
    return [sys.executable, *main]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
