"""The description of an experiment, and how finished runs are read.

    EXPERIMENT = Experiment(
        order=50, title="Ranks", brief=..., claim=..., presets={...},
        figures=describe_figures(ranks_figure),
    )

`reproduce`, the report, the pages and the tests read `EXPERIMENT` and `FLAGS` of the modules that
`list_experiments` names, and finished folders by `read_run`.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from experiments.lab.flags import Mode, read_flags
from experiments.lab.folder_files import read_summary
from experiments.lab.run import Run
from rank_collapse.runs.files import damaged_file_error


@dataclass(frozen=True)
class Experiment:
    """The description of an experiment for pages and the report.

    Attributes:
        order: Place in the report, ascending.
        title: Heading of its section of the report.
        brief: Its purpose, in the README's table of experiments.
        claim: The claim of the paper in a sentence or two, with its figure or table.
        presets: Arguments by preset: "quick" (seconds on two cores), "reported" (the arguments of
            the pages), and "tiny", with which tests compute everything; {run: arguments} for a
            preset of several runs.
        figures: {name: caption} of the figures that the report shows, in their order.
        needs: A folder that must exist; `reproduce` leaves the experiment out without it.
    """

    order: int
    title: str
    brief: str
    claim: str
    presets: Mapping[str, str | Mapping[str, str]]
    figures: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    def __post_init__(self):
        split = {n: p.split() if isinstance(p, str) else p for n, p in self.presets.items()}
        object.__setattr__(self, "presets", split)

    def runs(self, preset: str) -> dict[str, Sequence[str]]:
        """Lists {run: its arguments} of a preset; "" is the name of a single run."""
        arguments = self.presets[preset]
        if not isinstance(arguments, Mapping):
            return {"": arguments}
        return {run: text.split() for run, text in arguments.items()}


def describe_figures(*functions: Callable) -> dict[str, str]:
    """Reads {name: caption} of functions X_figure: the name is X, the caption the docstring."""
    return {
        draw.__name__.removesuffix("_figure"): " ".join((inspect.getdoc(draw) or "").split())
        for draw in functions
    }


def read_run(module: ModuleType, folder: Path) -> Run:
    """Reads a finished folder by the experiment's own `main`, without measuring or writing.

    Args:
        module: Module of the experiment.
        folder: The run folder.

    Raises:
        RunError: The run is not complete, or damaged.
    """
    selection = read_summary(folder).get("shown", {})
    if not isinstance(selection, Mapping):
        raise damaged_file_error(folder / "summary.json", f"shown={selection} names no flags")
    options = read_flags(module.FLAGS, folder, selection)
    options.mode = Mode(is_read=True)
    return module.main(options)


def list_experiments() -> list[str]:
    """Lists the modules that hold an experiment, in the order of the report."""
    paths = Path(__file__).parents[1].glob("*.py")
    names = sorted(path.stem for path in paths if path.stem.startswith(("run_", "check_")))
    return sorted(names, key=lambda name: describe_experiment(name).order)


def import_experiment(name: str) -> ModuleType:
    """Imports the module of an experiment."""
    return importlib.import_module(f"experiments.{name}")


def describe_experiment(name: str) -> Experiment:
    """Returns the description of the experiment in a module."""
    return import_experiment(name).EXPERIMENT
