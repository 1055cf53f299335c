"""Runs killed at random moments, and run again: bit for bit as if left alone."""

import os
import subprocess
import sys

import pytest
from two_processes import REPOSITORY


def killed(times, seed, folder):
    """How many of the processes were at work when they were killed."""
    command = [sys.executable, "tests/killed_runs.py", str(times), str(seed), str(folder)]
    environment = {"PYTHONPATH": str(REPOSITORY)}

    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_is_killed_at_twenty_random_moments_goes_on(tmp_path):
    assert killed(20, 2, tmp_path) >= 8  # of a resumed run less is left
