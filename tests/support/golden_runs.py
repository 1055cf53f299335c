"""Run folders made of the arrays that tests/golden/texts/runs has: nothing is compiled."""

import math
from pathlib import Path
from types import ModuleType

import pytest

from experiments.lab import cli, provenance, run
from experiments.lab.experiment import import_experiment, read_run
from experiments.lab.flags import Mode
from tests.support.golden import TEXTS, read_arrays

MOST_ROWS = 60  # of a table that a text shows, at equal distances
ENVIRONMENT = {
    "python": "3.11.2",
    "platform": "Linux",
    "versions": {"jax": "0.10.2", "numpy": "2.4.0"},
    "backend": "cpu",
    "device": "cpu",
    "processor": "A processor, 2 cores",
    "num_devices": 2,
    "git": "0123456789abcdef0123456789abcdef01234567",
    "started": "2026-11-29 12:00:00",
}


def arrays_path(name: str) -> Path:
    """Returns the file with the arrays of an experiment."""
    return TEXTS / "runs" / f"{name}.arrays"


def list_arguments(module: ModuleType) -> list[str]:
    """Lists the arguments of an experiment's tiny size, in one process."""
    return [*module.EXPERIMENT.presets["tiny"], *["--jobs=1"] * ("jobs" in module.FLAGS)]


def make_folder(name: str, folder: Path) -> None:
    """Makes the run folder of an experiment from the arrays that are kept, as of one machine."""
    module = import_experiment(name)
    options = cli.parse_flags(module.FLAGS, [*list_arguments(module), f"--output_dir={folder}"])
    options.mode = Mode(begin_with=read_arrays(arrays_path(name).read_text("utf-8")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "environment", lambda: dict(ENVIRONMENT))
        patch.setattr(run, "command_line", lambda: f"python -m experiments.{name}")
        module.main(options)


def describe_folder(name: str, folder: Path) -> dict[str, str]:
    """Writes all that a reader sees of a run folder, by its place."""
    head, *rows = (folder / "results.csv").read_text("utf-8").splitlines()
    shown = rows[:: math.ceil(len(rows) / MOST_ROWS) or 1]
    parts = {"results.csv": "\n".join([f"{len(rows)} rows", head, *shown])}
    for path in [folder / "summary.json", *folder.glob("figures/*.png")]:
        parts[path.relative_to(folder).as_posix()] = path.read_text("utf-8")
    finished = read_run(import_experiment(name), folder)
    parts["claims"] = "\n".join(f"{c.key} | {c.setting} | {c.estimate}" for c in finished.claims)
    parts["comparisons"] = "\n".join(
        f"{c.quantity} | {c.measured} | {c.published} | {c.note} | {c.source}"
        for c in finished.comparisons
    )
    parts["finding"] = str(finished.finding)
    return parts
