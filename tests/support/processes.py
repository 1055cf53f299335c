"""Runs Python in a process of its own, for tests."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds: far above what a tiny run takes on a busy machine; a hang fails here


PATH = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))


def python(*arguments, folder=REPOSITORY, **variables):
    """Runs `python <arguments>` with the repository and its tests on the path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": PATH} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
