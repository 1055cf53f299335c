"""What a run or a sweep that was killed has left once it ends: all of it, and nothing else."""

import numpy as np


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
