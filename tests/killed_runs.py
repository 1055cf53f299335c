"""Binaries run in forks of one process and killed at random moments: what their tests are made of.

    python tests/killed_runs.py 20 1 FOLDER      (times, seed of the moments)

Forks, so that the imports are paid for once; the moments are drawn from the time that an
undisturbed run takes, so that they fall into compiling, training, evaluating and writing alike.
Prints how many processes were still at work when they were killed.
"""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import quick_training

from experiments.shell import cli

RUN = (*quick_training.SMALL, "--checkpoint_seconds=0", "--keep_models")


def start(main, flags, *arguments):
    """The number of a process that runs a binary."""
    number = os.fork()
    if not number:
        code = 99
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            try:
                code = cli.execute(main, flags, arguments)
            finally:
                sys.stderr.flush()
                os._exit(code)
    return number


def ended(number):
    """The exit code of a process, once it has one."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def finish(main, flags, *arguments):
    """Runs a binary to its end; the seconds that it took."""
    begun = time.monotonic()
    assert ended(start(main, flags, *arguments)) == 0, arguments
    return time.monotonic() - begun


def killed(number, after, by=signal.SIGKILL):
    """Whether a process was at work when a signal was sent to it; it ends in no other way."""
    time.sleep(after)
    os.kill(number, by)
    code = ended(number)
    # 99 and -by: before it had begun to listen.
    assert code in (0, -by, 128 + by, 99), (by, code)
    return code != 0


def content(folder):
    """{name: bytes} of all results of a run or a sweep but times."""
    found = {}
    for path in sorted(folder.rglob("*.*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".npz":
            with np.load(path) as saved:
                found[name] = {n: saved[n].tobytes() for n in saved.files if "seconds" not in n}
        elif path.suffix in (".csv", ".safetensors") or (
            path.name == "summary.json" and "seconds" not in path.read_text()
        ):
            found[name] = path.read_bytes()
    assert found, folder
    return found


def check_whole(folder, expected):
    """A run's results are the expected, and no file is half-written."""
    assert content(folder) == expected, folder
    left = [p for p in folder.rglob("*") if p.name.endswith(".tmp") or p.name.startswith("tmp-")]
    assert not left and not list(folder.rglob("checkpoints/*")), left


def kill_runs(folder, times, draw):
    """Runs of a training, each killed up to three times, by SIGKILL, SIGTERM and SIGINT."""
    binary = quick_training.main, quick_training.FLAGS
    finish(*binary, *RUN, f"--output_dir={folder / 'compiled'}")  # what it compiles is kept
    takes = finish(*binary, *RUN, f"--output_dir={folder / 'whole'}")
    expected, done, hit, run = content(folder / "whole"), 0, 0, 0
    check_whole(folder / "compiled", expected)
    while done < times:
        run += 1
        again = f"--output_dir={folder / str(run)}"
        for _ in range(min(3, times - done)):
            by = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[done % 3]
            done += 1
            hit += killed(start(*binary, *RUN, again), draw.uniform(0, takes), by)
        finish(*binary, *RUN, again)
        check_whole(folder / str(run), expected)
    return hit


if __name__ == "__main__":
    times, seed, folder = sys.argv[1:]
    print(kill_runs(Path(folder), int(times), random.Random(int(seed))))
