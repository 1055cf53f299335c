"""What a Dask worker runs for a cell: a child process. Sent to workers as it is, by value."""

import collections
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

# Variables of a child's environment: its standard input ends when its parent does; how many
# processes of a sweep share its host.
ENDS_WITH_STDIN, SHARE = "RANK_COLLAPSE_ENDS_WITH_STDIN", "RANK_COLLAPSE_SHARE"
LINES = 20  # of what a child prints at its end are kept
SIGNALLED = (129, 130, 143)  # exit codes of a child that was asked to end


def killed(code: int | None) -> str:
    """Which signal an exit code is of; "" of none."""
    if code is None or not (code < 0 or code in SIGNALLED):
        return ""
    name = signal.Signals(-code if code < 0 else code - 128).name
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def run(command: list[str], folder: str, places: dict[str, int]) -> tuple[int, list[str]]:
    """Runs a command as a child of this worker; (its exit code, the last lines it printed).

    The child is sent SIGTERM when the task is cancelled, and ends by itself when this process does.

    Args:
        command: The interpreter's place is taken by this worker's own.
        folder: In which it runs.
        places: {address of a host: children at a time}.

    Raises:
        ChildProcessError: A signal ended it.
    """
    from distributed import get_worker
    from distributed.comm.addressing import get_address_host

    worker = get_worker()
    key = worker.get_current_task()
    share = str(places.get(get_address_host(worker.address), 1))
    environment = os.environ | {ENDS_WITH_STDIN: "1", SHARE: share}
    with contextlib.ExitStack() as stack:
        if worker.state.total_resources.get("GPU"):
            one = stack.enter_context(gpu(worker))
            environment |= {"CUDA_VISIBLE_DEVICES": one, SHARE: "1"}
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,  # its end is this process's
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        last: collections.deque[str] = collections.deque(maxlen=LINES)
        reader = threading.Thread(
            target=lambda: last.extend(line.rstrip() for line in process.stdout), daemon=True
        )
        reader.start()
        asked = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=0.3)
                break
            task = worker.state.tasks.get(key)
            if not asked and (task is None or task.state not in ("executing", "long-running")):
                asked = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        process.stdin.close()
        reader.join(timeout=5)
    if reason := killed(code):
        raise ChildProcessError(reason)
    return code, list(last)


@contextlib.contextmanager
def gpu(worker):
    """One of the GPUs of a worker, which no other of its children has meanwhile."""
    with worker._lock:
        free = worker.__dict__.get("free_gpus")
        if free is None:
            free = worker.free_gpus = queue.SimpleQueue()
            own = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            count = int(worker.state.total_resources["GPU"])
            for name in own if own != [""] else range(count):
                free.put(str(name))
    one = free.get()
    try:
        yield one
    finally:
        free.put(one)
