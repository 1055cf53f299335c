"""The commands of docs/sweeps.md on a scheduler and two workers give what one process gives."""

import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from experiments import run_sort
from experiments.lab.experiment import describe_experiment
from tests.support.folders import REPOSITORY
from tests.support.runs import arrays, run

pytest.importorskip("distributed")
PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text("utf-8")
(BLOCK,) = re.findall(r"```\n(PYTHONPATH=\. dask scheduler\n.*?)```", PAGE, re.DOTALL)
SCHEDULER, WORKER, RUN = (line.split("   ")[0] for line in BLOCK.splitlines())
ADDRESS = re.compile(r"tcp://[\d.]+:\d+")
TINY = [*describe_experiment("run_sort").presets["tiny"], "--depth=1,2"]
LOCAL = ["--host=127.0.0.1", "--no-dashboard"]


@pytest.fixture
def start():
    """start(command of the page, *more arguments) → its process, in the clone; ended afterwards."""
    processes = []

    def begin(command, *arguments):
        variable, program, *words = shlex.split(command)
        name, _, value = variable.partition("=")
        assert program == "dask"
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *words, *arguments],
            cwd=REPOSITORY,
            env=os.environ | {name: value},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in reversed(processes):
        process.terminate()
        process.communicate(timeout=60)


def test_a_grid_on_two_workers_is_that_of_one_process(tmp_path, start):
    scheduler = start(SCHEDULER, *LOCAL, "--port=0")
    address = next(match[0] for line in scheduler.stderr if (match := ADDRESS.search(line)))
    for _ in range(2):
        worker = start(WORKER.replace("tcp://HOST:8786", address), *LOCAL)
        assert any("Registered to" in line for line in worker.stderr)
    *words, on_dask = shlex.split(RUN.replace("tcp://HOST:8786", address))
    assert words == ["python", "-m", "experiments.run_sort", "--depth=2,4,8"]
    for name, flag in (("dask", on_dask), ("one", "--jobs=1")):
        assert run(run_sort, [*TINY, flag], tmp_path / name) == 0
    one, dask = (arrays(tmp_path / name) for name in ("one", "dask"))
    assert set(one) == set(dask)
    for name in (name for name in one if "/seconds/" not in name):
        np.testing.assert_allclose(dask[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
