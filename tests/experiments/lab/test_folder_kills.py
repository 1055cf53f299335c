"""A run that is killed at any of its files and run again leaves the files of an undisturbed run."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# The stub replaces training: a state that goes on from its checkpoints, then a cached part, then
# what is published. Processes are forked, so that one imports for all. A child kills itself, as
# kill -9 does, while its n-th file still has its temporary name.
CODE = """
import os, signal, sys
import numpy as np
from experiments.lab.folder import RunFolder

replace = os.replace

def stub(folder):
    with RunFolder(folder, {"depth": 3}) as run:
        def measure():
            step, state = run.restore_checkpoint({"w": np.zeros(3)}) or (0, {"w": np.ones(3)})
            for step in range(step + 1, 5):
                state = {"w": np.sin(state["w"] + step)}
                run.save_checkpoint(step, state)
            return state
        found = run.cached("results", measure)
        run.save_table({"value": value} for value in found["w"])
        if not run.has_file("models/a.npz"):
            run.save_file("models/a.npz", found["w"].tobytes())
        if run.summary is None:
            run.finish({"mean": float(found["w"].mean())})

def killed_at(nth, folder):
    def count(*paths):
        nonlocal nth
        nth -= 1
        if nth == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = count
    stub(folder)

def in_child(call, *arguments):
    child = os.fork()
    if not child:
        call(*arguments)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

nth, code = 0, None
while code != 0:
    nth += 1
    folder = f"{sys.argv[1]}/{nth}"
    code = in_child(killed_at, nth, folder)
    again = in_child(killed_at, 2, folder)  # a second time, at another file
    assert code in (0, -9) and again in (0, -9) and in_child(stub, folder) == 0
print(nth)
"""


def read_content(folder):
    """Reads {name: bytes} of a run's files, without the times in its log and environment."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
    files = {name: data for name, data in files.items() if name not in (".lock", "config.json")}
    with np.load(folder / "arrays.npz") as saved:
        return files | {"arrays.npz": {name: saved[name].tobytes() for name in saved.files}}


@pytest.mark.full
def test_a_run_killed_at_any_of_its_files_goes_on(tmp_path):
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    last = int(process.stdout)  # the first run not killed: it writes fewer files than its number
    # config.json, 4 checkpoints, arrays.npz, results.csv, models/a.npz, summary.json: 9 files
    assert last > 9
    expected = read_content(tmp_path / str(last))
    names = {"arrays.npz", "results.csv", "models/a.npz", "summary.json"}
    assert expected.keys() == names
    for nth in range(1, last):
        assert read_content(tmp_path / str(nth)) == expected
        assert Path(tmp_path / str(nth) / "config.json").exists()
