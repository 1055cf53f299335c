"""Several processes of one run: how a binary joins, opens its folder, and leaves.

    export JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=2
    JAX_PROCESS_ID=0 python -m experiments.run_sort --distributed

Slurm, MPI and TPU pods need none of the variables. No process may wait for ever for one that has
stopped: a process that fails ends at once, without the barrier at which `jax.distributed` would
wait for the others, and those see the lost connection at their next exchange. Where there is none
for long, where process 0 is killed, and where one stands still (SIGSTOP, a host that hangs), JAX's
heartbeat ends the others: by SIGABRT, after lines of its own.
"""

import contextlib
import io
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags

from rank_collapse.runs import processes
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LIMIT = 50  # seconds for all processes to come, of the 60 in which a user should know
OWN = ("num_devices", "memory_gb", "debug", "help")  # flags that may differ between processes
LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "coordination")
SILENT = 50  # seconds without a sign of life, after which JAX ends the others


def running() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def join() -> None:
    """Calls jax.distributed.initialize() with what the three variables say.

    The process ends with one line where the others do not come.

    Raises:
        ValueError: A variable is missing where no cluster says what it would, or is no number; an
            address that cannot be used.
    """
    if jax.distributed.is_initialized():
        return
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    for name in VARIABLES[1:]:
        if name in given and not (given[name].isascii() and given[name].isdecimal()):
            raise ValueError(f"{name}={given[name]!r} is not a whole number")
    count, index = (int(given[name]) if name in given else None for name in VARIABLES[1:])
    if count is not None and index is not None and index >= count:
        raise ValueError(f"{VARIABLES[2]}={index} is not below {VARIABLES[1]}={count}")
    if VARIABLES[0] in given:
        check_address(given[VARIABLES[0]], primary=index == 0)
    # Its notifier would take SIGTERM for itself, and the run would go on to its end.
    jax.config.update("jax_enable_preemption_service", False)
    waiting = threading.Timer(LIMIT, _give_up, [given.get(VARIABLES[0], "the cluster's")])
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            given.get(VARIABLES[0]),
            count,
            index,
            initialization_timeout=2 * LIMIT,
            heartbeat_timeout_seconds=SILENT,
        )
    except jax.errors.JaxRuntimeError as error:
        _give_up(given.get(VARIABLES[0], "the cluster's"), error)
    except ValueError as error:
        absent = ", ".join(name for name in VARIABLES if name not in given)
        raise ValueError(
            f"--distributed: {error} Not set, and no Slurm, MPI or TPU pod found: {absent}"
        ) from error
    finally:
        waiting.cancel()


def check_address(address: str, primary: bool) -> None:
    """Refuses a coordinator's address that is invalid, or whose port this process cannot have.

    Args:
        address: host:port.
        primary: Whether this process is the coordinator.

    Raises:
        ValueError: It names the address.
    """
    host, _, port = address.rpartition(":")
    name = f"{VARIABLES[0]}={address!r}"
    if not host or not (port.isascii() and port.isdecimal()) or int(port) >= 2**16:
        raise ValueError(f"{name} is not host:port")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
        if primary:
            socket.create_server(("", int(port))).close()
    except OSError as error:
        what = "no such host: " if isinstance(error, socket.gaierror) else ""
        raise ValueError(f"{name}: {what}{error.strerror or error}") from error


def _give_up(address: str, error: Any = "") -> NoReturn:
    """From any thread, while the main thread waits for processes that do not come."""
    reason = f" ({' '.join(str(error).split())[:200]})" if error else ""
    text = f"error: --distributed: not all processes came to {address} within {LIMIT} s{reason}\n"
    os.write(2, text.encode())
    os._exit(1)


def check_flags(options: flags.FlagValues) -> None:
    """Refuses processes whose flags differ: they would not compute the same programs.

    Raises:
        ValueError: In all processes; it names the flags.
    """
    if not running():
        return
    names = [n for n in sorted(options) if options[n].name == n and n not in OWN]
    if not processes.same_everywhere(" ".join(names)):
        raise ValueError("--distributed: the processes run different commands")
    found = processes.differing({n: json.dumps(options[n].value, default=str) for n in names})
    if found:
        text = ", ".join(f"--{name}" for name in found)
        raise ValueError(f"--distributed: the processes differ in {text}")


def open_folder(path: Path, fields: dict[str, Any]) -> RunFolder:
    """A run folder, in every process: the primary opens and locks it, then the others read it.

    Args:
        path: The folder, on a file system that all processes share.
        fields: Further arguments of `RunFolder`.

    Raises:
        RunError: In all processes alike, if one of them cannot use the folder.
    """
    if not running():
        return RunFolder(path, **fields)
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
            f"{path} differs between the processes ({error or 'readable in this one'}); "
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
    hidden = contextlib.redirect_stdout(io.StringIO())
    with contextlib.nullcontext() if processes.is_primary() else hidden:
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
