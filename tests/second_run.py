"""A finished run, run again: nothing is made anew but what was deleted, and that as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

SHOWN = ("results.csv", "summary.json", "report.html", "figures/*")


def check_second_run(again: Callable[[], int], folder: Path, capsys: Any) -> None:
    """Runs a command again on its finished folder: as it is, then without what it shows.

    Every other file at a time, so that a figure lacks its PDF once and its PNG once.
    The caller makes sure that computing fails.

    Args:
        again: Runs the command and returns its exit code.
        folder: The run's folder.
        capsys: pytest's; what is printed must be the same each time.
    """
    shown = sorted(path for pattern in SHOWN for path in folder.glob(pattern))
    assert {"summary.json", "results.csv"} <= {path.name for path in shown}
    made = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in shown}
    capsys.readouterr()
    assert again() == 0
    printed = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in shown} == {p: m[0] for p, m in made.items()}
    for deleted in (shown[::2], shown[1::2]):
        for path in deleted:
            path.unlink()
        assert again() == 0
        assert capsys.readouterr().out == printed
        for path in deleted:
            assert path.read_bytes() == made[path][1], f"{path.name} came back as another"
