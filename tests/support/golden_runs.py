"""Run folders made of the arrays that tests/golden/texts/runs has: nothing is compiled."""

from pathlib import Path
from types import ModuleType

from experiments.lab import cli
from experiments.lab.experiment import import_experiment, read_run
from experiments.lab.flags import Mode
from tests.support.golden import TEXTS, read_arrays


def arrays_path(name: str) -> Path:
    """Returns the file with the arrays of an experiment."""
    return TEXTS / "runs" / f"{name}.arrays"


def list_arguments(module: ModuleType) -> list[str]:
    """Lists the arguments of an experiment's tiny size, in one process."""
    return [*module.EXPERIMENT.presets["tiny"], *["--jobs=1"] * ("jobs" in module.FLAGS)]


def make_folder(name: str, folder: Path) -> None:
    """Makes the run folder of an experiment from the arrays that are kept."""
    module = import_experiment(name)
    options = cli.parse_flags(module.FLAGS, [*list_arguments(module), f"--output_dir={folder}"])
    options.mode = Mode(begin_with=read_arrays(arrays_path(name).read_text("utf-8")))
    module.main(options)


def describe_folder(name: str, folder: Path) -> dict[str, str]:
    """Writes all that a reader sees of a run folder, by its place."""
    parts = {}
    for path in [folder / "results.csv", folder / "summary.json", *folder.glob("figures/*.png")]:
        parts[path.relative_to(folder).as_posix()] = path.read_text("utf-8")
    finished = read_run(import_experiment(name), folder)
    parts["claims"] = "\n".join(f"{c.key} | {c.setting} | {c.estimate}" for c in finished.claims)
    parts["comparisons"] = "\n".join(
        f"{c.quantity} | {c.measured} | {c.published} | {c.note} | {c.source}"
        for c in finished.comparisons
    )
    parts["finding"] = str(finished.finding)
    return parts
