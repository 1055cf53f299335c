"""Runs Python in a process of its own, for tests."""

import os
import subprocess
import sys

from tests.support.folders import REPOSITORY

LIMIT = 300  # seconds: far above what a tiny run takes on a busy machine; a hang fails here


def python(*arguments, folder=REPOSITORY, **variables):
    """Runs `python <arguments>` with the repository on the path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
