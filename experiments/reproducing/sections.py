"""Run folders of experiments as sections of a report, and answers to statements."""

import contextlib
import copy
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments import verdicts
from experiments.lab.experiment import (
    describe_experiment,
    import_experiment,
    read_run,
)
from experiments.lab.flags import FlagValue, parse_flags
from rank_collapse import runs
from rank_collapse.runs import files

DOCS = Path(__file__).parents[2] / "docs"
CAME_OUT = re.compile(r"^\*\*Result\.\*\* (.*)$", re.MULTILINE)
PRESETS = ("quick", "reported")
REGISTERED = "reported"  # the preset whose settings are those of the statements
TIME_NAMES = ("seconds", "cpu_seconds", "jobs", "at_least")


class RunRecord(NamedTuple):
    """One run of an experiment, as a section shows it.

    Attributes:
        folder: The run folder.
        command: The command that made it.
        details: Small print.
        label: Name of the run, where the experiment has several.
        code, output: Exit code and output of the process; a failed run is marked.
    """

    folder: Path
    command: str
    details: str
    label: str = ""
    code: int = 0
    output: str = ""


def list_runs(name: str, preset: str) -> dict[str, Sequence[str]]:
    """Lists {run: its arguments} of an experiment at a preset.

    A run is called "run_sort", or "run_sort/label" where there are several. This is also the place
    of its folder among the folders of the preset.

    Args:
        name: Name of the experiment.
        preset: Preset of the sizes.
    """
    labelled_runs = describe_experiment(name).runs(preset)
    return {f"{name}/{run}" if run else name: flags for run, flags in labelled_runs.items()}


def read_flag_values(name: str, preset: str) -> dict[str, FlagValue]:
    """Returns {flag: value, or values} of the last run of an experiment at a preset.

    Args:
        name: Name of the experiment.
        preset: Preset of the sizes.
    """
    *_, arguments = describe_experiment(name).runs(preset).values()
    options = parse_flags(copy.deepcopy(import_experiment(name).FLAGS), arguments)
    return {flag: options[flag].value for flag in options} | options.axes


def until_decided(name: str, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a run that adds draws until its statements are decided.

    Args:
        name: Name of the experiment; one without a budget has a fixed number of draws.
        arguments: Arguments of the preset.
    """
    budget = verdicts.PROTOCOL.budgets.get(name)
    if budget is None:
        return [*arguments]
    counts = import_experiment(name).FLAGS.counts
    other_arguments = [a for a in arguments if not a.startswith(f"--{counts}=")]
    return [*other_arguments, "--until=decided", f"--{counts.replace('num_', 'max_')}={budget}"]


def run_command(run: str, arguments: Sequence[str], folder: Path) -> str:
    """Writes the command of a run.

    Args:
        run: See `list_runs`.
        arguments: Values of its flags.
        folder: The run folder.
    """
    name = run.partition("/")[0]
    return f"python -m experiments.{name} {shlex.join([*arguments, f'--output_dir={folder}'])}"


def make_section(name: str, records: Sequence[RunRecord]) -> verdicts.Section:
    """Makes one section of the report from the run folders of an experiment.

    Args:
        name: Name of the experiment.
        records: Runs of the experiment.
    """
    experiment = describe_experiment(name)
    figures, claims, comparisons, errors = [], [], [], []
    finding, picture = "", b""
    for record in records:
        label = f"{record.label}: " if record.label else ""
        try:
            if record.code:
                raise runs.RunError(f"exit code {record.code}")
            # What it prints its process has printed already.
            with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                published = read_run(import_experiment(name), record.folder)
            paths = {path.stem: path for path in (record.folder / "figures").glob("*.png")}
            figures += [
                (paths[figure].read_bytes(), label + caption)
                for figure, caption in experiment.figures.items()
                if figure in paths  # parts of an experiment that a preset leaves out have none
            ]
            if published.finding is not None and not finding:
                figure, finding = published.finding
                picture = paths[figure].read_bytes()
            claims += published.claims
            comparisons += [replace(c, quantity=label + c.quantity) for c in published.comparisons]
        except Exception as error:  # one broken experiment must not take the others' report with it
            errors.append(f"{label}{type(error).__name__}: {error}\n{record.output[-2000:]}")
    return verdicts.Section(
        name,
        experiment.title,
        experiment.claim,
        "\n".join(record.command for record in records),
        finding,
        picture,
        read_result(name),
        figures,
        claims,
        comparisons,
        details=" ".join(
            (f"{record.label}: " if record.label else "") + record.details for record in records
        ),
        error="\n".join(errors),
    )


def read_result(name: str) -> str:
    """Reads the result of an experiment from its page of the site; "" if it has none."""
    page = DOCS / "experiments" / f"{name}.md"
    paragraph = CAME_OUT.search(page.read_text("utf-8")) if page.exists() else None
    return paragraph[1].replace("](../", "](") if paragraph else ""  # links from one folder higher


def save_time(parent: Path, name: str, result: Any, jobs: int, resumed: bool = False) -> None:
    """Saves the duration of a run: the sum of its parts if it was interrupted.

    Args:
        parent: Folder that holds the run folders.
        name: The run, see `list_runs`.
        result: `running.ProcessResult` of its process.
        jobs: Number of runs side by side.
        resumed: Whether an earlier process began it; its time is then added.
    """
    times = read_times(parent)
    earlier = times.get(name, dict.fromkeys(TIME_NAMES, 0.0) | {"at_least": 1.0})
    if not resumed:
        earlier = dict.fromkeys(TIME_NAMES, 0.0)
    times[name] = {
        "seconds": round(earlier["seconds"] + result.seconds, 1),
        "cpu_seconds": round(earlier["cpu_seconds"] + result.cpu_seconds, 1),
        "jobs": max(jobs, earlier["jobs"]),
        "at_least": earlier["at_least"],
    }
    runs.make_folder(parent)
    runs.write_atomically(parent / "times.json", json.dumps(times, indent=2).encode())


def read_times(parent: Path) -> dict[str, dict[str, float]]:
    """Reads {run: its `TIME_NAMES`}; a damaged file has none.

    "at_least" is 1 if a process of unknown duration computed a part of the run.
    """
    try:
        times = files.read_object(parent / "times.json")
        return {n: {k: float(took.get(k, 0)) for k in TIME_NAMES} for n, took in times.items()}
    except (runs.RunError, TypeError, AttributeError, ValueError):
        return {}


def answer_sections(sections: Sequence[verdicts.Section], preset: str) -> list[verdicts.Answer]:
    """Answers all statements that have rows in any of the sections.

    Args:
        sections: Sections of the experiments.
        preset: Their sizes; the settings of the preset of the pages are registered.
    """
    rows = [row for section in sections for row in section.claims]
    return verdicts.answer_statements(verdicts.STATEMENTS, rows, preset == REGISTERED)
