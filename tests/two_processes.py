"""Processes of tests: one that runs Python, or two of one run, on this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds: far above what a tiny run takes on a busy machine; a hang fails here


PATH = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))


def python(*arguments, folder=REPOSITORY, **variables):
    """What `python <arguments>` did that finds the repository and its tests."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PATH} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def run_both(*arguments, **environment):
    """[(exit code, standard output, standard error)] of both processes of `python <arguments>`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for index in (0, 1):
        env = (
            os.environ
            | environment
            | {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
                "MPLBACKEND": "Agg",
                "PYTHONPATH": PATH,
            }
        )
        command = [sys.executable, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=env, cwd=REPOSITORY, text=True, **pipes))
    try:
        printed = [process.communicate(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(p.returncode, *text) for p, text in zip(started, printed, strict=True)]
