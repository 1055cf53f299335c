"""A process that runs binaries one after the other, started by `process.start`.

A line of its standard input is a JSON list, a module with `main` and FLAGS, and arguments. After
what that run prints comes a line of `ENDED`, the exit code and the CPU seconds. At the end of the
input, as where the parent was killed, the run that is at work stops as by SIGTERM.
"""

import functools
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from experiments.shell import cli, devices
from experiments.shell.process import ENDED
from rank_collapse.printed import print_anything


def main() -> None:
    print_anything()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    working = threading.Event()
    threading.Thread(target=_read, args=(lines, working), daemon=True).start()
    devices.start()
    while line := lines.get():
        working.set()
        begun = time.process_time()
        code = run(*json.loads(line))
        sys.stdout.flush()
        if code > 128:
            os._exit(code)  # threads that still compile would keep the process alive
        # Not by print(), which escapes the character that no run can print.
        os.write(1, f"{ENDED}{code} {time.process_time() - begun:.1f}\n".encode())
        working.clear()


def run(module: str, *arguments: str) -> int:
    """Runs a binary as `python -m module` would, or a script by its path; its exit code."""
    own: Any = script(module) if module.endswith(".py") else importlib.import_module(module)
    sys.modules["__main__"], sys.argv = own, [str(own.__file__), *arguments]
    try:
        return cli.execute(own.main, own.FLAGS, arguments)
    except Exception:
        traceback.print_exc()
        return 1


@functools.cache
def script(path: str) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(lines, working):
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    if working.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
